"""Which signals a process listens for, and what others' handlers are left."""

import os
import signal
import threading
from argparse import Namespace
from collections.abc import Iterator

import pytest

from dynatrain_megatron.plugin.signals import Signals

ARGS = Namespace(exit_signal_handler=False, exit_signal=signal.SIGTERM)


class Heard:
    """Stands in for a membership."""

    def __init__(self) -> None:
        self.has_notice = False
        self.requests = threading.Semaphore(0)

    def can_leave(self) -> bool:
        return True

    def read_request(self) -> None:
        self.requests.release()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _until_notice(heard: Heard) -> bool:
    return any(heard.has_notice or threading.Event().wait(0.01) for _ in range(500))


def test_one_signal_asks_and_another_leaves() -> None:
    heard = Heard()
    signals = Signals("SIGUSR2", "SIGUSR1", heard, ARGS)  # type: ignore[arg-type]
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.requests.acquire(timeout=5)
    assert not heard.has_notice
    os.kill(os.getpid(), signal.SIGUSR2)
    assert _until_notice(heard)
    signals.restore()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGUSR1)  # too late, and no harm
    assert not heard.requests.acquire(timeout=0.1)


def test_a_signal_that_is_to_leave_does_not_ask() -> None:
    heard = Heard()
    signals = Signals("SIGUSR1", "SIGUSR1", heard, ARGS)  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGUSR1)
    assert _until_notice(heard) and not heard.requests.acquire(timeout=0.05)
    signals.restore()


def test_what_the_script_or_megatron_listens_for_is_left_alone() -> None:
    def mine(*_: object) -> None:
        """A script's own handler."""

    signal.signal(signal.SIGUSR1, mine)
    Signals(None, "SIGUSR1", Heard(), ARGS).restore()  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGUSR1) is mine
    megatrons = Namespace(exit_signal_handler=True, exit_signal=signal.SIGUSR2)
    Signals("SIGUSR2", "SIGUSR2", Heard(), megatrons).restore()  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
