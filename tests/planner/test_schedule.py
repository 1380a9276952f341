"""Messages and windows: both ends agree, nothing waits for ever, bounds are kept."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Plan, PlanOptions, Speeds, Topology, make_plan, relays
from dynatrain_megatron.planner.routes import Routes
from dynatrain_megatron.planner.schedule import Schedule
from dynatrain_megatron.vps import Roster, RosterBuilder
from tests.planner.simulator import simulate_plan
from tests.planner.worlds import Case, Model, carry_out, irregular_cases, layout_case, shared_cases

BOUNDS = st.builds(
    PlanOptions,
    staging_bytes=st.sampled_from([1, 7, 16, 64, 200, 1 << 20]),
    window_ops=st.integers(1, 5),
    schedule=st.sampled_from(EngineSchedule),
)


def windows(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """Messages of one rank by window."""
    found: dict[int, list[int]] = defaultdict(list)
    for message in range(len(schedule)):
        if rank in (schedule.src[message], schedule.dst[message]):
            found[int(schedule.window[message])].append(message)
    return found


def assert_well_formed(plan: Plan, bounds: PlanOptions) -> None:
    for each in plan.passes:
        _assert_well_formed(plan, each.schedule, bounds)


def _assert_well_formed(plan: Plan, schedule: Schedule, bounds: PlanOptions) -> None:
    sizes = np.array([t.element_bytes for t in plan.tensors])
    assert schedule.first_piece[0] == 0 and schedule.first_piece[-1] == len(schedule.pieces)
    for message in range(len(schedule)):
        pieces = schedule.pieces_of(message)
        assert len(pieces) > 0
        assert schedule.src[message] != schedule.dst[message]
        for i in pieces:
            assert schedule.pieces.src[i] == schedule.src[message]
            assert schedule.pieces.dst[i] == schedule.dst[message]
        each = [int(schedule.pieces.numel[i] * sizes[schedule.pieces.tensor[i]]) for i in pieces]
        assert schedule.nbytes[message] == sum(each)
    assert (schedule.retained.src == schedule.retained.dst).all()
    for rank in range(plan.num_ranks):
        for window, messages in windows(schedule, rank).items():
            assert 0 <= window < schedule.num_windows
            assert len(messages) <= bounds.window_ops
            staged = sum(int(schedule.nbytes[m]) for m in messages)
            if staged > bounds.staging_bytes:
                (alone,) = messages
                (piece,) = schedule.pieces_of(alone)
                assert schedule.pieces.numel[piece] == 1
    assert set(schedule.window.tolist()) == set(range(schedule.num_windows))


@settings(max_examples=200, deadline=None)
@given(irregular_cases(), BOUNDS)
def test_schedules_are_well_formed_bounded_and_finish(case: Case, bounds: PlanOptions) -> None:
    plan = case.plan(options=bounds)
    assert_well_formed(plan, bounds)
    simulate_plan(plan)
    carry_out(plan, case)


@settings(max_examples=100, deadline=None)
@given(
    shared_cases(),
    st.lists(st.integers(0, 1), min_size=6, max_size=6),
    BOUNDS,
    st.sampled_from([0, relays._MOST_SENDERS]),
)
def test_relays_are_well_formed_bounded_and_finish(
    case: Case, nodes: list[int], bounds: PlanOptions, most_senders: int
) -> None:
    topology = Topology(tuple(nodes[: len(case.before)]), None, Speeds(operation_s=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relays, "_MOST_SENDERS", most_senders)  # 0: chunks are equal
        plan = case.plan(topology, bounds)
    assert_well_formed(plan, bounds)
    simulate_plan(plan)
    carry_out(plan, case)


@settings(max_examples=100, deadline=None)
@given(irregular_cases(), BOUNDS)
def test_bounds_change_messages_and_not_what_moves(case: Case, bounds: PlanOptions) -> None:
    free, bounded = case.plan(), case.plan(options=bounds)
    assert (free.bytes_matrix == bounded.bytes_matrix).all()
    assert free.lower_bound_bytes == bounded.lower_bound_bytes
    # Without pressure everything of a pair is one message, and all of it one window.
    pairs = list(
        zip(free.passes[0].schedule.src.tolist(), free.passes[0].schedule.dst.tolist(), strict=True)
    )
    assert len(pairs) == len(set(pairs))
    assert free.passes[0].schedule.num_windows <= 1


@pytest.mark.parametrize("kind", EngineSchedule)
@pytest.mark.parametrize("window_ops", [1, 256])
@pytest.mark.parametrize("staging_bytes", [64, 1_000, 1 << 20])
@pytest.mark.parametrize(
    ("source", "target"), [("tp2-dp4", "pp4-dp2"), ("pp8", "tp2-pp2-dp2"), ("dp8", "tp4-pp2")]
)
def test_layout_changes_finish_within_bounds(
    source: str, target: str, staging_bytes: int, window_ops: int, kind: EngineSchedule
) -> None:
    model = Model(layers=8, hidden=8, width=24, rows=32)
    case = layout_case(ParallelLayout.parse(source), ParallelLayout.parse(target), model)
    bounds = PlanOptions(staging_bytes, window_ops, kind)
    plan = case.plan(options=bounds)
    assert_well_formed(plan, bounds)
    simulate_plan(plan)
    carry_out(plan, case)


def test_totals_are_those_of_the_matrix() -> None:
    plan = layout_case(ParallelLayout(tp=2, dp=2), ParallelLayout(tp=4)).plan()
    sent = [sum(int(plan.bytes_matrix[r, c]) for c in range(4) if c != r) for r in range(4)]
    received = [sum(int(plan.bytes_matrix[r, c]) for r in range(4) if c != r) for c in range(4)]
    assert plan.moved_bytes == sum(sent) == int(plan.passes[0].schedule.nbytes.sum()) > 0
    assert (plan.max_send_bytes, plan.max_recv_bytes) == (max(sent), max(received))
    assert plan.retained_bytes == sum(int(plan.bytes_matrix[r, r]) for r in range(4))


# ------------------------------------------------------------------ the same plan on every rank


def assert_equal(a: Plan, b: Plan) -> None:
    assert a.digest == b.digest
    assert (a.tensors, a.num_ranks) == (b.tensors, b.num_ranks)
    assert (a.lower_bound_bytes, a.moved_bytes) == (b.lower_bound_bytes, b.moved_bytes)
    assert np.array_equal(a.bytes_matrix, b.bytes_matrix)
    for ours, theirs in zip(a.passes, b.passes, strict=True):
        assert ours.takes_from == theirs.takes_from
        for name in ("src", "dst", "window", "nbytes", "first_piece"):
            assert np.array_equal(getattr(ours.schedule, name), getattr(theirs.schedule, name))
        for part in ("pieces", "retained"):
            one, other = getattr(ours.schedule, part), getattr(theirs.schedule, part)
            for name in Routes.__slots__:
                assert np.array_equal(getattr(one, name), getattr(other, name))


@settings(max_examples=50, deadline=None)
@given(irregular_cases(), BOUNDS)
def test_every_rank_makes_the_same_plan_from_what_it_received(
    case: Case, bounds: PlanOptions
) -> None:
    received = Case(
        tuple(Roster.from_bytes(roster.to_bytes()) for roster in case.before),
        tuple(Roster.from_bytes(roster.to_bytes()) for roster in case.after),
    )
    assert_equal(case.plan(options=bounds), received.plan(options=bounds))


def test_the_digest_changes_with_all_that_shaped_the_plan() -> None:
    source, target = ParallelLayout(tp=2, dp=2), ParallelLayout(tp=2, pp=2)
    case = layout_case(source, target)
    plans = [
        case.plan(),
        case.plan(options=PlanOptions(staging_bytes=256)),
        case.plan(options=PlanOptions(staging_bytes=256, window_ops=1)),
        case.plan(options=PlanOptions(schedule=EngineSchedule.xor)),
        case.plan(options=PlanOptions(schedule=EngineSchedule.auto)),
        layout_case(target, source).plan(),
        layout_case(dataclasses.replace(source, dist_opt=False), target).plan(),
        layout_case(source, ParallelLayout(tp=4)).plan(),
        layout_case(source, target, Model(layers=8)).plan(),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_the_digest_changes_with_the_topology_where_there_is_a_choice() -> None:
    case = layout_case(ParallelLayout(dp=4, dist_opt=False), ParallelLayout(dp=4, dist_opt=False))
    # Ranks 0 and 1 hold everything, 2 and 3 want it.
    nothing = RosterBuilder().build()
    half = Case((*case.before[:2], nothing, nothing), case.after)
    near, far = half.plan(Topology((0, 1, 0, 1))), half.plan(Topology((0, 1, 1, 0)))
    assert near.digest != far.digest
    assert (near.bytes_matrix[0, 3], far.bytes_matrix[0, 2]) == (0, 0)
    assert near.moved_bytes == far.moved_bytes == near.lower_bound_bytes


def test_a_plan_does_not_change_its_inputs() -> None:
    case = layout_case(ParallelLayout(tp=2, dp=2), ParallelLayout(pp=4))
    source, target = case.source, case.target
    digests = source.digest(), target.digest()
    make_plan(source, target, Topology.single_node(4), PlanOptions())
    assert (source.digest(), target.digest()) == digests
