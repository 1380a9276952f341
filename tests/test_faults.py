"""Faults on purpose: how they are written, when they happen, and what each of them does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from dynatrain_megatron import faults
from dynatrain_megatron.errors import ConfigError
from dynatrain_megatron.faults import Fault, InjectedFault, Kind, Phase, inject, takes_flip
from tests.composed import config_of


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm(())


def written(text: str) -> tuple[Fault, ...]:
    return config_of([f"faults={text}"]).planned_faults()


def test_no_fault_is_the_default() -> None:
    assert config_of([]).planned_faults() == ()
    for phase in Phase:
        inject(phase, 0)
    assert not takes_flip(0)


def test_faults_are_read_from_overrides() -> None:
    assert written("[{rank: 1, phase: wire, kind: kill}]") == (Fault((1,), Phase.wire, Kind.kill),)
    assert written(
        "[{rank: [0, 2], phase: vote, kind: slow, seconds: 0.5},"
        " {rank: 3, phase: pack, kind: oom, at: 2}]"
    ) == (
        Fault((0, 2), Phase.vote, Kind.slow, seconds=0.5),
        Fault((3,), Phase.pack, Kind.oom, at=2),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("3", "faults=3 is not allowed; faults must be a list such as [{rank: 1"),
        ("[kill]", "faults[0]=kill is not allowed; it must be like {rank: 1"),
        ("[{rank: 1, kind: kill}]", "lacks phase; it must be like"),
        ("[{rank: 1, phase: wire, kind: kill, when: 2}]", "key 'faults[0].when' is unknown"),
        ("[{rank: one, phase: wire, kind: kill}]", "faults[0].rank must be a rank, or a list"),
        ("[{rank: [], phase: wire, kind: kill}]", "faults[0].rank must be a rank, or a list"),
        ("[{rank: -1, phase: wire, kind: kill}]", "faults[0].rank must be a rank, or a list"),
        ("[{rank: 1, phase: wires, kind: kill}]", "faults[0].phase must be quiesce, groups"),
        ("[{rank: 1, phase: wire, kind: fire}]", "faults[0].kind must be exception, kill"),
        ("[{rank: 1, phase: wire, kind: kill, at: 0}]", "faults[0].at must be a whole number"),
        ("[{rank: 1, phase: wire, kind: slow, seconds: -1}]", "must be a number of at least 0"),
        ("[{rank: 1, phase: pack, kind: bitflip}]", "faults[0].phase must be wire where kind is"),
    ],
)
def test_a_wrong_fault_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(text)
    assert told in str(caught.value)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["rank", "phase", "kind", "at", "seconds", "more"]),
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
            | st.sampled_from([*Phase, *Kind]) | st.lists(st.integers(), max_size=2),
        )
        | st.integers(),
        max_size=3,
    )
)  # fmt: skip
def test_whatever_is_written_is_read_or_refused(entries: list[object]) -> None:
    from dynatrain_megatron.config import DynaTrainConfig

    try:
        found = DynaTrainConfig(faults=tuple(entries)).planned_faults()
    except ConfigError as error:
        assert "faults[" in str(error)
    else:
        assert len(found) == len(entries)


def test_a_fault_happens_once_where_it_is_told() -> None:
    faults.arm([Fault((1, 2), Phase.plan, Kind.exception, at=2)])
    for rank in (0, 1, 2):
        inject(Phase.plan, rank)
        inject(Phase.build, rank)
    inject(Phase.plan, 0)
    for rank in (1, 2):
        with pytest.raises(InjectedFault, match=f"rank {rank}: injected exception in phase plan"):
            inject(Phase.plan, rank)
        inject(Phase.plan, rank)


def test_memory_runs_out_as_in_torch() -> None:
    faults.arm([Fault((0,), Phase.memory, Kind.oom)])
    with pytest.raises(torch.OutOfMemoryError, match="rank 0: injected oom in phase memory"):
        inject(Phase.memory, 0)


def test_a_slow_rank_goes_on() -> None:
    faults.arm([Fault((0,), Phase.commit, Kind.slow, seconds=0.05)])
    begin = time.monotonic()
    inject(Phase.commit, 0)
    assert time.monotonic() - begin >= 0.05


def test_a_bit_is_flipped_once_and_later() -> None:
    faults.arm([Fault((0, 1), Phase.wire, Kind.bitflip)])
    assert not takes_flip(0)
    inject(Phase.wire, 0)
    assert not takes_flip(1)
    assert [takes_flip(0), takes_flip(0)] == [True, False]


def in_a_process(kind: Kind) -> int:
    """The process id of a child that has the fault and would say 0 at its end."""
    pid = os.fork()
    if pid == 0:
        faults.arm([Fault((0,), Phase.groups, kind)])
        inject(Phase.groups, 0)
        os._exit(0)
    return pid


def test_a_killed_rank_says_nothing() -> None:
    _, status = os.waitpid(in_a_process(Kind.kill), 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_a_hanging_rank_lives_and_does_nothing() -> None:
    pid = in_a_process(Kind.hang)
    try:
        time.sleep(0.2)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
