"""Who has what: the boxes of all ranks, each once, and the sets of ranks that hold them.

Replicas are one box with several holders, so that nothing here grows with how often a state is
replicated. What the sources hold is cut into *cells*, which have no element in common::

    rank 0, 2   +----------+          cells   +-------+--+------+
    rank 1      |       +--+------+           | {0,2} |  | {1}  |
                +-------+--+------+           +-------+--+------+
                                                     {0,1,2}
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.vps.boxes import (
    BoolArray,
    IntArray,
    flat_ends,
    measures,
    overlapping_intervals,
    ranges,
    run_starts,
    scatter,
    volumes,
)
from dynatrain_megatron.vps.region import Region, without
from dynatrain_megatron.vps.roster import RosterSet


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Distinct boxes and the kinds of ranks that have each, in order of ``low``.

    ``low``, ``high`` (flat ends) and ``tensor`` [n], ``start``, ``stop`` [n, D]. Box i is had by
    ``kind[j]``, in the fragment ``slot[j]``, for j from ``first[i]`` to ``first[i + 1] - 1``, kinds
    ascending.
    """

    low: IntArray
    high: IntArray
    tensor: IntArray
    start: IntArray
    stop: IntArray
    first: IntArray
    kind: IntArray
    slot: IntArray

    def __len__(self) -> int:
        return len(self.low)

    @property
    def num_kinds(self) -> IntArray:
        """How many kinds have each box, [n]."""
        return np.diff(self.first)

    def slots(self, box: IntArray, kind: IntArray) -> IntArray:
        """The slot in which a rank of ``kind[i]`` has ``box[i]``, [len(box)]; it must have it."""
        base = int(self.kind.max(initial=0)) + 1
        key = np.repeat(np.arange(len(self)), self.num_kinds) * base + self.kind
        return self.slot[np.searchsorted(key, box * base + kind)]


def distinct_boxes(rosters: RosterSet) -> Boxes:
    """Every box of a roster set; one that a rank has twice counts as two boxes."""
    boxes, again = _collapse(rosters)
    if not again.any():
        return boxes
    # The second, third, … fragments of one kind with equal boxes become boxes of their own.
    box = np.repeat(np.arange(len(boxes)), boxes.num_kinds)
    run = np.nonzero(~again)[0]
    turn = np.arange(len(again)) - run[np.cumsum(~again) - 1]
    order = np.lexsort((boxes.kind, turn, box))
    box, turn, kind, slot = box[order], turn[order], boxes.kind[order], boxes.slot[order]
    new = run_starts(box, turn)
    return _with_holders(boxes, box[new], np.append(np.nonzero(new)[0], len(box)), kind, slot)


def disjoint_cells(rosters: RosterSet) -> Boxes:
    """What the ranks of a roster set hold as boxes without a common element."""
    boxes, again = _collapse(rosters)
    if again.any():
        held = np.repeat(np.arange(len(boxes)), boxes.num_kinds)[~again]
        boxes = _with_holders(
            boxes,
            np.arange(len(boxes)),
            np.searchsorted(held, np.arange(len(boxes) + 1)),
            boxes.kind[~again],
            boxes.slot[~again],
        )
    suspect = _not_partitioned(rosters, boxes)
    if not suspect.any():
        return boxes
    inside = np.nonzero(suspect[boxes.tensor])[0]
    a, b = _common(boxes, boxes, inside, inside)
    if not (a != b).any():
        return boxes
    overlapping = suspect & (np.bincount(boxes.tensor[a[a != b]], minlength=len(suspect)) > 0)
    return _overlay(rosters, boxes, overlapping[boxes.tensor], a, b)


