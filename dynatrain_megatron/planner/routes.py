"""Routes: for each region a target fragment needs, the holder it comes from.

For each logical tensor the source fragments of all ranks are collapsed to disjoint *cells*, each
with the set of its holders; replicas are then one cell with several holders. Every non-empty
intersection of a cell with a target fragment is a *piece*: written exactly once, from exactly one
source::

    cells of the source        target fragment        pieces
    +----------+------+        . . . . . . . .        +---+------+
    | {0,2}    | {1,3}|    x   . . +-------+ .   ->   |   |      |   from 0 or 2, and from 1 or 3
    +----------+------+        . . +-------+ .        +---+------+
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.region import Region
from dynatrain_megatron.vps.roster import IntArray, RosterSet


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
        return (self.stop - self.start).prod(axis=1)

    def take(self, index: IntArray | NDArray[np.bool_]) -> Routes:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Disjoint regions of one logical tensor and who holds each: ``holders[i] = {rank: slot}``."""

    start: IntArray
    stop: IntArray
    holders: list[dict[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A region ``[start, stop)`` of tensor number ``tensor`` that several ranks hold.

    ``holders`` gives the slot of the fragment it lies in, by rank.
    """

    tensor: int
    start: IntArray
    stop: IntArray
    holders: dict[int, int]


def choose_routes(source: RosterSet, target: RosterSet, topology: Topology) -> Routes:
    """Route every element of every target fragment.

    What the receiving rank already holds is retained. Everything else comes from the nearest
    holder (same node first) and, among equally near ones, from the one that has the fewest bytes
    to send so far; pieces with the least choice are placed first. Ties fall to the lowest rank,
    so the result depends on the inputs alone.

    Raises :class:`TransitionError` naming tensor, region and rank where no rank holds an element.
    """
    if source.tensors != target.tensors:
        raise ValueError("source and target roster sets must share one list of logical tensors")
    source_rows = _rows_by_tensor(source)
    target_rows = _rows_by_tensor(target)
    parts: list[Routes] = []
    choices: list[list[dict[int, int]]] = []
    for tensor in range(len(target.tensors)):
        wanted = target_rows[tensor]
        if not len(wanted):
            continue
        cells = _cells(source, source_rows[tensor])
        part, holders = _pieces(target, wanted, cells, tensor)
        parts.append(part)
        choices.append(holders)
    if not parts:
        return _empty(target.start.shape[1])
    routes = Routes(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in Routes.__slots__)
    )
    _assign_sources(
        routes,
        [holders for part in choices for holders in part],
        routes.numel * source.element_bytes[routes.tensor],
        topology,
    )
    return routes


def unique_cover(rosters: RosterSet) -> Routes:
    """Each element any rank holds, once: pieces with the rank chosen to stand for it as ``src``.

    Among replicas the rank with the fewest bytes so far is chosen, the lowest on a tie. ``dst``
    equals ``src``.
    """
    element_bytes = rosters.element_bytes
    load = [0] * rosters.num_ranks
    columns: list[tuple[int, int, int]] = []
    starts: list[IntArray] = []
    stops: list[IntArray] = []
    for tensor, rows in enumerate(_rows_by_tensor(rosters)):
        cells = _cells(rosters, rows)
        for start, stop, held_by in zip(cells.start, cells.stop, cells.holders, strict=True):
            rank = min(held_by, key=lambda r: (load[r], r))
            load[rank] += int((stop - start).prod() * element_bytes[tensor])
            columns.append((tensor, rank, held_by[rank]))
            starts.append(start)
            stops.append(stop)
    if not columns:
        return _empty(rosters.start.shape[1])
    tensors, ranks, slots = np.array(columns, dtype=np.int64).T
    return Routes(tensors, ranks, ranks, slots, slots, np.array(starts), np.array(stops))


def replicas(rosters: RosterSet) -> Iterator[Replica]:
    """Every region that more than one rank holds; disjoint, in the same order everywhere."""
    for tensor, rows in enumerate(_rows_by_tensor(rosters)):
        cells = _cells(rosters, rows)
        for start, stop, held_by in zip(cells.start, cells.stop, cells.holders, strict=True):
            if len(held_by) > 1:
                yield Replica(tensor, start, stop, held_by)


def _rows_by_tensor(rosters: RosterSet) -> list[IntArray]:
    order = np.argsort(rosters.tensor, kind="stable")
    bounds = np.searchsorted(rosters.tensor[order], np.arange(len(rosters.tensors) + 1))
    return [order[a:b] for a, b in itertools.pairwise(bounds)]


def _cells(source: RosterSet, rows: IntArray) -> _Cells:
    """Collapse the source fragments of one tensor to disjoint cells with holder sets."""
    dims = source.start.shape[1]
    boxes, box_of_row = np.unique(
        np.concatenate((source.start[rows], source.stop[rows]), axis=1), axis=0, return_inverse=True
    )
    start, stop = boxes[:, :dims], boxes[:, dims:]
    holders: list[dict[int, int]] = [{} for _ in boxes]
    for row, box in zip(rows, box_of_row.reshape(-1), strict=True):
        holders[int(box)].setdefault(int(source.rank[row]), int(source.slot[row]))
    if _disjoint(start, stop):
        return _Cells(start, stop, holders)
    return _split_overlaps(start, stop, holders)


def _disjoint(start: IntArray, stop: IntArray) -> bool:
    """Whether no two of these boxes have an element in common."""
    low = np.maximum(start[:, None], start[None])
    high = np.minimum(stop[:, None], stop[None])
    overlap = (low < high).all(axis=2)
    np.fill_diagonal(overlap, False)
    return not overlap.any()


def _split_overlaps(start: IntArray, stop: IntArray, holders: list[dict[int, int]]) -> _Cells:
    """Cells of boxes that overlap in part: an irregular roster, never one of Megatron's own."""
    cells: list[tuple[Region, dict[int, int]]] = []
    for box_start, box_stop, held_by in zip(start, stop, holders, strict=True):
        new = [Region(tuple(map(int, box_start)), tuple(map(int, box_stop)))]
        for region, known in list(cells):
            common = [c for part in new if (c := part.intersect(region)) is not None]
            if not common:
                continue
            cells.remove((region, known))
            cells += [(c, {**held_by, **known}) for c in common]
            rest = [region]
            for c in common:
                rest = [r for part in rest for r in part.subtract(c)]
                new = [r for part in new for r in part.subtract(c)]
            cells += [(r, known) for r in rest]
        cells += [(part, held_by) for part in new]
    return _Cells(
        np.array([region.start for region, _ in cells], dtype=np.int64),
        np.array([region.stop for region, _ in cells], dtype=np.int64),
        [known for _, known in cells],
    )


def _pieces(
    target: RosterSet, wanted: IntArray, cells: _Cells, tensor: int
) -> tuple[Routes, list[dict[int, int]]]:
    """All intersections of cells with wanted fragments; sources are still open (-1)."""
    low = np.maximum(target.start[wanted][:, None], cells.start[None])
    high = np.minimum(target.stop[wanted][:, None], cells.stop[None])
    fragment, cell = np.nonzero((low < high).all(axis=2))
    start, stop = low[fragment, cell], high[fragment, cell]
    covered = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(covered, fragment, (stop - start).prod(axis=1))
    short = np.nonzero(covered != target.numel[wanted])[0]
    if len(short):
        _raise_gap(target, int(wanted[short[0]]), cells, tensor)
    rows = wanted[fragment]
    open_column = np.full(len(rows), -1, dtype=np.int64)
    pieces = Routes(
        np.full(len(rows), tensor, dtype=np.int64),
        open_column,
        target.rank[rows],
        open_column.copy(),
        target.slot[rows],
        start,
        stop,
    )
    return pieces, [cells.holders[int(c)] for c in cell]


def _raise_gap(target: RosterSet, row: int, cells: _Cells, tensor: int) -> None:
    missing = [
        Region(
            tuple(int(x) for x in target.start[row]),
            tuple(int(x) for x in target.stop[row]),
        )
    ]
    for start, stop in zip(cells.start, cells.stop, strict=True):
        cell = Region(tuple(int(x) for x in start), tuple(int(x) for x in stop))
        missing = [r for part in missing for r in part.subtract(cell)]
    ndim = len(target.tensors[tensor].shape)
    first = min(missing)
    raise TransitionError(
        f"{target.tensors[tensor].name!r}: rank {int(target.rank[row])} of the target needs "
        f"[{first.start[:ndim]}, {first.stop[:ndim]}), which no rank of the source holds"
    )


def _assign_sources(
    routes: Routes, holders: list[dict[int, int]], nbytes: IntArray, topology: Topology
) -> None:
    """Fill ``src`` and ``src_slot`` in place: retain first, then nearest and least loaded."""
    load: dict[int, int] = {}
    undecided: list[int] = []
    for i, held_by in enumerate(holders):
        own = held_by.get(int(routes.dst[i]))
        if own is not None:
            routes.src[i], routes.src_slot[i] = routes.dst[i], own
        else:
            undecided.append(i)
    undecided.sort(key=lambda i: (len(holders[i]), -int(nbytes[i]), i))
    for i in undecided:
        dst = int(routes.dst[i])
        src = min(holders[i], key=lambda r: (topology.distance(r, dst), load.get(r, 0), r))
        load[src] = load.get(src, 0) + int(nbytes[i])
        routes.src[i], routes.src_slot[i] = src, holders[i][src]


def _empty(dims: int) -> Routes:
    none = np.zeros(0, dtype=np.int64)
    return Routes(
        none, none, none, none, none, np.zeros((0, dims), np.int64), np.zeros((0, dims), np.int64)
    )
