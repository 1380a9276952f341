"""Where a process is in a switch: noted by the thread that switches, and by no other."""

from __future__ import annotations

import threading
import time

import pytest

from dynatrain_megatron import faults, whereabouts
from dynatrain_megatron.errors import SwitchAborted, TransitionError
from dynatrain_megatron.faults import Fault, InjectedFault, Kind, Phase
from dynatrain_megatron.whereabouts import Place, begin, from_text, here, to_text, waiting


def nothing() -> None:
    pass


def test_a_phase_and_what_is_waited_for_in_it() -> None:
    heard: list[str] = []
    with whereabouts.switching(lambda: heard.append(here().phase)):
        for phase in ("memory", "wire", "wire", "memory", "wire", "wire"):
            begin(phase, 0)
        assert heard == ["memory", "wire"] * 2  # in each stage once
        with waiting("rank 0: all-gather"):
            since = here().since
            assert (here().phase, here().waits_for) == ("wire", "rank 0: all-gather")
            time.sleep(0.001)
            whereabouts.goes_on()
            assert here().since > since
            with waiting("the same, in parts"):
                pass
            assert here().waits_for == "rank 0: all-gather"
        assert (here().phase, here().waits_for) == ("wire", "")
    assert here().phase == ""
    begin("plan", 0)
    with waiting("nobody"):
        assert here().phase == ""  # not in a switch


def test_a_wait_that_fails_stays_told() -> None:
    with pytest.raises(TransitionError), whereabouts.switching(nothing):
        begin("plan", 0)
        with pytest.raises(RuntimeError), waiting("rank 0: all-gather"):
            raise RuntimeError("nobody came")
        assert here().waits_for == "rank 0: all-gather"
        raise TransitionError("so the job ends")
    assert here().phase == "plan"  # and others can still ask
    with pytest.raises(SwitchAborted), whereabouts.switching(nothing):
        raise SwitchAborted("the job goes on")
    assert here().phase == ""


def test_other_threads_wait_unseen() -> None:
    def build() -> None:
        begin("groups", 0)
        with waiting("the world to be built"):
            seen.append(here())

    seen: list[Place] = []
    with whereabouts.switching(nothing):
        begin("quiesce", 0)
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        assert seen == [here()] and here().phase == "quiesce"


def test_faults_happen_as_a_phase_begins_and_find_it_noted() -> None:
    faults.arm([Fault((1,), Phase.plan, Kind.exception)])
    try:
        with pytest.raises(InjectedFault), whereabouts.switching(nothing):
            begin("replicas", 1)  # one that no fault can be in
            begin("plan", 1)
        assert here().phase == "plan"
    finally:
        faults.arm(())


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (("wire",), "last heard of in phase wire, at work for 0.0 s"),
        (("plan", "rank 1: all-gather"), "phase plan, waiting (rank 1: all-gather) for 0.0 s"),
        ((), "last heard of before it began to switch"),
    ],
)
def test_a_sign_of_life_tells_it(where: tuple[str, ...], told: str) -> None:
    place = Place(*where)
    assert told in str(from_text(to_text(3, place)))
    assert to_text(3, place) != to_text(4, place)


def test_who_was_never_heard_of() -> None:
    assert str(from_text(b"")) == "last heard of before it began to switch"
