"""A thread that makes groups goes on by so many as the main thread lets it."""

from __future__ import annotations

import threading

from dynatrain_megatron.elastic.gate import Gate


def test_a_few_at_a_time_and_then_all() -> None:
    gate, made = Gate(), []

    def make() -> None:
        for number in range(9):
            gate()
            made.append(number)

    thread = threading.Thread(target=make)
    thread.start()
    assert not gate.let_pass(4, thread, timeout_s=10) and made == [0, 1, 2, 3]
    assert not gate.let_pass(3, thread, timeout_s=10) and len(made) == 7
    gate.open()
    thread.join(10)
    assert made == list(range(9))
    assert gate.let_pass(4, thread, timeout_s=10)


def test_one_that_ends_early_or_hangs_holds_nobody_up() -> None:
    gate, going_on = Gate(), threading.Event()

    def make() -> None:
        gate()
        going_on.wait(10)

    thread = threading.Thread(target=make)
    thread.start()
    assert not gate.let_pass(1, thread, timeout_s=0.05)
    going_on.set()
    assert gate.let_pass(1, thread, timeout_s=10)
