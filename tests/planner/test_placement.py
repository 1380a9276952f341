"""Placement: within its rule nothing keeps more, and plans made with it move what it says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import (
    Placement,
    PlacementOptions,
    PlanOptions,
    Speeds,
    Topology,
    make_plan,
    place,
)
from dynatrain_megatron.planner.checks import lower_bound_bytes
from dynatrain_megatron.shapes import make_rosters
from dynatrain_megatron.vps import Region, Roster, RosterBuilder, RosterSet
from dynatrain_megatron.vps.roster import KindRows
from tests.planner.test_balance import Transition, transitions
from tests.planner.worlds import Case, Model, bytes_of, irregular_cases, mixed_cases
from tests.shapes.test_rosters import TINY

CASES = st.one_of(irregular_cases(), mixed_cases())


@st.composite
def topologies(draw: st.DrawFn, num_ranks: int) -> Topology:
    node = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    return Topology(tuple(node), draw(st.sampled_from([None, 1, 2])))


def allowed(process_of_rank: Sequence[int], topology: Topology, pinned: Sequence[int] = ()) -> bool:
    """The rule, written another way: ranks share a node where their processes do."""
    node = topology.node
    pairs = itertools.combinations(range(len(node)), 2)
    taken = [node[process] for process in process_of_rank]
    return all((node[a] == node[b]) == (taken[a] == taken[b]) for a, b in pairs) and all(
        process_of_rank[p] == p for p in pinned
    )


def retained(case: Case, process_of_rank: Sequence[int]) -> int:
    """Bytes that do not move, negative and up to a constant."""
    return -lower_bound_bytes(case.source, case.target.permuted(process_of_rank))


# ------------------------------------------------------------------ the best there is


@settings(max_examples=50, deadline=None)
@given(CASES, st.data())
def test_within_the_rule_no_permutation_keeps_more(case: Case, data: st.DataObject) -> None:
    number = len(case.before)
    topology = data.draw(topologies(number))
    pinned = tuple(sorted(data.draw(st.sets(st.integers(0, number - 1), max_size=2))))
    found = place(case.source, case.target, topology, PlacementOptions(pinned))
    assert allowed(found.process_of_rank, topology, pinned)
    choices = [p for p in itertools.permutations(range(number)) if allowed(p, topology, pinned)]
    best = max(retained(case, choice) for choice in choices)
    assert retained(case, found.process_of_rank) == best
    if found.saved_bytes == 0:
        assert found.process_of_rank == tuple(range(number))


def kept_matrix(source: RosterSet, target: RosterSet) -> np.ndarray:
    """Bytes of each rank's (row) needs that each process (column) holds, by the lower bound."""
    size = source.num_ranks
    nothing = RosterSet.merge([RosterBuilder().build()] * size, source.tensors)
    need = [lower_bound_bytes(nothing, target, rank) for rank in range(size)]
    kept = np.zeros((size, size), dtype=np.int64)
    for shift in range(size):
        order = [(process - shift) % size for process in range(size)]
        shifted = source.permuted(order)
        for rank in range(size):
            process = (rank + shift) % size
            kept[rank, process] = need[rank] - lower_bound_bytes(shifted, target, rank)
    return kept


def small(seed: int, most_ranks: int) -> Iterator[Transition]:
    return (one for one in transitions(seed) if one.before.num_ranks <= most_ranks)


def test_on_one_node_it_is_as_good_as_scipys_assignment() -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="the judge is scipy's assignment")
    saving = 0
    for one in itertools.islice(small(1, 13), 8):
        kept = kept_matrix(one.before, one.after)
        best = int(kept[optimize.linear_sum_assignment(kept, maximize=True)].sum())
        found = place(one.before, one.after, Topology.single_node(len(kept)))
        name = f"{one.kind}: {one.source} -> {one.target}"
        assert int(kept[np.arange(len(kept)), found.process_of_rank].sum()) == best, name
        saving += found.saved_bytes > 0
    assert saving >= 4


LAYERS = 6
Held = Sequence[int | tuple[int, ...]]


def layers(held: Held) -> tuple[Roster, ...]:
    """Rank r holds the layers ``held[r]`` of a tensor, whole."""
    weight, found = Model(layers=LAYERS).qkv, []
    for numbers in held:
        builder = RosterBuilder()
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            low, high = (number, 0, 0), (number + 1, *weight.shape[1:])
            builder.add(weight, Region(low, high))
        found.append(builder.build())
    return tuple(found)


