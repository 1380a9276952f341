"""Random pairs of roster sets, and brute-force truth about them.

Four kinds: *irregular* ones, where ranks hold any boxes, replicated, overlapping or twice;
*shared* ones, where several ranks want what few hold;
*mixed* ones, where each layer of each tensor is laid out in its own way, cut over some ranks,
sharded or replicated over others; and *layouts*, where a small model is cut as Megatron cuts it:
tensors over tp, layers over pp, and flat ranges of what a rank holds over dp.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Plan, PlanOptions, Topology, make_plan
from dynatrain_megatron.planner.routes import Routes, TakesFrom
from dynatrain_megatron.vps import (
    LogicalTensor,
    Region,
    Roster,
    RosterBuilder,
    RosterSet,
    State,
    StateKind,
    flat_range_regions,
)
from dynatrain_megatron.vps.roster import union_of_tensors
from tests.vps.strategies import logical_tensors, regions, slices

FLOAT32 = tuple(
    State(kind, "float32") for kind in (StateKind.PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
)
WEIGHTS = (State(StateKind.PARAM, "bfloat16"),)


@dataclass(frozen=True, slots=True)
class Case:
    """The rosters of all ranks before and after."""

    before: tuple[Roster, ...]
    after: tuple[Roster, ...]

    @property
    def source(self) -> RosterSet:
        return RosterSet.merge(self.before, self._tensors())

    @property
    def target(self) -> RosterSet:
        return RosterSet.merge(self.after, self._tensors())

    def _tensors(self) -> tuple[LogicalTensor, ...]:
        return union_of_tensors([*self.before, *self.after])

    def plan(self, topology: Topology | None = None, options: PlanOptions | None = None) -> Plan:
        nodes = topology or Topology.single_node(len(self.before))
        return make_plan(self.source, self.target, nodes, options or PlanOptions())


# ------------------------------------------------------------------ irregular


@st.composite
def tilings(draw: st.DrawFn, whole: Region) -> list[Region]:
    """Disjoint regions that cover ``whole``, by repeated cuts of any of them in any dim."""
    parts = [whole]
    for _ in range(draw(st.integers(0, 4))):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dims = [d for d, size in enumerate(part.shape) if size > 1]
        if not dims:
            parts.append(part)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(part.start[dim] + 1, part.stop[dim] - 1))
        low, high = list(part.stop), list(part.start)
        low[dim] = high[dim] = at
        parts += [Region(part.start, tuple(low)), Region(tuple(high), part.stop)]
    return parts


@st.composite
def irregular_cases(draw: st.DrawFn, max_ranks: int = 4) -> Case:
    """Sources that hold every element somewhere; targets that want any boxes."""
    num_ranks = draw(st.integers(1, max_ranks))
    ranks = st.integers(0, num_ranks - 1)
    tensors = draw(logical_tensors())
    before = [RosterBuilder() for _ in range(num_ranks)]
    after = [RosterBuilder() for _ in range(num_ranks)]
    for tensor in tensors:
        for tile in draw(tilings(Region.whole(tensor.shape))):
            for rank in draw(st.sets(ranks, min_size=1)):
                before[rank].add(tensor, tile)
        for rank in draw(st.lists(ranks, max_size=2)):
            before[rank].add(tensor, draw(regions(tensor.shape)))
        for rank in draw(st.lists(ranks, max_size=5)):
            after[rank].add(tensor, draw(regions(tensor.shape)))
    return Case(tuple(b.build() for b in before), tuple(b.build() for b in after))


@st.composite
def shared_cases(draw: st.DrawFn, max_ranks: int = 6) -> Case:
    """Few ranks hold what is there, and several want each region of any of it."""
    num_ranks = draw(st.integers(3, max_ranks))
    ranks = st.integers(0, num_ranks - 1)
    before = [RosterBuilder() for _ in range(num_ranks)]
    after = [RosterBuilder() for _ in range(num_ranks)]
    for tensor in draw(logical_tensors()):
        for tile in draw(tilings(Region.whole(tensor.shape))):
            for rank in draw(st.sets(ranks, min_size=1, max_size=2)):
                before[rank].add(tensor, tile)
        for _ in range(draw(st.integers(1, 2))):
            region = draw(regions(tensor.shape))
            for rank in draw(st.sets(ranks, min_size=2)):
                after[rank].add(tensor, region)
    return Case(tuple(b.build() for b in before), tuple(b.build() for b in after))


# ------------------------------------------------------------------ mixed


@st.composite
def bounds(draw: st.DrawFn, start: int, stop: int, parts: int) -> list[int]:
    """Where ``parts`` parts of [start, stop) begin and end; uneven, some of them empty."""
    inner = st.lists(st.integers(start, stop), min_size=parts - 1, max_size=parts - 1)
    return [start, *sorted(draw(inner)), stop]


@st.composite
def placements(draw: st.DrawFn, whole: Region, num_ranks: int) -> list[tuple[int, Region]]:
    """(rank, region) for one layer: cut over groups of some ranks, then shared within each group.

    Each group either shards its part by flat ranges, as a distributed optimizer does, or all its
    ranks hold all of it.
    """
    ranks = draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True)
    )
    num_groups = draw(st.integers(1, len(ranks))) if whole.ndim else 1
    dim = draw(st.integers(0, whole.ndim - 1)) if whole.ndim else 0
    parts = [whole]
    if whole.ndim:
        cuts = draw(bounds(whole.start[dim], whole.stop[dim], num_groups))
        parts = [
            Region(
                (*whole.start[:dim], low, *whole.start[dim + 1 :]),
                (*whole.stop[:dim], high, *whole.stop[dim + 1 :]),
            )
            for low, high in itertools.pairwise(cuts)
            if low < high
        ]
    found: list[tuple[int, Region]] = []
    for group, part in enumerate(parts):
        members = ranks[group::num_groups]
        if draw(st.booleans()):
            found += [(rank, part) for rank in members]
            continue
        flat = draw(bounds(0, part.numel, len(members)))
        for rank, (low, high) in zip(members, itertools.pairwise(flat), strict=True):
            found += [
                (rank, region.shift(part.start))
                for region in flat_range_regions(part.shape, low, high)
            ]
    return found


@st.composite
def mixed_rosters(
    draw: st.DrawFn, tensors: Sequence[LogicalTensor], num_ranks: int
) -> tuple[Roster, ...]:
    """Rosters in which every tensor, or every layer of one, is laid out in its own way."""
    builders = [RosterBuilder() for _ in range(num_ranks)]
    for tensor in tensors:
        whole = Region.whole(tensor.shape)
        layers = [whole]
        if whole.ndim > 1 and draw(st.booleans()):
            layers = [
                Region((i, *whole.start[1:]), (i + 1, *whole.stop[1:]))
                for i in range(tensor.shape[0])
            ]
        for layer in layers:
            for rank, region in draw(placements(layer, num_ranks)):
                builders[rank].add(tensor, region)
    return tuple(builder.build() for builder in builders)


@st.composite
def mixed_cases(
    draw: st.DrawFn, tensors: Sequence[LogicalTensor] | None = None, max_ranks: int = 5
) -> Case:
    """Two mixed layouts of the same tensors over the same ranks."""
    num_ranks = draw(st.integers(1, max_ranks))
    chosen = draw(logical_tensors()) if tensors is None else tensors
    rosters = mixed_rosters(chosen, num_ranks)
    return Case(draw(rosters), draw(rosters))


# ------------------------------------------------------------------ layouts


@dataclass(frozen=True, slots=True)
class Model:
    """``layers`` equal layers; ``width`` and ``rows`` are what tensor parallelism cuts."""

    layers: int = 4
    hidden: int = 4
    width: int = 12
    rows: int = 12

    @property
    def qkv(self) -> LogicalTensor:
        return LogicalTensor("qkv", (self.layers, self.width, self.hidden), FLOAT32)

    @property
    def proj(self) -> LogicalTensor:
        return LogicalTensor("proj", (self.layers, self.hidden, self.width), FLOAT32)

    @property
    def norm(self) -> LogicalTensor:
        return LogicalTensor("norm", (self.layers, self.hidden), FLOAT32)

    @property
    def embedding(self) -> LogicalTensor:
        return LogicalTensor("embedding", (self.rows, self.hidden), FLOAT32)

    def parameters(
        self, layout: ParallelLayout, at: dict[str, int]
    ) -> list[tuple[LogicalTensor, Region]]:
        """What the rank at a coordinate computes with, in the model's order."""
        tp, tp_rank, hidden = layout.tp, at["tp"], self.hidden
        found: list[tuple[LogicalTensor, Region]] = []
        if at["pp"] == 0:
            rows = self.rows // tp
            found.append(
                (self.embedding, Region((tp_rank * rows, 0), ((tp_rank + 1) * rows, hidden)))
            )
        depth, cut = self.layers // layout.pp, self.width // tp
        for layer in range(at["pp"] * depth, (at["pp"] + 1) * depth):
            low, high = tp_rank * cut, (tp_rank + 1) * cut
            found += [
                (self.norm, Region((layer, 0), (layer + 1, hidden))),
                (self.qkv, Region((layer, low, 0), (layer + 1, high, hidden))),
                (self.proj, Region((layer, 0, low), (layer + 1, hidden, high))),
            ]
        return found

    def rosters(self, layout: ParallelLayout) -> tuple[Roster, ...]:
        """Each rank's share: all of its parameters, or its piece of their concatenation."""
        found = []
        for rank in range(layout.world):
            at = layout.coordinate(rank)
            builder = RosterBuilder()
            parameters = self.parameters(layout, at)
            total = sum(region.numel for _, region in parameters)
            share = -(-total // layout.dp) if layout.dist_opt else total
            first = at["dp"] * share if layout.dist_opt else 0
            offset = 0
            for tensor, region in parameters:
                start = min(max(first - offset, 0), region.numel)
                stop = min(max(first + share - offset, 0), region.numel)
                for part in flat_range_regions(region.shape, start, stop):
                    builder.add(tensor, part.shift(region.start))
                offset += region.numel
            found.append(builder.build())
        return tuple(found)


def layout_case(source: ParallelLayout, target: ParallelLayout, model: Model | None = None) -> Case:
    chosen = Model() if model is None else model
    return Case(chosen.rosters(source), chosen.rosters(target))


def choose_routes(source: RosterSet, target: RosterSet, topology: Topology) -> Routes:
    """All pieces, moved and retained, of a plan without relays."""
    (only,) = make_plan(source, target, topology, PlanOptions(relay=False)).passes
    return only.schedule.pieces.and_also(only.schedule.retained)


# ------------------------------------------------------------------ truth


def held(rosters: RosterSet, rank: int, tensor: int) -> NDArray[np.bool_]:
    """Which elements of a tensor a rank holds."""
    found = np.zeros(rosters.tensors[tensor].shape, dtype=np.bool_)
    roster = roster_of(rosters, rank)
    for slot in np.nonzero(roster.tensor == tensor)[0].tolist():
        found[slices(region_of(roster, slot))] = True
    return found


def roster_of(rosters: RosterSet, rank: int) -> Roster:
    """That of one rank."""
    rows, own = rosters.rows, rosters.rows_of(rank)
    return Roster(rosters.tensors, rows.tensor[own], rows.start[own], rows.stop[own])


def bytes_of(roster: Roster) -> int:
    """Bytes of the state a rank holds."""
    return int(RosterSet.merge([roster]).row_bytes.sum())


def region_of(columns: Roster | Routes, row: int, ndim: int | None = None) -> Region:
    """The region in one row, without the padding of dims its tensor does not have."""
    if ndim is None:
        assert isinstance(columns, Roster)
        ndim = len(columns.tensors[int(columns.tensor[row])].shape)
    return Region(
        tuple(int(x) for x in columns.start[row, :ndim]),
        tuple(int(x) for x in columns.stop[row, :ndim]),
    )


def brute_force_bound(case: Case) -> int:
    """Bytes of all wanted elements that the wanting rank does not hold, counted one by one."""
    source, target = case.source, case.target
    total = 0
    for rank in range(target.num_ranks):
        roster = roster_of(target, rank)
        for slot, tensor in enumerate(roster.tensor.tolist()):
            missing = ~held(source, rank, tensor)[slices(region_of(roster, slot))]
            total += int(missing.sum()) * target.tensors[tensor].element_bytes
    return total


def carry_out(plan: Plan, case: Case) -> None:
    """Do what a plan says on arrays whose elements say who they are; assert the right result.

    Each element is its flat index in its logical tensor, and each write is counted, so a wrong,
    missing or repeated element names itself.
    """
    source = [_Storage(case.before[rank], filled=True) for rank in range(plan.num_ranks)]
    target = [_Storage(case.after[rank], filled=False) for rank in range(plan.num_ranks)]
    for side, part in plan.pieces():
        given = source if side is TakesFrom.SOURCE else target
        taken = []
        for i in range(len(part)):  # all of a pass before any of it is there
            tensor = plan.tensors[int(part.tensor[i])]
            region = region_of(part, i, len(tensor.shape))
            values = given[int(part.src[i])].read(int(part.src_slot[i]), tensor, region)
            taken.append((i, tensor, region, values.copy()))
        for i, tensor, region, values in taken:
            target[int(part.dst[i])].write(int(part.dst_slot[i]), tensor, region, values)
    for rank, storage in enumerate(target):
        storage.check(f"rank {rank}")


class _Storage:
    """One rank's fragments as arrays."""

    def __init__(self, roster: Roster, *, filled: bool) -> None:
        self._roster = roster
        self._wanted = [_identity(roster, slot) for slot in range(len(roster))]
        self._arrays = [
            wanted.copy() if filled else np.full_like(wanted, -1) for wanted in self._wanted
        ]
        self._writes = [np.zeros_like(wanted) for wanted in self._wanted]

    def read(self, slot: int, tensor: LogicalTensor, region: Region) -> NDArray[np.int64]:
        return self._arrays[slot][self._inside(slot, tensor, region)]

    def write(
        self, slot: int, tensor: LogicalTensor, region: Region, values: NDArray[np.int64]
    ) -> None:
        at = self._inside(slot, tensor, region)
        self._arrays[slot][at] = values
        self._writes[slot][at] += 1

    def check(self, who: str) -> None:
        for slot, (array, wanted, writes) in enumerate(
            zip(self._arrays, self._wanted, self._writes, strict=True)
        ):
            assert (writes == 1).all(), f"{who} slot {slot}: written {writes.tolist()} times"
            assert (array == wanted).all(), f"{who} slot {slot}: {array.tolist()}"

    def _inside(self, slot: int, tensor: LogicalTensor, region: Region) -> tuple[slice, ...]:
        own = region_of(self._roster, slot)
        assert self._roster.tensors[int(self._roster.tensor[slot])] == tensor
        assert own.contains(region), f"{region} is not in {own}"
        return slices(region.relative_to(own.start))


def _identity(roster: Roster, slot: int) -> NDArray[np.int64]:
    tensor = roster.tensors[int(roster.tensor[slot])]
    whole = np.arange(tensor.numel, dtype=np.int64).reshape(tensor.shape)
    return whole[slices(region_of(roster, slot))]