def common_boxes(a: Boxes, b: Boxes) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(i, j, start, stop) of every common part of boxes i of ``a`` and j of ``b``, ordered."""
    i, j = _common(a, b, np.arange(len(a)), np.arange(len(b)))
    order = grouped_order(i * max(1, len(b)) + j)
    i, j = i[order], j[order]
    return i, j, np.maximum(a.start[i], b.start[j]), np.minimum(a.stop[i], b.stop[j])


def grouped_order(key: IntArray) -> IntArray:
    """The stable order of keys ≥ 0; key and index are sorted as one number where 63 bits do."""
    if not len(key):
        return np.zeros(0, dtype=np.int64)
    bits = len(key).bit_length()
    if int(key.max()) >> (63 - bits):
        return np.argsort(key, kind="stable")
    return np.sort((key << bits) | np.arange(len(key))) & ((1 << bits) - 1)


# ---------------------------------------------------------------------- sets of ranks


@dataclass(frozen=True, slots=True, eq=False)
class RankSets:
    """Distinct sets of ranks: number i is ``rank[first[i]:first[i + 1]]``, by node, then rank."""

    first: IntArray
    rank: IntArray

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def size(self) -> IntArray:
        return np.diff(self.first)


def sets_of_ranks(boxes: Boxes, rosters: RosterSet, node: IntArray) -> tuple[IntArray, RankSets]:
    """(number of its set for each box, the sets): the ranks whose kinds have it."""
    kinds_of_set, set_of_box = _sets_of_kinds(boxes, rosters.num_kinds)
    by_kind = np.lexsort((np.arange(rosters.num_ranks), node, rosters.kind_of_rank))
    members = np.bincount(rosters.kind_of_rank, minlength=rosters.num_kinds)
    at, owner = ranges((np.cumsum(members) - members)[kinds_of_set[1]], members[kinds_of_set[1]])
    rank, number = by_kind[at], kinds_of_set[0][owner]
    if len(kinds_of_set[0]) > int(number.max(initial=-1)) + 1:  # some set has several kinds
        order = np.lexsort((rank, node[rank], number))
        rank, number = rank[order], number[order]
    count = np.bincount(number, minlength=int(set_of_box.max(initial=-1)) + 1)
    return set_of_box, RankSets(np.concatenate(([0], np.cumsum(count))), rank)


def _sets_of_kinds(boxes: Boxes, num_kinds: int) -> tuple[tuple[IntArray, IntArray], IntArray]:
    """((set, kind) of all sets, ordered, and the set of each box); equal sets have one number."""
    name = boxes.kind[boxes.first[:-1]].copy()  # a set of one kind is called as that kind
    several = np.nonzero(boxes.num_kinds > 1)[0]
    if len(several):
        at, owner = ranges(boxes.first[several], boxes.num_kinds[several])
        marks = np.zeros((2, len(several)), dtype=np.uint64)
        begin = np.searchsorted(owner, np.arange(len(several)))
        for row in range(2):
            marks[row] = np.add.reduceat(scatter(boxes.kind[at] * 2 + row), begin)
        _, same = np.unique(marks, axis=1, return_inverse=True)
        name[several] = num_kinds + same.reshape(-1)
    names, number = np.unique(name, return_inverse=True)
    box = np.zeros(len(names), dtype=np.int64)
    box[number] = np.arange(len(boxes))  # any box with that set
    at, owner = ranges(boxes.first[box], boxes.num_kinds[box])
    return (owner, boxes.kind[at]), number.reshape(-1)


# ---------------------------------------------------------------------- from rows to boxes


def _collapse(rosters: RosterSet) -> tuple[Boxes, BoolArray]:
    """Boxes with all who have them, and which of these are of the same kind as the one before."""
    rows = rosters.rows
    low, high = flat_ends(rosters.tensors, rows.tensor, rows.start, rows.stop)
    order = np.lexsort((high, low))  # stable: kinds and slots stay in order
    low, high, kind = low[order], high[order], rows.kind[order]
    new = run_starts(low, high)
    again = ~new & ~run_starts(kind)
    row = order[new]
    boxes = Boxes(
        low[new],
        high[new],
        rows.tensor[row],
        rows.start[row],
        rows.stop[row],
        np.append(np.nonzero(new)[0], len(order)),
        kind,
        rows.slot[order],
    )
    return boxes, again


def _with_holders(
    boxes: Boxes, box: IntArray, first: IntArray, kind: IntArray, slot: IntArray
) -> Boxes:
    """The boxes numbered ``box`` with other holders."""
    return Boxes(
        boxes.low[box],
        boxes.high[box],
        boxes.tensor[box],
        boxes.start[box],
        boxes.stop[box],
        first,
        kind,
        slot,
    )


def _not_partitioned(rosters: RosterSet, boxes: Boxes) -> BoolArray:
    """Which logical tensors are not covered exactly once by the boxes in them, [tensors]."""
    number = len(rosters.tensors)
    start = np.zeros((number, boxes.start.shape[1]), dtype=np.int64)
    stop = np.ones_like(start)
    for i, tensor in enumerate(rosters.tensors):
        stop[i, : len(tensor.shape)] = tensor.shape
    numel, measure = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.uint64)
    np.add.at(numel, boxes.tensor, volumes(boxes.start, boxes.stop))
    np.add.at(measure, boxes.tensor, measures(boxes.start, boxes.stop))
    odd: BoolArray = (numel != volumes(start, stop)) | (measure != measures(start, stop))
    return odd


def _common(a: Boxes, b: Boxes, in_a: IntArray, in_b: IntArray) -> tuple[IntArray, IntArray]:
    """Pairs (i, j) of boxes of ``a`` and ``b``, among those listed, that have common elements."""
    i, j = overlapping_intervals(a.low[in_a], a.high[in_a], b.low[in_b], b.high[in_b])
    i, j = in_a[i], in_b[j]
    for dim in range(a.start.shape[1]):
        a_start, a_stop, b_start, b_stop = (
            side[:, dim][index]
            for side, index in ((a.start, i), (a.stop, i), (b.start, j), (b.stop, j))
        )
        meet = (a_start < b_stop) & (b_start < a_stop)
        i, j = i[meet], j[meet]
    return i, j


# ---------------------------------------------------------------------- boxes that overlap


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Disjoint boxes ``start``, ``stop`` [n, D] of one or several tensors, with their holders.

    ``holder`` [m] numbers the box, ``kind`` and ``slot`` [m] who has it, in which fragment.
    """

    tensor: IntArray
    start: IntArray
    stop: IntArray
    holder: IntArray
    kind: IntArray
    slot: IntArray