@st.composite
def replicated(draw: st.DrawFn) -> tuple[Topology, Held, Held]:
    """Nodes of equal width, whose ranks often hold the same as others of the node or elsewhere."""
    width, number = draw(st.sampled_from([(1, 5), (2, 2), (2, 3), (3, 2), (5, 1)]))
    sets = st.lists(st.integers(0, LAYERS - 1), max_size=3, unique=True).map(tuple)
    some = draw(st.lists(sets, min_size=2, max_size=4))

    def side() -> Held:
        found: list[tuple[int, ...]] = []
        for _ in range(number):
            alike = draw(st.sampled_from(some))
            mixed = st.lists(st.sampled_from(some), min_size=width, max_size=width)
            found += draw(st.one_of(st.just([alike] * width), mixed))
        return found

    before = [*side()]
    before[0] = tuple(range(LAYERS))  # so that each layer has a holder
    return Topology.of_nodes(width * number, width), before, side()


@settings(max_examples=75, deadline=None)
@given(replicated())
def test_among_nodes_that_are_alike_no_permutation_keeps_more(
    world: tuple[Topology, Held, Held],
) -> None:
    topology, before, after = world
    size = len(before)
    case = Case(layers(before), layers(after))
    kept = np.array([[len({*has} & {*wants}) for has in before] for wants in after])
    choices = [p for p in itertools.permutations(range(size)) if allowed(p, topology)]

    def merit(choice: Sequence[int]) -> tuple[int, int]:
        """What counts, and then how many nodes stay."""
        stay = sum(topology.node[p] == topology.node[r] for r, p in enumerate(choice))
        return int(kept[range(size), choice].sum()), stay

    found = place(case.source, case.target, topology).process_of_rank
    assert merit(found) == max(map(merit, choices))
    if merit(range(size)) == merit(found):
        assert found == tuple(range(size))


# ------------------------------------------------------------------ plans made with it


def check_plan(source: RosterSet, target: RosterSet, topology: Topology, found: Placement) -> None:
    options = PlanOptions()
    before = make_plan(source, target, topology, options)
    after = make_plan(source, target.permuted(found.process_of_rank), topology, options)
    assert after.moved_bytes == after.lower_bound_bytes == found.moved_bytes
    assert before.moved_bytes == before.lower_bound_bytes == found.identity_bytes
    assert before.moved_bytes - after.moved_bytes == found.saved_bytes >= 0
    assert after.retained_bytes - before.retained_bytes == found.saved_bytes


@settings(max_examples=40, deadline=None)
@given(CASES, st.data())
def test_plans_agree(case: Case, data: st.DataObject) -> None:
    topology = data.draw(topologies(len(case.before)))
    found = place(case.source, case.target, topology)
    check_plan(case.source, case.target, topology, found)


def test_plans_of_layouts_agree() -> None:
    less = 0
    for one in itertools.islice(transitions(2), 12):
        found = place(one.before, one.after, one.topology)
        check_plan(one.before, one.after, one.topology, found)
        assert allowed(found.process_of_rank, one.topology)
        less += found.saved_bytes > 0
    assert less >= 6


@settings(max_examples=40, deadline=None)
@given(CASES, st.data())
def test_a_permuted_set_is_that_of_permuted_rosters(case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(case.after))))
    rosters: list[Roster] = list(case.after)
    for rank, process in enumerate(order):
        rosters[process] = case.after[rank]
    merged = RosterSet.merge(rosters, case.target.tensors)
    assert case.target.permuted(order).digest() == merged.digest()


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 3]])
def test_only_permutations_are_taken(order: list[int]) -> None:
    rosters = RosterSet.merge([RosterBuilder().build()] * 3)
    with pytest.raises(ValueError, match="must name each of 3 processes once"):
        rosters.permuted(order)


# ------------------------------------------------------------------ which of several


def processes(
    before: Held,
    after: Held,
    topology: Topology,
    *pinned: int,
) -> tuple[int, ...]:
    case = Case(layers(before), layers(after))
    return place(case.source, case.target, topology, PlacementOptions(pinned)).process_of_rank


@pytest.mark.parametrize(
    ("node", "after", "expected"),
    [
        ((0, 0, 0, 0), (3, 2, 1, 0), (3, 2, 1, 0)),
        ((0, 0, 1, 1), (3, 2, 1, 0), (3, 2, 1, 0)),
        # Nodes stay whole: 0 and 2 share one, so one of them must move.
        ((0, 0, 1, 1), (0, 2, 1, 3), (0, 1, 2, 3)),
        ((0, 1, 0, 1), (1, 0, 3, 2), (1, 0, 3, 2)),
        ((0, 1, 1, 1), (1, 3, 0, 2), (0, 3, 1, 2)),
        ((0, 1, 2, 3), (1, 2, 3, 0), (1, 2, 3, 0)),
    ],
)
def test_who_takes_what(
    node: tuple[int, ...], after: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert processes((0, 1, 2, 3), after, Topology(node)) == expected


def test_what_saves_nothing_is_left_alone() -> None:
    for node in ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)):
        topology = Topology(node)
        assert processes((0, 0, 0, 0), (0, 0, 0, 0), topology) == (0, 1, 2, 3)
        assert processes((0, 1, (), ()), ((), (), (), ()), topology) == (0, 1, 2, 3)


