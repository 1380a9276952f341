"""Placement: which process takes which rank of the target layout.

Ranks of the target are coordinates; which process takes which of them is free, within one rule:

    The ranks that share a node where every process keeps its number share a node again. So nodes
    change places as wholes, with nodes of as many ranks, and ranks within their node.

A tensor parallel group that was inside a node stays inside one, and so does every other group.
Among all such placements this finds one that keeps the most bytes where they are, exactly: for each
pair of nodes first the best way for the one's processes to take the other's ranks, then the best
way for nodes to take each other's place (:mod:`planner.assignment`)::

    rank of the target    0   1  |  2   3          worth of         node's ranks
    it wants              C   D  |  B   A          node's processes   (C D)   (B A)
    process               0   1  |  2   3            (A B)              0       2    0 -> 3, 1 -> 2
    it has                A   B  |  C   D            (C D)              2       0    2 -> 0, 3 -> 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.planner.assignment import assign
from dynatrain_megatron.planner.cells import RankSets
from dynatrain_megatron.planner.flows import Flows, find_flows
from dynatrain_megatron.planner.shares import choose_shares
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import IntArray, ranges, run_starts
from dynatrain_megatron.vps.roster import RosterSet

_BATCH = 1 << 22  # numbers in the tables that are worked on at once


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """``pinned`` processes keep their number, and no other node takes their node's place.

    Such as those that leave the job: their ranks hold nothing in the target, and without this any
    other process could be the one to leave.
    """

    pinned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """``process_of_rank[r]`` is the process that takes rank r of the target.

    Bytes moved and seconds predicted with it, and with every process keeping its number
    (``identity``). Seconds are the busiest rank's or node's on the wire at the topology's speeds.
    """

    process_of_rank: tuple[int, ...]
    moved_bytes: int
    identity_bytes: int
    seconds: float
    identity_seconds: float

    @property
    def saved_bytes(self) -> int:
        return self.identity_bytes - self.moved_bytes


def place(
    source: RosterSet,
    target: RosterSet,
    topology: Topology,
    options: PlacementOptions | None = None,
) -> Placement:
    """The placement that keeps the most bytes where they are, by the rule of this module.

    ``source`` is by process, ``target`` by rank, ``topology`` by process; all have equally many.
    Pure and deterministic. Where nothing is saved every process keeps its number; else, among
    equally good ones, many nodes and then many places within nodes stay as they are. Raises
    :class:`TransitionError` where an element of the target has no holder.
    """
    flows = find_flows(source, target, topology)
    pinned = () if options is None else options.pinned
    found = np.arange(target.num_ranks)
    for members in _nodes_by_width(topology, pinned):
        ranks, processes = _best(_Nodes.of(members, source, target), flows)
        found[ranks] = processes
    before = after = _transfer(flows, topology)
    if (found != np.arange(len(found))).any():
        after = _transfer(find_flows(source, target.permuted(found), topology), topology)
    return Placement(
        tuple(found.tolist()),
        after.moved_bytes,
        before.moved_bytes,
        after.seconds,
        before.seconds,
    )


@dataclass(frozen=True, slots=True)
class _Transfer:
    """What moves, and the busiest rank's or node's time on the wire."""

    moved_bytes: int
    seconds: float


def _transfer(flows: Flows, topology: Topology) -> _Transfer:
    """With the senders that a plan would choose; each way counts by itself."""
    shares = choose_shares(flows, topology)
    moved = shares.take(shares.src != shares.dst)
    nbytes = moved.numel * flows.element_bytes[moved.flow]
    node, speeds = np.array(topology.node, dtype=np.int64), topology.speeds
    far = node[moved.src] != node[moved.dst]
    # Whole nanoseconds, so that their order does not matter and every rank finds the same.
    wire = np.rint(nbytes / np.where(far, speeds.far_gb_s, speeds.near_gb_s)).astype(np.int64)
    link = run_starts(moved.src, moved.dst)  # one operation for each; shares are in this order
    operations = np.bincount(np.concatenate((moved.src[link], moved.dst[link])), None, len(node))
    least = [0]
    for end in (moved.src, moved.dst):
        busy = operations * round(speeds.operation_s * 1e9)
        np.add.at(busy, end, wire)
        least.append(int(busy.max(initial=0)))
        if topology.node_width is not None:
            through = np.zeros(int(node.max()) + 1, dtype=np.int64)
            np.add.at(through, node[end[far]], wire[far])
            least.append(int(through.max(initial=0)) // topology.node_width)
    return _Transfer(int(nbytes.sum()), max(least) / 1e9)


# ---------------------------------------------------------------------- nodes


def _nodes_by_width(topology: Topology, pinned: tuple[int, ...]) -> list[IntArray]:
    """The ranks of nodes that may change places, [nodes, width] for each width.

    A node with pinned processes is by itself, without these.
    """
    node = np.array(topology.node, dtype=np.int64)
    order = np.argsort(node, kind="stable")
    alone = set(node[list(pinned)].tolist())
    by_width: dict[tuple[int, int], list[IntArray]] = {}
    for members in np.split(order, np.nonzero(run_starts(node[order]))[0][1:]):
        number = int(node[members[0]])
        if number in alone:
            members = members[~np.isin(members, pinned)]
        by_width.setdefault((len(members), number if number in alone else -1), []).append(members)
    return [np.stack(nodes) for (width, _), nodes in sorted(by_width.items()) if width]


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """Nodes of one width, and which of them are alike.

    ``members`` [nodes, width] are their ranks. Nodes of the same ``source_class`` [nodes] have
    processes that hold the same, those of the same ``target_class`` have ranks that want the same;
    ``source`` and ``target`` are where a rank is in a node that stands for its class (class · width
    + place), -1 for all others, [num_ranks].
    """

    members: IntArray
    source_class: IntArray
    target_class: IntArray
    source: IntArray
    target: IntArray

    @classmethod
    def of(cls, members: IntArray, source: RosterSet, target: RosterSet) -> _Nodes:
        classes, places = [], []
        for rosters in (source, target):
            kinds = rosters.kind_of_rank[members]
            _, first, number = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
            place = np.full(rosters.num_ranks, -1)
            place[members[first]] = np.arange(members[first].size).reshape(members[first].shape)
            classes.append(number.reshape(-1))
            places.append(place)
        return cls(members, *classes, *places)

    @property
    def width(self) -> int:
        return int(self.members.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """Classes of target nodes and of source nodes."""
        return int(self.target_class.max()) + 1, int(self.source_class.max()) + 1


def _best(nodes: _Nodes, flows: Flows) -> tuple[IntArray, IntArray]:
    """(rank, process) of all ranks of these nodes."""
    number = len(nodes.members)
    pair, within, worth = _within_nodes(nodes, flows)
    # A node that stays counts where bytes are equal.
    table = worth[np.ix_(nodes.target_class, nodes.source_class)] * (number + 1)
    table[np.arange(number), np.arange(number)] += 1
    taken_by = assign(table[None])[0]
    chosen = nodes.target_class * nodes.shape[1] + nodes.source_class[taken_by]
    place = within[pair[chosen]]
    processes = nodes.members[taken_by[:, None], place]
    return nodes.members.reshape(-1), processes.reshape(-1)


def _within_nodes(nodes: _Nodes, flows: Flows) -> tuple[IntArray, IntArray, IntArray]:
    """The best way for the processes of each class of nodes to take the ranks of each other class.

    (row of the second for each pair of classes, the process for each rank as places in their nodes,
    bytes kept [target classes, source classes]). The last row is for all that have no choice.
    """
    width, shape = nodes.width, nodes.shape
    all_alike, pairs, tables = _overlaps(nodes, flows)
    found = np.empty((len(pairs) + 1, width), dtype=np.int64)
    found[-1] = np.arange(width)
    kept = np.zeros(len(pairs), dtype=np.int64)
    step = max(1, _BATCH // width**2)
    for low in range(0, len(pairs), step):
        own = tables[low : low + step]
        best = assign(own * (width + 1) + np.eye(width, dtype=np.int64))
        found[low : low + len(own)] = best
        kept[low : low + len(own)] = np.take_along_axis(own, best[:, :, None], axis=2).sum(
            axis=(1, 2)
        )
    row = np.full(shape[0] * shape[1], len(pairs))
    row[pairs] = np.arange(len(pairs))
    worth = all_alike * width
    worth[pairs] += kept
    return row, found, worth.reshape(shape)


def _overlaps(nodes: _Nodes, flows: Flows) -> tuple[IntArray, IntArray, IntArray]:
    """What processes hold of what ranks want, bytes, by pair of classes of nodes.

    (what every process of the one holds that every rank of the other wants [pairs], the pairs with
    more than that, for each of those a table [width, width], rank by process). A pair's number is
    that of the target's class times the number of the source's classes, plus that of the source's.
    """
    width, (_, columns) = nodes.width, nodes.shape
    holders = _Sides.of(flows.sources, nodes.source, width)
    wanters = _Sides.of(flows.targets, nodes.target, width)
    nbytes = flows.numel * flows.element_bytes
    number = nodes.shape[0] * columns

    flow, a, b = _product(flows, wanters.whole, holders.whole)
    all_alike = np.zeros(number, dtype=np.int64)
    np.add.at(all_alike, a * columns + b, nbytes[flow])

    parts = (
        _product(flows, wanters.part, holders.part),
        _product(flows, wanters.part, holders.whole.spread(width)),
        _product(flows, wanters.whole.spread(width), holders.part),
    )
    flow, a, b = (np.concatenate(columns_) for columns_ in zip(*parts, strict=True))
    pair = (a // width) * columns + b // width
    some = np.zeros(number, dtype=np.bool_)
    some[pair] = True
    pairs = np.nonzero(some)[0]
    row = np.cumsum(some) - 1
    tables = np.zeros((len(pairs), width, width), dtype=np.int64)
    np.add.at(tables, (row[pair], a % width, b % width), nbytes[flow])
    return all_alike, pairs, tables


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """Members of numbered sets: set i has ``member[first[i]:first[i + 1]]``."""

    first: IntArray
    member: IntArray

    @classmethod
    def of(cls, number: IntArray, member: IntArray, num_sets: int) -> _Members:
        return cls(np.searchsorted(number, np.arange(num_sets + 1)), member)

    def spread(self, width: int) -> _Members:
        """Places in nodes instead of nodes."""
        places = self.member[:, None] * width + np.arange(width)
        return _Members(self.first * width, places.reshape(-1))


@dataclass(frozen=True, slots=True, eq=False)
class _Sides:
    """Sets of ranks as the nodes that are in them as a ``whole``, and the places of all others."""

    whole: _Members
    part: _Members

    @classmethod
    def of(cls, sets: RankSets, place: IntArray, width: int) -> _Sides:
        """``place`` [num_ranks] as in :class:`_Nodes`."""
        at, number = place[sets.rank], np.repeat(np.arange(len(sets)), sets.size)
        number, at = number[at >= 0], at[at >= 0]
        order = np.lexsort((at, number))
        number, at = number[order], at[order]
        begin = np.nonzero(run_starts(number, at // width))[0]
        size = np.diff(np.append(begin, len(at)))
        whole = size == width
        in_part = np.repeat(~whole, size)
        return cls(
            _Members.of(number[begin[whole]], at[begin[whole]] // width, len(sets)),
            _Members.of(number[in_part], at[in_part], len(sets)),
        )


def _product(
    flows: Flows, wanters: _Members, holders: _Members
) -> tuple[IntArray, IntArray, IntArray]:
    """(flow, wanter, holder) for each wanter and each holder of each flow."""
    one, many = np.diff(wanters.first)[flows.wanters], np.diff(holders.first)[flows.holders]
    at, flow = ranges(wanters.first[flows.wanters], np.where(many > 0, one, 0))
    other, owner = ranges(holders.first[flows.holders[flow]], many[flow])
    return flow[owner], wanters.member[at[owner]], holders.member[other]
