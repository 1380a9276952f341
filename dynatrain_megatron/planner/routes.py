"""Routes: for each region a target fragment needs, the holder it comes from.

Every rank works out who sends how much to whom (:mod:`planner.flows`, :mod:`planner.shares`), and
then the *pieces* of those pairs only that it belongs to itself. A piece is written exactly once,
from exactly one source::

    cells of the source        target fragment        pieces
    +----------+------+        . . . . . . . .        +---+------+
    | {0,2}    | {1,3}|    x   . . +-------+ .   ->   |   |      |   from 0 or 2, and from 1 or 3
    +----------+------+        . . +-------+ .        +---+------+
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dynatrain_megatron.planner.cells import disjoint_cells
from dynatrain_megatron.planner.flows import Flows, cover_flows
from dynatrain_megatron.planner.shares import Shares, share_cover
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import (
    BoolArray,
    IntArray,
    flat_parts,
    ranges,
    run_starts,
    volumes,
)
from dynatrain_megatron.vps.roster import RosterSet


class TakesFrom(StrEnum):
    """Whose fragments a sender takes from: those of the source, or of the target."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Pieces as columns; a piece with ``src == dst`` is retained, every other one is moved.

    ``tensor``, ``src``, ``dst``, ``src_slot``, ``dst_slot`` [n]; ``start``, ``stop`` [n, D] in the
    logical tensor's coordinates.
    """

    tensor: IntArray
    src: IntArray
    dst: IntArray
    src_slot: IntArray
    dst_slot: IntArray
    start: IntArray
    stop: IntArray

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def numel(self) -> IntArray:
        """Elements of each piece, [n]."""
        return volumes(self.start, self.stop)

    def take(self, index: IntArray | BoolArray) -> Routes:
        """The pieces at ``index``, in that order."""
        return Routes(
            self.tensor[index],
            self.src[index],
            self.dst[index],
            self.src_slot[index],
            self.dst_slot[index],
            self.start[index],
            self.stop[index],
        )

    def and_also(self, other: Routes) -> Routes:
        """The pieces of both, one after the other."""
        return Routes(
            *(np.concatenate((getattr(self, n), getattr(other, n))) for n in Routes.__slots__)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A region ``[start, stop)`` of tensor number ``tensor`` that several ranks hold.

    ``holders`` gives the slot of the fragment it lies in, by rank.
    """

    tensor: int
    start: IntArray
    stop: IntArray
    holders: dict[int, int]


def unique_cover(rosters: RosterSet, rank: int | None = None) -> Routes:
    """Each element any rank holds, once: pieces with the rank chosen to stand for it as ``src``.

    Replicas are shared out evenly. ``dst`` equals ``src``. With ``rank`` only those of that rank.
    """
    topology = Topology.single_node(rosters.num_ranks)
    flows = cover_flows(rosters, topology)
    shares = share_cover(flows, topology)
    if rank is not None:
        shares = shares.take(shares.src == rank)
    pieces, _, _ = pieces_of(flows, shares, rosters, rosters)
    return pieces


def replicas(rosters: RosterSet) -> Iterator[Replica]:
    """Every region that more than one rank holds; disjoint, in the same order everywhere."""
    cells = disjoint_cells(rosters)
    members: list[list[int]] = [[] for _ in range(rosters.num_kinds)]
    for rank, kind in enumerate(rosters.kind_of_rank.tolist()):
        members[kind].append(rank)
    first, kinds, slots = cells.first.tolist(), cells.kind.tolist(), cells.slot.tolist()
    for cell, tensor in enumerate(cells.tensor.tolist()):
        own = range(first[cell], first[cell + 1])
        holders = {rank: slots[i] for i in own for rank in members[kinds[i]]}
        if len(holders) > 1:
            yield Replica(tensor, cells.start[cell], cells.stop[cell], holders)


def pieces_of(
    flows: Flows,
    shares: Shares,
    source: RosterSet,
    target: RosterSet,
    steps: IntArray | None = None,
    takes_from: TakesFrom = TakesFrom.SOURCE,
) -> tuple[Routes, IntArray, IntArray]:
    """The pieces of ``shares`` in order, and for each its share and the part that it is in.

    All wanters of an item have the same box, so a relay finds it in its target's fragment of that.

    The shares of a pair of ranks follow one another and are its stream. With ``steps`` [shares] it
    is cut into parts of so many elements, and every piece lies in one of them.
    """
    share, item, low, high, at = _cut_items(flows, shares)
    part = np.zeros(len(share), dtype=np.int64)
    if steps is not None:
        step = steps[share]
        count = (at + high - low - 1) // step - at // step + 1
        part, owner = ranges(at // step, count)
        share, item, low, high, at, step = (x[owner] for x in (share, item, low, high, at, step))
        low, high = (
            low + np.maximum(part * step - at, 0),
            np.minimum(high, low + (part + 1) * step - at),
        )
    owner, start, stop = flat_parts(flows.start[item], flows.stop[item], low, high)
    share, item, part = share[owner], item[owner], part[owner]
    src, dst, cell, box = shares.src[share], shares.dst[share], flows.cell[item], flows.box[item]
    if takes_from is TakesFrom.SOURCE:
        src_slot = flows.cells.slots(cell, source.kind_of_rank[src])
    else:
        src_slot = flows.boxes.slots(box, target.kind_of_rank[src])
    pieces = Routes(
        flows.cells.tensor[cell],
        src,
        dst,
        src_slot,
        flows.boxes.slots(box, target.kind_of_rank[dst]),
        start,
        stop,
    )
    return pieces, share, part


def _cut_items(
    flows: Flows, shares: Shares
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Shares as items: (share, item, low, high, at) of each flat range [low, high) of an item.

    ``at`` is where the range begins in the stream of its pair of ranks.
    """
    begin = flows.begin[shares.flow]
    first = np.searchsorted(flows.offset, begin + shares.start, side="right") - 1
    last = np.searchsorted(flows.offset, begin + shares.stop, side="left")
    item, share = ranges(first, last - first)
    from_start = flows.offset[item] - (begin + shares.start)[share]  # in the share; may be < 0
    low = np.maximum(-from_start, 0)
    high = np.minimum(flows.offset[item + 1] - flows.offset[item], shares.numel[share] - from_start)
    new = run_starts(shares.src, shares.dst)
    before = np.cumsum(shares.numel) - shares.numel
    in_pair = before - before[np.nonzero(new)[0]][np.cumsum(new) - 1]
    return share, item, low, high, in_pair[share] + from_start + low