def test_what_is_as_good_where_it_is_stays() -> None:
    # Node 0 must go to node 1; the two others hold the same, and so do the ranks of node 1.
    topology = Topology((0, 0, 1, 1, 2, 2))
    before, after = (0, 1, 2, 2, 2, 2), (2, 2, 0, 1, 2, 2)
    assert processes(before, after, topology) == (2, 3, 0, 1, 4, 5)


def test_pinned_processes_stay_and_so_does_their_node() -> None:
    topology = Topology((0, 0, 1, 1))
    before, after = (0, 1, 2, 3), (3, 2, 1, 0)
    assert processes(before, after, topology, 2) == (0, 1, 2, 3)
    assert processes((0, 1, 2, 3), (1, 0, 3, 2), topology, 2) == (1, 0, 2, 3)


def test_without_a_pin_another_process_may_be_the_one_to_leave() -> None:
    topology = Topology.of_nodes(4, 1)
    before, after = (0, 1, 2, 3), (2, 3, (), ())
    assert processes(before, after, topology) == (2, 3, 0, 1)
    assert processes(before, after, topology, 2, 3) == (0, 1, 2, 3)


def test_how_kinds_are_numbered_does_not_matter() -> None:
    for one in itertools.islice(transitions(3), 8):
        expected = place(one.before, one.after, one.topology)
        assert place(one.before, one.after, one.topology) == expected
        again = (renumbered(rosters, seed=7) for rosters in (one.before, one.after))
        assert place(*again, one.topology) == expected


def renumbered(rosters: RosterSet, seed: int) -> RosterSet:
    """The same rosters, with other numbers for their kinds."""
    order = list(range(rosters.num_kinds))
    random.Random(seed).shuffle(order)
    first, rows = rosters.rows_of_kind, rosters.rows
    at = np.concatenate([np.arange(first[kind], first[kind + 1]) for kind in order])
    number = np.argsort(order)
    columns = (rows.slot[at], rows.tensor[at], rows.start[at], rows.stop[at])
    kinds = np.repeat(np.arange(len(order)), np.diff(first)[order])
    return RosterSet(rosters.tensors, number[rosters.kind_of_rank], KindRows(kinds, *columns))


# ------------------------------------------------------------------ what it predicts


def test_seconds_are_those_of_the_busiest() -> None:
    # Ranks 0 and 1 swap: each sends one layer and receives one, both from another node.
    layer = Case(layers((0, 1)), layers((1, 0)))
    nbytes = bytes_of(layer.before[0])
    speeds = Speeds(operation_s=0.25, near_gb_s=2 * nbytes / 1e9, far_gb_s=nbytes / 1e9)
    for node, seconds in (((0, 0), 0.5 + 2 * 0.25), ((0, 1), 1.0 + 2 * 0.25)):
        topology = Topology(node, speeds=speeds)
        found = place(layer.source, layer.target, topology, PlacementOptions((0, 1)))
        assert found.process_of_rank == (0, 1)
        assert found.seconds == found.identity_seconds == pytest.approx(seconds)
        assert place(layer.source, layer.target, topology).seconds == 0


def test_a_nodes_way_out_may_be_the_busiest() -> None:
    case = Case(layers((0, 1, 2, 3)), layers((2, 3, 0, 1)))
    speeds = Speeds(operation_s=0, near_gb_s=1, far_gb_s=bytes_of(case.before[0]) / 1e9)
    for width, seconds in ((None, 1.0), (2, 1.0), (1, 2.0)):
        topology = Topology((0, 0, 1, 1), width, speeds)
        found = place(case.source, case.target, topology, PlacementOptions((0, 1, 2, 3)))
        assert found.identity_seconds == pytest.approx(seconds)


def test_another_order_of_ranks_needs_no_transfer() -> None:
    layouts = [
        ParallelLayout(tp=2, pp=2, dp=2, order=f"tp-cp-ep-{rest}") for rest in ("dp-pp", "pp-dp")
    ]
    source, target = (make_rosters(TINY, layout) for layout in layouts)
    found = place(source, target, Topology.of_nodes(8, 2))
    assert found.process_of_rank == (0, 1, 4, 5, 2, 3, 6, 7)
    assert found.moved_bytes == found.seconds == 0
    assert found.saved_bytes == found.identity_bytes > 0
