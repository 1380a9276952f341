"""A rank's own plan is its part of the whole plan, whichever way the world is made.

Every rank plans by itself, from what it has received of the others. All those plans together must
be the plan that is made at once, piece by piece, and each must prove its own part.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import (
    Plan,
    PlanCache,
    PlanOptions,
    Speeds,
    Topology,
    direct,
    make_plan,
)
from dynatrain_megatron.planner.cache import PlanKey
from dynatrain_megatron.planner.routes import Routes, unique_cover
from dynatrain_megatron.shapes import MODELS, make_rosters
from dynatrain_megatron.vps import RosterBuilder
from tests.planner.simulator import simulate_plan
from tests.planner.test_schedule import BOUNDS, assert_well_formed
from tests.planner.worlds import (
    Case,
    Model,
    carry_out,
    irregular_cases,
    layout_case,
    mixed_cases,
    shared_cases,
)

Piece = tuple[int, ...]


def pieces(routes: Routes, chosen: np.ndarray | slice = slice(None)) -> list[Piece]:
    """Pieces as tuples, in order."""
    columns = [getattr(routes, name)[chosen] for name in ("tensor", "src", "dst")]
    columns += [getattr(routes, name)[chosen] for name in ("src_slot", "dst_slot")]
    table = np.column_stack([*columns, routes.start[chosen], routes.stop[chosen]])
    return [tuple(row) for row in table.tolist()]


def messages(plan: Plan) -> list[tuple[object, ...]]:
    """Messages with all that is in them, in order, pass by pass."""
    return [
        (
            *(
                int(getattr(one, name)[m])
                for name in ("src", "dst", "window", "nbytes", "max_parcels")
            ),
            *pieces(one.pieces, slice(one.first_piece[m], one.first_piece[m + 1])),
        )
        for one in (each.schedule for each in plan.passes)
        for m in range(len(one))
    ]


def assert_own_plans_are_the_whole(case: Case, topology: Topology, options: PlanOptions) -> None:
    source, target = case.source, case.target
    whole = make_plan(source, target, topology, options)
    everything = messages(whole)
    assert len(set(everything)) == len(everything) == whole.num_operations
    bound = 0
    for rank in range(source.num_ranks):
        own = make_plan(source, target, topology, options, rank=rank)
        assert own.digest == whole.digest
        assert messages(own) == [m for m in everything if rank in m[:2]]
        for ours, all_of in zip(own.passes, whole.passes, strict=True):
            kept = all_of.schedule.retained
            assert pieces(ours.schedule.retained) == pieces(kept, kept.dst == rank)
        assert (own.bytes_matrix == whole.bytes_matrix).all()
        assert (own.num_operations, own.num_windows) == (whole.num_operations, whole.num_windows)
        assert own.predicted_s == whole.predicted_s
        assert own.peak_staging_bytes(rank) == whole.peak_staging_bytes(rank)
        received = [(each.schedule, each.schedule.dst == rank) for each in own.passes]
        assert sum(int(one.nbytes[got].sum()) for one, got in received) == own.lower_bound_bytes
        bound += own.lower_bound_bytes
    assert bound == whole.lower_bound_bytes == whole.moved_bytes


topologies = st.builds(
    Topology,
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([Speeds(), Speeds(operation_s=0)]),  # so fast that small flows are relayed
)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(irregular_cases(max_ranks=6), mixed_cases(max_ranks=6), shared_cases()),
    topologies,
    BOUNDS,
)
def test_all_own_plans_are_the_whole_plan(
    case: Case, places: Topology, bounds: PlanOptions
) -> None:
    topology = dataclasses.replace(places, node=tuple(places.node[: len(case.before)]))
    assert_own_plans_are_the_whole(case, topology, bounds)


@pytest.mark.parametrize(
    ("source", "target"),
    [("tp2-dp4", "pp4-dp2"), ("tp2-dp4-noopt", "pp2-dp4-noopt"), ("dp8-noopt", "tp4-pp2-noopt")],
)
@pytest.mark.parametrize("smallest_part", [16, 100, 1 << 20])
def test_streams_that_are_spread_over_windows(
    source: str, target: str, smallest_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_SMALLEST_PART", smallest_part)
    model = Model(layers=8, hidden=8, width=24, rows=32)
    case = layout_case(ParallelLayout.parse(source), ParallelLayout.parse(target), model)
    topology = Topology.of_nodes(8, 4)
    free = case.plan(topology)
    busiest = max(free.bytes_matrix.sum(axis=0) + free.bytes_matrix.sum(axis=1))
    for staging_bytes in (busiest // 3, busiest // 20):
        bounds = PlanOptions(2 * int(staging_bytes))  # two windows are under way at a time
        plan = case.plan(topology, bounds)
        assert_well_formed(plan, bounds)
        simulate_plan(plan)
        carry_out(plan, case)
        assert_own_plans_are_the_whole(case, topology, bounds)
        # Spread evenly they need few more windows than the busiest rank does.
        load = plan.bytes_matrix - np.diag(np.diag(plan.bytes_matrix))
        least = -(-int((load.sum(axis=0) + load.sum(axis=1)).max()) // int(staging_bytes))
        assert plan.num_windows <= (1.3 * least + 2 if smallest_part == 16 else 3 * least + 3)


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        ("1B", "pp2-dp4", "tp4-dp2"),  # tied: two data parallel groups cut the embedding
        ("1B", "pp2-dp3", "pp4-dp2"),
        ("235B", "tp2-pp2-dp8-ep8-etp1-sp", "pp2-dp16-ep16"),
        ("671B", "pp2-dp8-ep8", "tp4-pp2-dp2-ep4-etp1-sp"),
    ],
)
def test_own_plans_of_large_models(model: str, source: str, target: str) -> None:
    layouts = [ParallelLayout.parse(text) for text in (source, target)]
    size = max(layout.world for layout in layouts)
    before, after = (make_rosters(MODELS[model], one, num_ranks=size) for one in layouts)
    topology, options = Topology.of_nodes(size, 8), PlanOptions(1 << 30)
    plans = [make_plan(before, after, topology, options, rank=rank) for rank in range(size)]
    assert len({plan.digest for plan in plans}) == 1
    sent = np.zeros((size, size), dtype=np.int64)
    received = np.zeros_like(sent)
    for rank, plan in enumerate(plans):
        for own in (each.schedule for each in plan.passes):
            mine = own.src == rank
            np.add.at(sent, (own.src[mine], own.dst[mine]), own.nbytes[mine])
            np.add.at(received, (own.src[~mine], own.dst[~mine]), own.nbytes[~mine])
        assert plan.peak_staging_bytes(rank) <= options.staging_bytes
    kept = np.diag(plans[0].retained)
    assert (sent + kept == plans[0].bytes_matrix).all()
    assert (received + kept == plans[0].bytes_matrix).all()
    assert plans[0].moved_bytes == sum(plan.lower_bound_bytes for plan in plans) > 0


@settings(max_examples=100, deadline=None)
@given(irregular_cases())
def test_a_ranks_cover_is_its_part_of_the_whole(case: Case) -> None:
    whole = unique_cover(case.source)
    for rank in range(case.source.num_ranks):
        assert pieces(unique_cover(case.source, rank)) == pieces(whole, whole.src == rank)


def test_a_hole_is_refused_on_every_rank() -> None:
    case = layout_case(ParallelLayout(tp=2), ParallelLayout(pp=2))
    hole = Case((case.before[0], RosterBuilder().build()), case.after)
    for rank in range(2):
        with pytest.raises(TransitionError, match="which no rank of the source holds"):
            make_plan(hole.source, hole.target, Topology.single_node(2), PlanOptions(), rank=rank)


# ------------------------------------------------------------------ the cache


def test_a_cached_plan_is_the_same_object_and_nothing_else_is() -> None:
    model = Model()
    layouts = [ParallelLayout(tp=2, dp=2), ParallelLayout(tp=2, pp=2), ParallelLayout(dp=4)]
    cases = [layout_case(layouts[0], layouts[1], model), layout_case(layouts[0], layouts[2], model)]
    one, options = Topology.single_node(4), PlanOptions()
    cache = PlanCache(max_plans=6)
    sets = cases[0].source, cases[0].target
    first = cache.plan(*sets, one, options, rank=1)
    again = cases[0].source, cases[0].target  # made anew, of equal content
    assert cache.plan(*again, Topology((0, 0, 0, 0)), PlanOptions(), rank=1) is first
    others = [
        cache.plan(*sets, one, options, rank=2),
        cache.plan(*sets, one, options),
        cache.plan(*sets, Topology((0, 0, 1, 1)), options, rank=1),
        cache.plan(*sets, one, dataclasses.replace(options, staging_bytes=1 << 20), rank=1),
        cache.plan(cases[1].source, cases[1].target, one, options, rank=1),
    ]
    assert len(cache) == len({id(plan) for plan in (first, *others)}) == 6
    assert cache.plan(*sets, one, options, rank=1) is first
    assert cache.plan(*reversed(sets), one, options, rank=1) is not first  # and drops the oldest
    assert len(cache) == 6
    assert cache.plan(*sets, one, options, rank=1) is first
    assert cache.plan(*sets, one, options, rank=2) is not others[0]


def test_a_key_is_all_that_shapes_a_plan() -> None:
    key = PlanKey("a", "b", Topology((0, 1)), PlanOptions(), 0, "c")
    changes = {
        "source": "c",
        "target": "c",
        "topology": Topology((0, 1), 1),
        "options": PlanOptions(window_ops=1),
        "rank": None,
        "stages": "d",
    }
    assert set(changes) == {field.name for field in dataclasses.fields(PlanKey)}
    for name, value in changes.items():
        assert dataclasses.replace(key, **{name: value}) != key


def test_a_target_that_loses_state_is_refused_before_it_is_planned() -> None:
    case = layout_case(ParallelLayout(tp=2), ParallelLayout(pp=2))
    less = Case(case.before, (case.after[0], RosterBuilder().build()))
    cache = PlanCache()
    for _ in range(2):
        with pytest.raises(TransitionError, match="does not hold the same state"):
            cache.plan(less.source, less.target, Topology.single_node(2), PlanOptions(), rank=0)
    assert len(cache) == 0
