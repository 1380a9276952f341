"""The laws of a plan, over thousands of random roster sets and all small layouts.

Each destination element is written exactly once, from a rank that holds it; what a rank has is
retained; the bytes that move are the fewest that can.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions, Sources, Speeds, Topology
from dynatrain_megatron.planner.checks import (
    check_coverage,
    check_nothing_lost,
    lower_bound_bytes,
)
from dynatrain_megatron.planner.flows import find_flows
from dynatrain_megatron.planner.routes import Routes, TakesFrom, unique_cover
from dynatrain_megatron.vps import LogicalTensor, Region, RosterBuilder, RosterSet
from tests.layout.every import layouts
from tests.planner.worlds import (
    FLOAT32,
    Case,
    Model,
    brute_force_bound,
    bytes_of,
    carry_out,
    choose_routes,
    held,
    irregular_cases,
    layout_case,
    mixed_cases,
    region_of,
    roster_of,
    shared_cases,
)
from tests.vps.strategies import slices


@st.composite
def random_layouts(draw: st.DrawFn, world: int) -> ParallelLayout:
    """A layout the small model allows (its layers and its width are 12)."""
    fitting = [one for one in layouts(world) if 12 % one.tp == 0 and 12 % one.pp == 0]
    chosen = draw(st.sampled_from(fitting))
    return dataclasses.replace(chosen, dist_opt=draw(st.booleans()))


@st.composite
def layout_cases(draw: st.DrawFn) -> Case:
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    model = Model(layers=12, hidden=draw(st.sampled_from([1, 4, 5])), rows=12)
    return layout_case(draw(random_layouts(world)), draw(random_layouts(world)), model)


def assert_laws(case: Case, topology: Topology | None = None) -> None:
    plan = case.plan(topology)
    carry_out(plan, case)
    bound = brute_force_bound(case)
    assert plan.moved_bytes == bound
    assert plan.lower_bound_bytes == bound
    wanted = sum(bytes_of(roster) for roster in case.after)
    assert plan.moved_bytes + plan.retained_bytes == wanted


@settings(max_examples=400, deadline=None)
@given(irregular_cases())
def test_the_laws_hold_for_irregular_rosters(case: Case) -> None:
    assert_laws(case)


@settings(max_examples=250, deadline=None)
@given(mixed_cases())
def test_the_laws_hold_where_each_layer_is_laid_out_in_its_own_way(case: Case) -> None:
    assert_laws(case)


@settings(max_examples=100, deadline=None)
@given(layout_cases())
def test_the_laws_hold_for_random_layouts(case: Case) -> None:
    assert_laws(case)


@settings(max_examples=100, deadline=None)
@given(
    shared_cases(),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.sampled_from([None, 1, 2]),
)
def test_the_laws_hold_where_much_is_relayed(
    case: Case, nodes: list[int], width: int | None
) -> None:
    speeds = Speeds(operation_s=0)
    assert_laws(case, Topology(tuple(nodes[: len(case.before)]), width, speeds))


FOUR = [
    *layouts(4),
    *(dataclasses.replace(one, dist_opt=False) for one in layouts(4, ("tp", "dp"))),
]


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(FOUR, FOUR)), ids=lambda layout: str(layout)
)
def test_the_laws_hold_between_all_layouts_of_four_ranks(
    source: ParallelLayout, target: ParallelLayout
) -> None:
    assert_laws(layout_case(source, target))


@pytest.mark.parametrize("layout", FOUR, ids=str)
def test_a_switch_to_the_same_layout_moves_nothing(layout: ParallelLayout) -> None:
    plan = layout_case(layout, layout).plan()
    assert plan.moved_bytes == plan.lower_bound_bytes == plan.num_operations == 0
    assert plan.max_send_bytes == plan.max_recv_bytes == plan.num_windows == 0


@settings(max_examples=150, deadline=None)
@given(irregular_cases())
def test_what_a_rank_holds_is_retained(case: Case) -> None:
    source, target = case.source, case.target
    routes = choose_routes(source, target, Topology.single_node(source.num_ranks))
    for i in range(len(routes)):
        tensor = int(routes.tensor[i])
        region = region_of(routes, i, len(source.tensors[tensor].shape))
        own = held(source, int(routes.dst[i]), tensor)[slices(region)]
        # A piece is wholly held by its receiver or not at all.
        assert own.all() if routes.src[i] == routes.dst[i] else not own.any()


def distance(nodes: list[int], src: int, dst: int) -> int:
    """0 the same rank, 1 the same node, 2 another node."""
    return (src != dst) + (nodes[src] != nodes[dst])


@settings(max_examples=150, deadline=None)
@given(irregular_cases(max_ranks=6), st.data())
def test_a_piece_comes_from_a_nearest_holder(case: Case, data: st.DataObject) -> None:
    source, target = case.source, case.target
    nodes = data.draw(
        st.lists(st.integers(0, 2), min_size=source.num_ranks, max_size=source.num_ranks)
    )
    topology = Topology(tuple(nodes))
    routes = choose_routes(source, target, topology)
    check_coverage(routes, source, target)
    for i in range(len(routes)):
        tensor, dst = int(routes.tensor[i]), int(routes.dst[i])
        region = region_of(routes, i, len(source.tensors[tensor].shape))
        holders = [
            rank
            for rank in range(source.num_ranks)
            if held(source, rank, tensor)[slices(region)].all()
        ]
        assert int(routes.src[i]) in holders
        nearest = min(distance(nodes, rank, dst) for rank in holders)
        assert distance(nodes, int(routes.src[i]), dst) == nearest


@settings(max_examples=50, deadline=None)
@given(irregular_cases(max_ranks=6))
def test_the_first_holder_sends_all_where_nothing_is_shared_out(case: Case) -> None:
    source = case.source
    plan = case.plan(options=PlanOptions(sources=Sources.first))
    carry_out(plan, case)
    assert plan.moved_bytes == plan.lower_bound_bytes
    pieces = plan.passes[0].schedule.pieces
    for i in range(len(pieces)):
        tensor = int(pieces.tensor[i])
        region = region_of(pieces, i, len(source.tensors[tensor].shape))
        first = next(
            rank
            for rank in range(source.num_ranks)
            if held(source, rank, tensor)[slices(region)].all()
        )
        assert int(pieces.src[i]) == first


@settings(max_examples=150, deadline=None)
@given(irregular_cases())
def test_a_unique_cover_counts_each_held_element_once(case: Case) -> None:
    source = case.source
    cover = unique_cover(source)
    rosters = [roster_of(source, rank) for rank in range(source.num_ranks)]
    for tensor, logical in enumerate(source.tensors):
        count = np.zeros(logical.shape, dtype=np.int64)
        for i in np.nonzero(cover.tensor == tensor)[0]:
            region = region_of(cover, int(i), len(logical.shape))
            count[slices(region)] += 1
            roster, slot = rosters[int(cover.src[i])], int(cover.src_slot[i])
            assert roster.tensor[slot] == tensor
            assert region_of(roster, slot).contains(region)
        anywhere = [held(source, rank, tensor) for rank in range(source.num_ranks)]
        assert (count == np.any(anywhere, axis=0)).all()


# ------------------------------------------------------------------ balance


def whole_rows(
    tensor_rows: int, *ranks_of_row: tuple[int, ...], num_ranks: int
) -> tuple[RosterBuilder, ...]:
    """Builders of ranks that hold rows of one tensor as listed."""
    tensor = Model(rows=tensor_rows).embedding
    builders = tuple(RosterBuilder() for _ in range(num_ranks))
    for row, ranks in enumerate(ranks_of_row):
        for rank in ranks:
            builders[rank].add(tensor, Region((row, 0), (row + 1, 4)))
    return builders


@pytest.mark.parametrize("num_holders", [1, 2, 3, 4])
def test_replicas_share_the_sending(num_holders: int) -> None:
    holders = tuple(range(num_holders))
    before = whole_rows(12, *[holders] * 12, num_ranks=num_holders + 1)
    after = whole_rows(12, *[(num_holders,)] * 12, num_ranks=num_holders + 1)
    plan = Case(tuple(b.build() for b in before), tuple(b.build() for b in after)).plan()
    row_bytes = 4 * 4 * len(FLOAT32)
    assert (
        plan.bytes_matrix[:num_holders, num_holders].tolist()
        == [12 // num_holders * row_bytes] * num_holders
    )
    assert plan.max_send_bytes * num_holders == plan.max_recv_bytes == plan.moved_bytes


def test_pieces_with_one_holder_are_counted_before_a_choice_is_made() -> None:
    # Rank 0 alone has row 0, ranks 0 and 1 have row 1: rank 1 should send that one.
    before = whole_rows(2, (0,), (0, 1), num_ranks=3)
    after = whole_rows(2, (2,), (2,), num_ranks=3)
    plan = Case(tuple(b.build() for b in before), tuple(b.build() for b in after)).plan()
    assert plan.bytes_matrix[0, 2] == plan.bytes_matrix[1, 2]


def test_a_holder_in_the_same_node_is_preferred_to_an_idle_one() -> None:
    before = whole_rows(4, *[(0, 1)] * 4, num_ranks=3)
    after = whole_rows(4, *[(2,)] * 4, num_ranks=3)
    case = Case(tuple(b.build() for b in before), tuple(b.build() for b in after))
    far = case.plan(Topology.from_hosts(["a", "b", "b"]))
    assert far.bytes_matrix[0, 2] == 0 and far.bytes_matrix[1, 2] == far.moved_bytes


# ------------------------------------------------------------------ relays


def broadcast(num_wanters: int, *, rows: int = 12) -> Case:
    """Rank 0 holds it all, and all others want it."""
    ranks = num_wanters + 1
    before = whole_rows(rows, *[(0,)] * rows, num_ranks=ranks)
    after = whole_rows(rows, *[tuple(range(1, ranks))] * rows, num_ranks=ranks)
    return Case(tuple(b.build() for b in before), tuple(b.build() for b in after))


@pytest.mark.parametrize("num_wanters", [2, 3, 4])
@pytest.mark.parametrize("away", [False, True])
def test_what_several_want_is_sent_once_and_shared_out_by_them(
    num_wanters: int, away: bool
) -> None:
    case = broadcast(num_wanters)
    nodes = (0,) + (int(away),) * num_wanters
    plan = case.plan(Topology(nodes, None, Speeds(operation_s=0)))
    once = bytes_of(case.before[0])
    first, second = (each.links.nbytes.tolist() for each in plan.passes)
    assert [each.takes_from for each in plan.passes] == [TakesFrom.SOURCE, TakesFrom.TARGET]
    assert first == [once // num_wanters] * num_wanters
    assert second == [once // num_wanters] * (num_wanters * (num_wanters - 1))
    assert plan.moved_bytes == plan.lower_bound_bytes == num_wanters * once
    carry_out(plan, case)


def test_what_is_not_worth_its_messages_is_not_relayed() -> None:
    case = broadcast(3)
    slow, fast = (Topology.single_node(4), Topology((0,) * 4, None, Speeds(operation_s=0)))
    assert len(case.plan(slow).passes) == 1
    assert len(case.plan(fast).passes) == 2
    assert len(case.plan(fast, PlanOptions(relay=False)).passes) == 1
    assert len(case.plan(fast, PlanOptions(relay_within_nodes=False)).passes) == 1
    two_nodes = Topology((0, 1, 1, 1), None, fast.speeds)
    assert len(case.plan(two_nodes, PlanOptions(relay_within_nodes=False)).passes) == 2


def test_what_its_holders_send_in_time_is_not_relayed() -> None:
    """As many hold it as want it: no rank has more to send than another receives."""
    before = whole_rows(12, *[(0, 1)] * 12, num_ranks=4)
    after = whole_rows(12, *[(2, 3)] * 12, num_ranks=4)
    case = Case(tuple(b.build() for b in before), tuple(b.build() for b in after))
    assert len(case.plan(Topology((0,) * 4, None, Speeds(operation_s=0))).passes) == 1


@settings(max_examples=50, deadline=None)
@given(shared_cases(), st.lists(st.integers(0, 1), min_size=6, max_size=6))
def test_an_element_crosses_into_a_node_once(case: Case, nodes: list[int]) -> None:
    source, target = case.source, case.target
    topology = Topology(tuple(nodes[: source.num_ranks]), 1, Speeds(0, near_gb_s=1e3))
    plan, flows = case.plan(topology), find_flows(source, target, topology)
    node = np.array(topology.node)
    crossed = np.zeros(2, dtype=np.int64)
    for links in (each.links for each in plan.passes):
        far = node[links.src] != node[links.dst]
        np.add.at(crossed, node[links.dst[far]], links.nbytes[far])
    least = np.zeros(2, dtype=np.int64)
    for flow in range(len(flows)):
        holders, wanters = (
            set(node[sets.rank[sets.first[i] : sets.first[i + 1]]].tolist())
            for sets, i in (
                (flows.sources, flows.holders[flow]),
                (flows.targets, flows.wanters[flow]),
            )
        )
        least[list(wanters - holders)] += flows.numel[flow] * flows.element_bytes[flow]
    assert crossed.tolist() == least.tolist()


def test_a_relay_of_what_has_not_come_yet_is_found() -> None:
    case = broadcast(3)
    plan = case.plan(Topology((0,) * 4, None, Speeds(operation_s=0)))
    first, second = (each.schedule.pieces for each in plan.passes)
    check_coverage(first, case.source, case.target, relays=[second])
    swapped = first.dst.copy()
    swapped[first.dst == 1], swapped[first.dst == 2] = 2, 1
    with pytest.raises(TransitionError, match=r"is sent on when its sender has got 0 of its"):
        check_coverage(changed(first, dst=swapped), case.source, case.target, relays=[second])
    for rank in range(1, 4):  # each proves what it gets and what it sends on
        own = first.take(first.dst == rank)
        sent = second.take((second.src == rank) | (second.dst == rank))
        check_coverage(own, case.source, case.target, rank, relays=[sent])
        with pytest.raises(TransitionError, match="is sent on when its sender has got"):
            check_coverage(own.take(own.dst < 0), case.source, case.target, rank, relays=[sent])


# ------------------------------------------------------------------ what is refused


@settings(max_examples=75, deadline=None)
@given(irregular_cases(), st.data())
def test_an_element_nobody_holds_is_refused_by_name(case: Case, data: st.DataObject) -> None:
    wanted = [
        (roster.tensors[number], region_of(roster, slot).start)
        for roster in case.after
        for slot, number in enumerate(roster.tensor.tolist())
        if roster.tensors[number].shape
    ]
    if not wanted:
        return
    tensor, start = data.draw(st.sampled_from(wanted))
    hole = Region(start, tuple(x + 1 for x in start))
    before = []
    for roster in case.before:
        builder = RosterBuilder()
        for slot in range(len(roster)):
            name = roster.tensors[int(roster.tensor[slot])]
            region = region_of(roster, slot)
            for part in region.subtract(hole) if name == tensor else [region]:
                builder.add(name, part)
        before.append(builder.build())
    with pytest.raises(TransitionError, match=f"'{tensor.name}': rank .* which no rank of the"):
        Case(tuple(before), case.after).plan()


def test_a_tensor_nobody_holds_is_refused_by_name() -> None:
    nothing = RosterBuilder().build()
    after = whole_rows(2, (0,), (1,), num_ranks=2)
    case = Case((nothing, nothing), tuple(b.build() for b in after))
    with pytest.raises(
        TransitionError, match=r"'embedding': rank 0 .* needs \[\(0, 0\), \(1, 4\)\), which no rank"
    ):
        case.plan()


def test_nothing_wanted_is_an_empty_plan() -> None:
    nothing = RosterBuilder().build()
    assert Case((nothing,), (nothing,)).plan().moved_bytes == 0
    before = whole_rows(2, (0,), (1,), num_ranks=2)
    case = Case(tuple(b.build() for b in before), (nothing, nothing))
    assert case.plan().moved_bytes == case.plan().retained_bytes == 0


def test_roster_sets_over_different_tensors_are_refused() -> None:
    case = layout_case(ParallelLayout(tp=2), ParallelLayout(pp=2))
    alone = RosterSet.merge(case.before[:1])
    other = RosterSet.merge([RosterBuilder().build()])
    with pytest.raises(ValueError, match="share one list of logical tensors"):
        choose_routes(alone, other, Topology.single_node(1))


# ------------------------------------------------------------------ the checker itself


@pytest.fixture(scope="module")
def sound() -> tuple[Routes, RosterSet, RosterSet]:
    case = layout_case(ParallelLayout(tp=2, dp=2), ParallelLayout(tp=2, pp=2))
    routes = choose_routes(case.source, case.target, Topology.single_node(4))
    check_coverage(routes, case.source, case.target)
    return routes, case.source, case.target


def changed(routes: Routes, **columns: object) -> Routes:
    return dataclasses.replace(routes, **columns)  # type: ignore[arg-type]


def test_a_lost_piece_is_found(sound: tuple[Routes, RosterSet, RosterSet]) -> None:
    routes, source, target = sound
    for lost in range(len(routes)):
        keep = np.array([i for i in range(len(routes)) if i != lost])
        with pytest.raises(TransitionError, match=r"slot \d+ of rank \d+ gets \d+ of \d+ elements"):
            check_coverage(routes.take(keep), source, target)


def test_a_piece_written_twice_is_found(sound: tuple[Routes, RosterSet, RosterSet]) -> None:
    routes, source, target = sound
    for twice in range(0, len(routes), 3):
        more = np.array([*range(len(routes)), twice])
        with pytest.raises(TransitionError, match="overlap"):
            check_coverage(routes.take(more), source, target)


def test_a_piece_from_a_rank_that_lacks_it_is_found(
    sound: tuple[Routes, RosterSet, RosterSet],
) -> None:
    routes, source, target = sound
    stop = routes.stop.copy()
    stop[0, 0] += 1
    with pytest.raises(TransitionError, match="is outside its source fragment"):
        check_coverage(changed(routes, stop=stop), source, target)
    slot = routes.src_slot.copy()
    slot[0] = (slot[0] + 1) % 3
    with pytest.raises(TransitionError, match="is outside its source fragment"):
        check_coverage(changed(routes, src_slot=slot), source, target)


def test_the_bound_counts_a_region_held_twice_once() -> None:
    tensor = Model(rows=4).embedding
    before, after = RosterBuilder(), RosterBuilder()
    for region in (Region((0, 0), (2, 4)), Region((1, 0), (3, 4)), Region((0, 0), (2, 4))):
        before.add(tensor, region)
    after.add(tensor, Region.whole(tensor.shape))
    case = Case((before.build(),), (after.build(),))
    assert lower_bound_bytes(case.source, case.target) == brute_force_bound(case) == 4 * 12


def test_a_target_with_less_or_more_than_the_source_is_named() -> None:
    tensor = LogicalTensor("layers", (4, 2), FLOAT32)

    def rosters(*layers: range) -> RosterSet:
        builders = [RosterBuilder() for _ in layers]
        for builder, held_here in zip(builders, layers, strict=True):
            for layer in held_here:
                builder.add(tensor, Region((layer, 0), (layer + 1, 2)))
        return RosterSet.merge([builder.build() for builder in builders])

    whole = rosters(range(4), range(2, 4))
    check_nothing_lost(whole, rosters(range(2), range(2, 4)))
    with pytest.raises(TransitionError, match="'layers' has 8 elements now and 4 there"):
        check_nothing_lost(whole, rosters(range(2), range(1, 2)))
    with pytest.raises(TransitionError, match="'layers' has 4 elements now and 8 there"):
        check_nothing_lost(rosters(range(2), range(1)), whole)


@given(layout_cases())
@settings(max_examples=40)
def test_layouts_of_one_model_hold_the_same(case: Case) -> None:
    check_nothing_lost(RosterSet.merge(case.before), RosterSet.merge(case.after))