def _overlay(
    rosters: RosterSet, boxes: Boxes, chosen: BoolArray, a: IntArray, b: IntArray
) -> Boxes:
    """Cut the ``chosen`` boxes, of which those numbered a[i] and b[i] overlap, into cells.

    They are sorted into layers of disjoint boxes, which are laid one over the other. Megatron's
    own rosters need two: an embedding on the first and the last stage, where each data parallel
    group cuts it in its own way.
    """
    depth = np.zeros(len(boxes), dtype=np.int64)
    below, above = a[a < b], b[a < b]
    while True:
        deeper = depth.copy()
        np.maximum.at(deeper, above, depth[below] + 1)
        if (deeper == depth).all():
            break
        depth = deeper
    cells = _layer(boxes, chosen & (depth == 0))
    for number in range(1, int(depth.max()) + 1):
        cells = _lay_over(rosters, cells, _layer(boxes, chosen & (depth == number)))
    rest = _layer(boxes, ~chosen)
    return _as_boxes(rosters, _together([rest, cells]))


def _layer(boxes: Boxes, chosen: BoolArray) -> _Layer:
    index = np.nonzero(chosen)[0]
    at, holder = ranges(boxes.first[index], boxes.num_kinds[index])
    return _Layer(
        boxes.tensor[index],
        boxes.start[index],
        boxes.stop[index],
        holder,
        boxes.kind[at],
        boxes.slot[at],
    )


def _lay_over(rosters: RosterSet, lower: _Layer, upper: _Layer) -> _Layer:
    """Cells of two layers: common parts, held by the holders of both, and what is left of each."""
    a, b = _as_boxes(rosters, lower), _as_boxes(rosters, upper)
    i, j, start, stop = common_boxes(a, b)
    one, other = _cut(a, i, start, stop), _cut(b, j, start, stop)
    both = _Layer(
        a.tensor[i],
        start,
        stop,
        np.concatenate((one.holder, other.holder)),
        np.concatenate((one.kind, other.kind)),
        np.concatenate((one.slot, other.slot)),
    )
    left = [_left_over(side, index, start, stop) for side, index in ((a, i), (b, j))]
    return _together([both, *left])


def _cut(boxes: Boxes, index: IntArray, start: IntArray, stop: IntArray) -> _Layer:
    """Parts of boxes, with the holders of the box that each is part of."""
    at, holder = ranges(boxes.first[index], boxes.num_kinds[index])
    return _Layer(boxes.tensor[index], start, stop, holder, boxes.kind[at], boxes.slot[at])


def _left_over(boxes: Boxes, index: IntArray, start: IntArray, stop: IntArray) -> _Layer:
    """What the common parts leave of the boxes they are in."""
    covered = np.zeros(len(boxes), dtype=np.int64)
    np.add.at(covered, index, volumes(start, stop))
    owner: list[int] = []
    starts: list[tuple[int, ...]] = []
    stops: list[tuple[int, ...]] = []
    for box in np.nonzero(covered < volumes(boxes.start, boxes.stop))[0].tolist():
        whole = Region(tuple(boxes.start[box].tolist()), tuple(boxes.stop[box].tolist()))
        taken = [
            Region(tuple(start[part].tolist()), tuple(stop[part].tolist()))
            for part in np.nonzero(index == box)[0].tolist()
        ]
        left = without(whole, taken)
        owner += [box] * len(left)
        starts += [one.start for one in left]
        stops += [one.stop for one in left]
    dims = boxes.start.shape[1]
    return _cut(
        boxes,
        np.array(owner, dtype=np.int64),
        np.array(starts, dtype=np.int64).reshape(-1, dims),
        np.array(stops, dtype=np.int64).reshape(-1, dims),
    )


def _together(layers: list[_Layer]) -> _Layer:
    before = np.cumsum([0, *(len(layer.tensor) for layer in layers)])
    return _Layer(
        np.concatenate([layer.tensor for layer in layers]),
        np.concatenate([layer.start for layer in layers]),
        np.concatenate([layer.stop for layer in layers]),
        np.concatenate([layer.holder + at for layer, at in zip(layers, before, strict=False)]),
        np.concatenate([layer.kind for layer in layers]),
        np.concatenate([layer.slot for layer in layers]),
    )


def _as_boxes(rosters: RosterSet, layer: _Layer) -> Boxes:
    """The same in order; of several fragments of a kind that have a box the first counts."""
    low, high = flat_ends(rosters.tensors, layer.tensor, layer.start, layer.stop)
    order = np.lexsort((high, low))
    place = np.zeros(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    box = place[layer.holder]
    by_box = np.lexsort((layer.slot, layer.kind, box))
    box, kind, slot = box[by_box], layer.kind[by_box], layer.slot[by_box]
    new = run_starts(box, kind)
    return Boxes(
        low[order],
        high[order],
        layer.tensor[order],
        layer.start[order],
        layer.stop[order],
        np.searchsorted(box[new], np.arange(len(order) + 1)),
        kind[new],
        slot[new],
    )
