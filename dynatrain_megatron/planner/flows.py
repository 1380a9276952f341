"""Flows: all that one set of ranks holds and one set of ranks wants.

A common part of a source cell and a target box is an *item*. Items with the same holders, the same
wanters and elements of the same size are one *flow*: its elements, item after item, are a stream,
of which every wanter needs all and which its holders may share out between them. There are as many
flows as pairs of sets, however many tensors and replicas there are::

    source cells          target boxes          flows
    {0,1}  {0,1}  {2}     {3}  {3}     {0}      {0,1} -> {3}   items: cell 0 ∩ box 0, cell 1 ∩ box 1
                                                {2}   -> {0}   items: cell 2 ∩ box 2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner.cells import (
    Boxes,
    RankSets,
    common_boxes,
    disjoint_cells,
    distinct_boxes,
    grouped_order,
    sets_of_ranks,
)
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import IntArray, run_starts, volumes
from dynatrain_megatron.vps.region import Region, without
from dynatrain_megatron.vps.roster import RosterSet


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Items as columns in order of their flow, and flows as columns.

    Item i is the region ``start``, ``stop`` [n, D], part of ``cell`` [n] of ``cells`` and of
    ``box`` [n] of ``boxes``; its elements are ``offset[i] … offset[i + 1] - 1`` of all streams laid
    one after the other. Flow f has the items from ``first[f]`` to ``first[f + 1] - 1``, the
    ``holders[f]``-th of the ``sources`` and the ``wanters[f]``-th of the ``targets``, and elements
    of ``element_bytes[f]``.
    """

    cells: Boxes
    boxes: Boxes
    cell: IntArray
    box: IntArray
    start: IntArray
    stop: IntArray
    offset: IntArray
    first: IntArray
    holders: IntArray
    wanters: IntArray
    element_bytes: IntArray
    sources: RankSets
    targets: RankSets

    def __len__(self) -> int:
        return len(self.holders)

    @property
    def begin(self) -> IntArray:
        """Where each flow's stream begins among all, and the end of the last one, [f + 1]."""
        return self.offset[self.first]

    @property
    def numel(self) -> IntArray:
        """Elements of each flow's stream."""
        return np.diff(self.begin)


def find_flows(source: RosterSet, target: RosterSet, topology: Topology) -> Flows:
    """All that the ranks of ``target`` want, by who holds it in ``source``.

    Raises :class:`TransitionError` naming tensor, region and rank where no rank holds an element.
    """
    if source.tensors != target.tensors:
        raise ValueError("source and target roster sets must share one list of logical tensors")
    cells, boxes = disjoint_cells(source), distinct_boxes(target)
    node = np.array(topology.node, dtype=np.int64)
    holders, sources = sets_of_ranks(cells, source, node)
    wanters, targets = sets_of_ranks(boxes, target, node)
    cell, box, start, stop = common_boxes(cells, boxes)
    _check_all_held(target, boxes, box, start, stop)
    return _by_flow(target, cells, boxes, (holders, sources), (wanters, targets), cell, box)


def cover_flows(rosters: RosterSet, topology: Topology) -> Flows:
    """All that any rank holds, each element once, as flows from its holders to themselves."""
    cells = disjoint_cells(rosters)
    named = sets_of_ranks(cells, rosters, np.array(topology.node, dtype=np.int64))
    every = np.arange(len(cells))
    return _by_flow(rosters, cells, cells, named, named, every, every)


def _by_flow(
    rosters: RosterSet,
    cells: Boxes,
    boxes: Boxes,
    held: tuple[IntArray, RankSets],
    wanted: tuple[IntArray, RankSets],
    cell: IntArray,
    box: IntArray,
) -> Flows:
    sizes, size = np.unique(rosters.element_bytes, return_inverse=True)
    size = size.reshape(-1)[boxes.tensor[box]] if len(box) else np.zeros(0, dtype=np.int64)
    (holders, sources), (wanters, targets) = held, wanted
    key = (holders[cell] * max(1, len(targets)) + wanters[box]) * max(1, len(sizes)) + size
    order = grouped_order(key)
    key, cell, box = key[order], cell[order], box[order]
    begin = np.nonzero(run_starts(key))[0]
    start = np.maximum(cells.start[cell], boxes.start[box])
    stop = np.minimum(cells.stop[cell], boxes.stop[box])
    return Flows(
        cells,
        boxes,
        cell,
        box,
        start,
        stop,
        np.concatenate(([0], np.cumsum(volumes(start, stop)))),
        np.append(begin, len(key)),
        holders[cell[begin]],
        wanters[box[begin]],
        sizes[size[order[begin]]],
        sources,
        targets,
    )


def _check_all_held(
    target: RosterSet, boxes: Boxes, box: IntArray, start: IntArray, stop: IntArray
) -> None:
    """Cells are disjoint, so a box is covered where its parts add up to it."""
    held = np.zeros(len(boxes), dtype=np.int64)
    np.add.at(held, box, volumes(start, stop))
    short = np.nonzero(held != volumes(boxes.start, boxes.stop))[0]
    if not len(short):
        return
    rank_of_kind = np.full(target.num_kinds, target.num_ranks)
    np.minimum.at(rank_of_kind, target.kind_of_rank, np.arange(target.num_ranks))
    rank = np.array(
        [rank_of_kind[boxes.kind[a:b]].min() for a, b in zip(*_span(boxes, short), strict=True)]
    )
    first = np.lexsort((boxes.low[short], rank, boxes.tensor[short]))[0]
    worst = int(short[first])
    found = [
        Region(tuple(start[part].tolist()), tuple(stop[part].tolist()))
        for part in np.nonzero(box == worst)[0].tolist()
    ]
    whole = Region(tuple(boxes.start[worst].tolist()), tuple(boxes.stop[worst].tolist()))
    hole = min(without(whole, found))
    tensor = target.tensors[int(boxes.tensor[worst])]
    ndim = len(tensor.shape)
    raise TransitionError(
        f"{tensor.name!r}: rank {int(rank[first])} of the target needs "
        f"[{hole.start[:ndim]}, {hole.stop[:ndim]}), which no rank of the source holds"
    )


def _span(boxes: Boxes, chosen: IntArray) -> tuple[list[int], list[int]]:
    return boxes.first[chosen].tolist(), boxes.first[chosen + 1].tolist()
