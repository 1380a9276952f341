"""A short soak of made-up jobs, and that a soak finds what it is there to find."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dynatrain_megatron.config import EngineSchedule, Verify
from dynatrain_megatron.engine.execute import _Run, _Staging
from dynatrain_megatron.faults import Kind, Phase
from dynatrain_megatron.transition.move import Move
from tests.engine.late import LateTransport, UseAfterFree, poison
from tests.engine.test_transport import on_ends
from tests.soak.engine import FAMILIES, Made, Outcome, Transition, soak

SEED = 3


def test_random_transitions_lose_no_bit_and_miss_no_fault() -> None:
    """benchmarks/soak.py does a thousand of them."""
    found = soak(6, SEED, fault_share=0.5)
    assert [outcome.wrong for outcome in found] == [[]] * len(found), wrong_of(found)
    assert {outcome.transition.family for outcome in found} == set(FAMILIES)
    assert all(outcome.checked_bytes for outcome in found)
    fired = [outcome for outcome in found if outcome.fired]
    assert fired and all(outcome.result != "done" for outcome in fired)


def wrong_of(found: Sequence[Outcome]) -> list[tuple[Transition, list[str]]]:
    return [(outcome.transition, outcome.wrong) for outcome in found if outcome.wrong]


def transition(job: Made, target: str, **changes: Any) -> Transition:
    """One in many windows, each of them with staging memory that is used again and again."""
    settings: dict[str, Any] = {
        "schedule": EngineSchedule.direct,
        "verify": Verify.off,
        "frees": False,
        "staging_bytes": 50_000,
        "window_ops": 32,
        "relay": False,
        "own_plans": False,
        "nodes": 1,
        "hosts": 16,
        "part_bytes": 1 << 19,
        "shared": False,
        "gap": 0,
        "fault": None,
        "seed": 3,
    }
    return Transition(0, job.family, job.layout, target, (0, 1, 2, 3), **{**settings, **changes})


def job() -> Made:
    """In tp4."""
    made = Made("dense GPT", 0)
    made._enter("tp4", None, shared=False, gap=0)
    return made


TARGET = "tp2-dp2-noopt"


@functools.cache
def sound() -> Outcome:
    """What becomes of it where nothing is wrong."""
    return job().run(transition(job(), TARGET))


def never_wait(run: Any, checks: Any) -> None:
    """The first window's receives are unpacked before they have been waited for."""
    window, transfer = run._under_way.popleft()
    run._streams.unpack(window.unpack)
    transfer.wait(timeout_s=run._timeout_s)


def always_the_first(staging: Any) -> Any:
    """Staging memory is used anew while its last window is under way."""
    staging._buffers[0].clear()
    return staging._buffers[0]


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [(_Run, "_finish_first", never_wait), (_Staging, "borrow", always_the_first)],
    ids=["unpacked too early", "staging memory used twice"],
)
def test_memory_that_is_touched_too_early_is_found(
    owner: Any, name: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sound().wrong == [] and sound().checked_bytes > 0
    monkeypatch.setattr(owner, name, mistake)
    found = job().run(transition(job(), TARGET))
    assert any("main_param" in text for text in found.wrong), found.wrong


def test_sources_that_are_freed_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All after the first stage, though later ones need them."""
    wanted = transition(job(), TARGET, frees=True, verify=Verify.messages)
    whole = job().run(wanted)
    assert whole.wrong == [] and whole.stages > 1
    real = Move._free

    def freed(move: Any, chosen: Any, *, first: bool) -> None:
        real(move, chosen | True, first=first)

    monkeypatch.setattr(Move, "_free", freed)
    found = job().run(wanted)
    assert any(": target " in text for text in found.wrong), found.wrong


def test_a_message_in_memory_that_was_given_back_is_not_carried() -> None:
    ends = LateTransport.mesh(2, seed=1)
    sent, got = torch.zeros(8), torch.zeros(8)
    ends[0].start([(1, sent)], [])
    sent.untyped_storage().resize_(0)
    with pytest.raises(UseAfterFree):
        ends[1].exchange([], [(0, got)], timeout_s=1)


def test_a_flip_that_nobody_looks_for_is_found() -> None:
    fault = Phase.wire, Kind.bitflip, 1
    found = job().run(transition(job(), TARGET, fault=fault))
    assert found.fired and "was not noticed" in found.wrong[0]
    assert len(found.wrong) == 2  # and one element is wrong
    caught = job().run(transition(job(), TARGET, fault=fault, verify=Verify.messages))
    assert caught.fired and caught.result == "aborted" and caught.wrong == []


def test_what_is_received_is_undefined_until_it_was_waited_for() -> None:
    """And what was sent may be read until then."""
    ends = LateTransport.mesh(2, seed=1)

    def body(end: Any) -> Counter[str]:
        seen: Counter[str] = Counter()
        for _ in range(40):
            sent, got = torch.full((1000,), 7, dtype=torch.int32), torch.zeros(1000)
            transfer = end.start([(1 - end.rank, sent)], [(1 - end.rank, got)])
            seen["early"] += bool((got.view(torch.int32) == 7).all())
            transfer.wait(timeout_s=10)
            assert (got.view(torch.int32) == 7).all()
            poison(sent)
        return seen

    early = [seen["early"] for seen in on_ends(ends, body)]
    assert all(count < 40 for count in early)
