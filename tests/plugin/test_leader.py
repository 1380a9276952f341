"""Whom and what rank 0 announces: from the processes there are, and the degrees there were."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.config import ScheduleStep
from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.plugin.leader import Capacity, _read_request, closest, wanted_world
from dynatrain_megatron.policies import PolicyContext
from tests.plugin.announced import FOUR, Announced


def test_those_that_stay_come_first_then_those_that_wait() -> None:
    capacity = Capacity(("a", "b", "c"), frozenset("a"), ("d", "e"))
    assert capacity.take(3) == ("b", "c", "d")
    with pytest.raises(SwitchRefused, match="needs 5 processes; 4 can be had: 3 of the job, 1 of"):
        capacity.take(5)


@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 4, 6]),
    st.sampled_from([1, 2]),
    st.integers(1, 24),
)
def test_the_closest_layouts_are_parts_of_the_one_in_force(
    tp: int, pp: int, cp: int, world: int
) -> None:
    found = closest(ParallelLayout(tp=tp, pp=pp, cp=cp), world)
    own = {"tp": tp, "pp": pp, "cp": cp, "ep": 1, "world": world}
    assert (own in found) == (world % (tp * pp * cp) == 0)
    assert own not in found or found[0] == own
    assert {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "world": world} in found
    for wanted in found:
        assert world % (wanted["tp"] * wanted["pp"] * wanted["cp"]) == 0
        assert not any(own[axis] % wanted[axis] for axis in ("tp", "pp", "cp", "ep"))


def test_only_world_asks_for_other_ranks() -> None:
    assert wanted_world({"tp": 1, "world": 3}) == 3
    assert wanted_world({"tp": 1, "dp": 2}) is None and wanted_world("tp2-dp2") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "5", '{"rank": 1}', '{"world": 0}', '{"world": "2"}', '{"at": -1}'],
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(SwitchRefused):
        _read_request(text)


def test_what_is_wanted_later_keeps_nothing_else_from_being_done() -> None:
    """A request for later is checked at once, and announced only when its time is near."""
    job = Announced(lead_steps=10)
    said = job.asked_for(2, at=100)
    assert said == {"state": "waiting", "reason": "it is not to be before iteration 100"}
    assert job.asked_for(3, iteration=3)["state"] == "announced"
    assert [posted.change.target for posted in job.posted] == [FOUR[:3]]
    job.job.num_changes = 1
    for iteration in (4, 89):
        job.leader.announce(iteration, ())
    assert len(job.posted) == 1
    job.leader.announce(90, ())
    assert job.answers[-1]["state"] == "announced"
    assert (job.posted[-1].change.target, job.posted[-1].at) == (FOUR[:2], 100)
    refused = Announced(lead_steps=10).asked_for(4, at=100, layout={"tp": 5})
    assert refused == {"state": "refused", "reason": "tp*pp*cp=5 must divide world"}
    possible = Announced(lead_steps=10).asked_for(2, at=100, dry_run=True)
    assert possible["state"] == "possible"


def test_a_step_that_cannot_be_is_announced_as_such() -> None:
    """So that all processes drop it alike; those that wait have no part in it."""
    for changes, why in (
        ({"tp": 5, "world": 6}, "tp*pp*cp=5 must divide world"),
        ({"dp": 4}, "the job is in layout dp4 already"),
        ({"world": 9}, "the layout needs 9 processes; 6 can be had"),
    ):
        job = Announced(waiting=("e", "f"))
        job.leader.post_step(ScheduleStep(5, changes), 0)
        assert job.posted[0].refused.startswith(why) and job.posted[0].change.target == FOUR
    job = Announced(waiting=("e", "f"))
    job.leader.post_step(ScheduleStep(5, {"world": 6}), 0)
    assert not job.posted[0].refused and len(job.posted[0].change.target) == 6


def test_what_fails_for_those_that_leave_is_tried_again_later_and_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("dynatrain_megatron.plugin.leader.time.monotonic", lambda: now)
    job, at = Announced(), []
    assert job.after_notices("d") == FOUR[:3]
    job.give_up()
    for _ in range(800):
        now += 1.0
        num_posted = len(job.posted)
        job.leader.announce(3, ())
        if len(job.posted) > num_posted:
            at.append(now - 1000)
            job.give_up()
    assert [round(later - sooner) for sooner, later in pairwise(at)][:4] == [21, 41, 81, 161]
    assert job.asked_for(2)["state"] == "announced"  # others are not kept waiting


def test_a_policy_learns_what_was_refused_and_is_not_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, seen = 1000.0, []

    def policy(context: PolicyContext) -> dict[str, int]:
        seen.append(context.refused)
        return {"world": 3}

    monkeypatch.setattr("dynatrain_megatron.plugin.leader.time.monotonic", lambda: now)
    job = Announced(policy=policy)

    def boundary(iteration: int) -> None:
        job.leader.announce(iteration, ())
        job.leader.ask_policy(iteration, (), {})

    boundary(2)
    assert len(job.posted) == 1
    job.give_up()
    boundary(3)
    assert (len(job.posted), len(seen)) == (1, 1)
    now += 11
    boundary(4)
    assert (len(job.posted), seen) == (2, [(), ({"world": 3},)])
