"""Stages: every fragment in one of them, none reads what another frees, and the memory it takes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions, Topology, stages
from dynatrain_megatron.planner.staged import make_staged_plan
from dynatrain_megatron.planner.stages import (
    Room,
    SideMemory,
    Stages,
    choose_stages,
    one_stage,
    planned_peak,
)
from dynatrain_megatron.shapes.models import MODELS
from dynatrain_megatron.shapes.rosters import make_rosters
from dynatrain_megatron.vps import RosterSet
from dynatrain_megatron.vps.boxes import IntArray
from tests.planner.worlds import Case, Model, carry_out, irregular_cases, layout_case, mixed_cases

Layout = ParallelLayout


def chosen(case: Case, room: int = 0) -> Stages:
    bytes_of_room = np.full(case.source.num_ranks, room)
    return choose_stages(case.source, case.target, Room(bytes_of_room, bytes_of_room))


def part(case: Case, found: Stages, number: int) -> Case:
    """The fragments of one stage as a transition of its own."""
    sides = []
    for rosters, sets, stage in (
        (case.before, case.source, found.source),
        (case.after, case.target, found.target),
    ):
        own = [np.nonzero(stage[sets.rows_of(rank)] == number)[0] for rank in range(len(rosters))]
        sides.append(tuple(r.part(slots) for r, slots in zip(rosters, own, strict=True)))
    return Case(sides[0], sides[1])


@settings(max_examples=40, deadline=None)
@given(st.one_of(mixed_cases(), irregular_cases()), st.sampled_from([1 << 30, 500, 1, 0]))
def test_stages_together_are_the_whole_and_none_needs_another(case: Case, work: int) -> None:
    """With little work allowed, units are put together before they are put in order."""
    usual = stages._WORK, stages._LEAST_UNITS
    stages._WORK, stages._LEAST_UNITS = work, 4
    try:
        found = chosen(case)
    finally:
        stages._WORK, stages._LEAST_UNITS = usual
    used = set(found.source.tolist()) | set(found.target.tolist())
    assert used <= set(range(found.count))
    topology = Topology.single_node(case.source.num_ranks)
    plan = make_staged_plan(case.source, case.target, found, topology, PlanOptions(400, 3))
    for number, one in enumerate(plan.plans):
        carry_out(one, part(case, found, number))
    whole = make_staged_plan(
        case.source, case.target, one_stage(case.source, case.target), topology, PlanOptions(400, 3)
    )
    moved = sum(one.moved_bytes for one in plan.plans)
    assert moved == whole.plans[0].moved_bytes == plan.lower_bound_bytes
    assert (plan.bytes_matrix.sum(axis=0) == whole.bytes_matrix.sum(axis=0)).all()


def test_a_unit_is_a_layer_where_no_fragment_has_two() -> None:
    case = layout_case(Layout(tp=2, dp=2), Layout(tp=2, pp=2), Model(layers=4))
    source, target, count = stages._units(case.source, case.target)
    assert count == 3 * 4 + 1  # norm, qkv and proj of each layer, and the embedding
    for rosters, unit in ((case.source, source), (case.target, target)):
        names = {
            (rosters.tensors[t].name, layer if len(rosters.tensors[t].shape) > 2 else -1)
            for t, layer in zip(rosters.rows.tensor.tolist(), rosters.rows.start[:, 0], strict=True)
        }
        assert len(names) <= len(set(unit.tolist())) <= count


# ------------------------------------------------------------------ memory


@st.composite
def sides(draw: st.DrawFn, count: int) -> SideMemory:
    size = st.integers(0, 100)
    moved = draw(st.lists(st.tuples(size, st.integers(0, count - 1)), max_size=8))
    rest = [draw(size) for _ in range(3)]
    return SideMemory(
        np.array([nbytes for nbytes, _ in moved], dtype=np.int64),
        np.array([stage for _, stage in moved], dtype=np.int64),
        *rest,
        largest=max([nbytes for nbytes, _ in moved] + rest[:2]),
    )


def simulated(source: SideMemory, target: SideMemory, staging: IntArray, frees: bool) -> int:
    """The most there ever is above the old state, one thing after the other."""
    before = now = source.nbytes
    seen = [now]

    def change(by: int) -> None:
        nonlocal now
        now += by
        seen.append(now)

    change(-source.gradients)
    change(target.other)
    change(target.largest)  # one storage at a time while views are made
    change(-target.largest)
    for stage, staged in enumerate(staging.tolist()):
        change(int(target.moved[target.stage == stage].sum()))
        change(staged)
        change(-staged)
        if frees:
            change(-int(source.moved[source.stage == stage].sum()))
            change(-source.rebuilt if not stage else 0)
    change(target.rebuilt)
    now = target.nbytes - target.gradients  # the source goes
    change(target.gradients)
    assert now == target.nbytes
    return max(seen) - before


@given(st.integers(1, 4).flatmap(lambda n: st.tuples(sides(n), sides(n), st.just(n))), st.data())
def test_the_planned_peak_is_what_happens(
    memory: tuple[SideMemory, SideMemory, int], data: st.DataObject
) -> None:
    source, target, count = memory
    amounts = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    staging = np.array(data.draw(amounts), dtype=np.int64)
    for frees in (True, False):
        peak = planned_peak(source, target, staging, frees=frees)
        assert peak.extra == simulated(source, target, staging, frees)
    assert peak.extra <= peak.ends_with + peak.staging + peak.largest  # always


GREEDY = [
    ((2, 1, 8), (2, 2, 4)),
    ((1, 8, 2), (8, 1, 2)),
    ((8, 1, 2), (1, 8, 2)),
    ((1, 1, 16), (4, 4, 1)),
    ((4, 4, 1), (1, 1, 16)),
    ((2, 1, 4), (2, 4, 2)),
    ((2, 2, 4), (2, 1, 4)),
    ((2, 4, 2), (4, 2, 2)),
]


def levels(source: RosterSet, target: RosterSet, found: Stages) -> tuple[IntArray, IntArray]:
    """(bytes above the larger of source and target, bytes allocated), [stages, ranks] each."""
    given_got = []
    for rosters, stage in ((source, found.source), (target, found.target)):
        total = np.zeros((found.count, rosters.num_kinds), dtype=np.int64)
        numel = (rosters.rows.stop - rosters.rows.start).prod(axis=1)
        nbytes = numel * rosters.element_bytes[rosters.rows.tensor]
        np.add.at(total, (stage, rosters.rows.kind), nbytes)
        given_got.append(total[:, rosters.kind_of_rank])
    gone, got = given_got
    held = gone.sum(0) + np.cumsum(got, axis=0) - np.cumsum(gone, axis=0) + gone
    return held - np.maximum(gone.sum(0), got.sum(0)), got


@pytest.mark.parametrize(("before", "after"), GREEDY)
def test_no_rank_is_fuller_than_growth_and_one_stage(
    before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    """Llama 2 of 7B with Adam's states in shards, 16 ranks at most."""
    layouts = [Layout(tp=tp, pp=pp, dp=dp) for tp, pp, dp in (before, after)]
    num_ranks = max(layout.world for layout in layouts)
    source, target = (make_rosters(MODELS["7B"], each, num_ranks=num_ranks) for each in layouts)
    found = choose_stages(source, target, Room.none(num_ranks))
    above, got = levels(source, target, found)
    assert above.max() <= got.max()
    assert 1 < found.count <= 40
    assert above.max() < levels(source, target, one_stage(source, target))[0].max() / 3
    spare = np.full(num_ranks, 1 << 40)
    assert choose_stages(source, target, Room(spare, spare)).count == 1
    # What comes to be spare with the first free is not there before.
    later = choose_stages(source, target, Room(0 * spare, spare))
    above, got = levels(source, target, later)
    assert later.count == 2 and above[0].max() <= got[0].max() < got[1].max()


def test_a_layout_of_thousands_of_ranks_and_units_takes_seconds() -> None:
    model = MODELS["235B"]
    layouts = [Layout(tp=4, pp=8, dp=8, ep=8, etp=1), Layout(tp=4, pp=4, dp=16, ep=8, etp=1)]
    source, target = (make_rosters(model, each) for each in layouts)
    found = choose_stages(source, target, Room.none(256))
    assert found.count <= 64
    above, got = levels(source, target, found)
    assert above.max() <= got.max()
