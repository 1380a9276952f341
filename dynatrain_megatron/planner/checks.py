"""Proofs about routes, each computed another way than the routes themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner.cells import Boxes, disjoint_cells
from dynatrain_megatron.planner.routes import Routes
from dynatrain_megatron.planner.schedule import Schedule
from dynatrain_megatron.vps.boxes import (
    BoolArray,
    IntArray,
    flat_ends,
    measures,
    overlapping_intervals,
    ranges,
    volumes,
)
from dynatrain_megatron.vps.region import Region, without
from dynatrain_megatron.vps.roster import RosterSet

_SHOWN = 8


def check_coverage(
    routes: Routes,
    source: RosterSet,
    target: RosterSet,
    rank: int | None = None,
    *,
    relays: Sequence[Routes] = (),
) -> None:
    """Every element of every target fragment is written exactly once, by a rank that has it then.

    ``routes`` come from fragments of the source. ``relays`` follow, pass by pass, and come from
    fragments of the target: each of their pieces must lie in what its sender got before. With
    ``rank`` this is proven of the fragments of that rank, and of the relays that it sends. Raises
    :class:`TransitionError` naming the tensor, region and ranks of the first piece that breaks the
    law, and where it is broken: the part that nobody brings or two do.
    """
    _check_inside(routes, routes.src, routes.src_slot, source, target, "source")
    for relay in relays:
        _check_inside(relay, relay.src, relay.src_slot, target, target, "sender's target")
        sent = np.arange(len(relay)) if rank is None else np.nonzero(relay.src == rank)[0]
        _check_there_before(relay.take(sent), routes, target)
        routes = routes.and_also(relay)
    _check_inside(routes, routes.dst, routes.dst_slot, target, target, "target")
    _check_written_once(routes, target, rank)


def _check_inside(
    routes: Routes,
    rank: IntArray,
    slot: IntArray,
    rosters: RosterSet,
    target: RosterSet,
    side: str,
) -> None:
    """Every piece is a box that lies in the fragment ``slot`` of ``rank``."""
    inside = (rank >= 0) & (rank < rosters.num_ranks)
    kind = rosters.kind_of_rank[np.where(inside, rank, 0)]
    first, end = rosters.rows_of_kind[kind], rosters.rows_of_kind[kind + 1]
    inside &= (slot >= 0) & (first + slot < end)
    rows, row = rosters.rows, np.where(inside, first + slot, 0)
    if inside.any():  # otherwise there may be no rows at all
        inside &= rows.tensor[row] == routes.tensor
        for dim in range(routes.start.shape[1]):
            inside &= rows.start[row, dim] <= routes.start[:, dim]
            inside &= rows.stop[row, dim] >= routes.stop[:, dim]
            inside &= routes.start[:, dim] <= routes.stop[:, dim]
    if not inside.all():
        worst = int(np.argmin(inside))
        raise TransitionError(f"{_piece(routes, target, worst)} is outside its {side} fragment")


def _check_there_before(relay: Routes, before: Routes, target: RosterSet) -> None:
    """What the pieces of ``before`` brought to the fragments that these come from adds up to them.

    Nothing is brought twice; see :func:`_check_written_once`.
    """
    slots = int(target.num_rows.max(initial=0)) + 1
    fragments, group = np.unique(relay.src * slots + relay.src_slot, return_inverse=True)
    key = before.dst * slots + before.dst_slot
    place = np.searchsorted(fragments, key)
    place[place == len(fragments)] = 0
    known = fragments[place] == key if len(fragments) else np.zeros(len(key), dtype=np.bool_)
    there = before.take(known)
    have = _Fragments(place[known], there.tensor, there.start, there.stop)
    need = _Fragments(group.reshape(-1), relay.tensor, relay.start, relay.stop)
    _, j, common = _common(target, have, need)
    got = np.zeros(len(relay), dtype=np.int64)
    np.add.at(got, j, common)
    short = np.nonzero(got < relay.numel)[0]
    if len(short):
        worst = int(short[0])
        raise TransitionError(
            f"{_piece(relay, target, worst)} is sent on when its sender has got "
            f"{int(got[worst])} of its {int(relay.numel[worst])} elements"
        )


def _check_written_once(routes: Routes, target: RosterSet, rank: int | None) -> None:
    """Volumes and measures of the pieces add up to those of each fragment."""
    ranks = np.arange(target.num_ranks) if rank is None else np.array([rank])
    count = np.zeros(target.num_ranks, dtype=np.int64)
    count[ranks] = target.num_rows[ranks]
    wanted, owner = ranges(target.rows_of_kind[target.kind_of_rank[ranks]], count[ranks])
    first = np.cumsum(count) - count
    into = np.nonzero(count[routes.dst] > 0)[0]
    fragment = first[routes.dst[into]] + routes.dst_slot[into]
    start, stop = routes.start[into], routes.stop[into]
    numel, measure = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.uint64)
    np.add.at(numel, fragment, volumes(start, stop))
    np.add.at(measure, fragment, measures(start, stop))
    box = target.rows.start[wanted], target.rows.stop[wanted]
    wrong = np.nonzero((numel != volumes(*box)) | (measure != measures(*box)))[0]
    if not len(wrong):
        return
    worst = int(wrong[0])
    pieces = into[fragment == worst]
    pieces = pieces[routes.numel[pieces] > 0]
    low = np.maximum(routes.start[pieces][:, None], routes.start[pieces][None])
    high = np.minimum(routes.stop[pieces][:, None], routes.stop[pieces][None])
    twice = np.argwhere(np.triu((low < high).all(axis=2), k=1))
    if len(twice):
        i, j = twice[0]
        a, b = int(pieces[i]), int(pieces[j])
        raise TransitionError(
            f"{_piece(routes, target, a)} and {_piece(routes, target, b)} overlap in "
            f"{_box(routes, target, a, low[i, j], high[i, j])}"
        )
    at = int(wanted[worst])
    tensor = target.tensors[int(target.rows.tensor[at])]
    ndim = len(tensor.shape)
    whole = _region(box[0][worst], box[1][worst], ndim)
    brought = [_region(routes.start[i], routes.stop[i], ndim) for i in pieces.tolist()]
    raise TransitionError(
        f"{tensor.name!r} {_shown(_missing(whole, brought))} comes from no rank: slot "
        f"{int(target.rows.slot[at])} of rank {int(ranks[owner[worst]])} gets "
        f"{int(numel[worst])} of {whole.numel} elements"
    )


def check_messages(schedule: Schedule) -> None:
    """Every moved piece is in exactly one message, which goes from its sender to its receiver.

    Raises :class:`TransitionError` naming the first message that is not so.
    """
    first = schedule.first_piece
    count = np.diff(first)
    sound = len(first) == len(schedule) + 1 and first[0] == 0 and first[-1] == len(schedule.pieces)
    if not sound or (count < 0).any():
        raise TransitionError(
            f"messages begin with pieces {first.tolist()[:_SHOWN]} and so on of "
            f"{len(schedule.pieces)}, which is not each of them once"
        )
    message = np.repeat(np.arange(len(schedule)), count)
    pieces = schedule.pieces
    odd = (schedule.src[message] != pieces.src) | (schedule.dst[message] != pieces.dst)
    if odd.any():
        worst = int(np.argmax(odd))
        m = int(message[worst])
        raise TransitionError(
            f"a piece from rank {int(pieces.src[worst])} to rank {int(pieces.dst[worst])} is in "
            f"message {m} from rank {int(schedule.src[m])} to rank {int(schedule.dst[m])}"
        )


def lower_bound_bytes(source: RosterSet, target: RosterSet, rank: int | None = None) -> int:
    """Bytes that must move for this placement: the sum over target fragments of need minus own.

    With ``rank`` only the fragments of that rank.
    """
    ranks = np.arange(target.num_ranks) if rank is None else np.array([rank])
    both = np.stack((source.kind_of_rank[ranks], target.kind_of_rank[ranks]))
    (has, wants), times = np.unique(both, axis=1, return_counts=True)
    own, need = _fragments(source, has), _fragments(target, wants)
    need_bytes = target.element_bytes[need.tensor] * times[need.group]
    _, j, common = _common(target, _without_overlap(target, own), need)
    kept = int((common * need_bytes[j]).sum())
    return int((volumes(need.start, need.stop) * need_bytes).sum()) - kept


def check_nothing_lost(source: RosterSet, target: RosterSet) -> None:
    """What the source holds of each logical tensor, the target holds too, no more and no less.

    A target in which a layer is missing would be covered all the same. Raises
    :class:`TransitionError` naming the tensors and how many elements each side has.
    """
    cells = [disjoint_cells(rosters) for rosters in (source, target)]
    held = [_elements(side, len(source.tensors)) for side in cells]
    odd = np.nonzero(held[0] != held[1])[0]
    if not len(odd):
        return
    worst = int(odd[0])
    more, less = (0, 1) if held[0][worst] > held[1][worst] else (1, 0)
    part = _first_beyond(cells[more], cells[less], worst, len(source.tensors[worst].shape))
    ranks = _holders((source, target)[more], worst, part)
    raise TransitionError(
        "the target layout does not hold the same state: "
        + "; ".join(
            f"{source.tensors[i].name!r} has {held[0][i]} elements now and {held[1][i]} there"
            for i in odd[:5]
        )
        + f"; of {source.tensors[worst].name!r} {_shown(part)} is held "
        + ("now and not there" if more == 0 else "there and not now")
        + f", by ranks {ranks}"
    )


def held_once(rosters: RosterSet) -> BoolArray:
    """Of which logical tensors no rank holds an element that another one holds too, [tensors]."""
    rows = rosters.rows
    held = np.zeros(len(rosters.tensors), dtype=np.int64)
    ranks = np.bincount(rosters.kind_of_rank, minlength=rosters.num_kinds)
    np.add.at(held, rows.tensor, volumes(rows.start, rows.stop) * ranks[rows.kind])
    once: BoolArray = held == _elements(disjoint_cells(rosters), len(rosters.tensors))
    return once


def _elements(cells: Boxes, num_tensors: int) -> IntArray:
    """Different elements held of each logical tensor, [num_tensors]."""
    counts = np.zeros(num_tensors, dtype=np.int64)
    np.add.at(counts, cells.tensor, volumes(cells.start, cells.stop))
    return counts


def _first_beyond(more: Boxes, less: Boxes, tensor: int, ndim: int) -> Region:
    """A region of a tensor that is in the one and not in the other; there is one."""
    mine, theirs = np.nonzero(more.tensor == tensor)[0], np.nonzero(less.tensor == tensor)[0]
    known = [_region(less.start[i], less.stop[i], ndim) for i in theirs.tolist()]
    for i in mine.tolist():
        met = (less.start[theirs] < more.stop[i]) & (more.start[i] < less.stop[theirs])
        near = [known[j] for j in np.nonzero(met.all(axis=1))[0].tolist()]
        rest = without(_region(more.start[i], more.stop[i], ndim), near)
        if rest:
            return rest[0]
    raise AssertionError("nothing is in the one and not in the other")


def _holders(rosters: RosterSet, tensor: int, region: Region) -> list[int]:
    """The first ranks that hold some of a region."""
    rows = rosters.rows
    ndim = region.ndim
    meets = rows.tensor == tensor
    meets &= (rows.start[:, :ndim] < np.array(region.stop)).all(axis=1)
    meets &= (rows.stop[:, :ndim] > np.array(region.start)).all(axis=1)
    found = np.nonzero(np.isin(rosters.kind_of_rank, rows.kind[meets]))[0]
    return [int(rank) for rank in found[:_SHOWN]]


@dataclass(frozen=True, slots=True, eq=False)
class _Fragments:
    """Boxes of several kinds of ranks: ``group`` [n] says which of them has each."""

    group: IntArray
    tensor: IntArray
    start: IntArray
    stop: IntArray


def _fragments(rosters: RosterSet, kinds: IntArray) -> _Fragments:
    first = rosters.rows_of_kind
    row, group = ranges(first[kinds], first[kinds + 1] - first[kinds])
    rows = rosters.rows
    return _Fragments(group, rows.tensor[row], rows.start[row], rows.stop[row])


def _common(
    rosters: RosterSet, a: _Fragments, b: _Fragments
) -> tuple[IntArray, IntArray, IntArray]:
    """(i, j, elements) of boxes i of ``a`` and j of ``b`` that one group has in common."""
    space = sum(tensor.numel for tensor in rosters.tensors)
    ends, orders = [], []
    for side in (a, b):
        low, high = flat_ends(rosters.tensors, side.tensor, side.start, side.stop)
        order = np.argsort(low + side.group * space)
        ends += [(low + side.group * space)[order], (high + side.group * space)[order]]
        orders.append(order)
    i, j = overlapping_intervals(*ends)
    i, j = orders[0][i], orders[1][j]
    common = volumes(np.maximum(a.start[i], b.start[j]), np.minimum(a.stop[i], b.stop[j]))
    meet = common > 0
    return i[meet], j[meet], common[meet]


def _without_overlap(rosters: RosterSet, held: _Fragments) -> _Fragments:
    """The same elements, each once where a rank has boxes that overlap."""
    i, j, _ = _common(rosters, held, held)
    if (i == j).all():
        return held
    parts: list[tuple[int, int, Region]] = []
    for box in range(len(held.group)):
        group, tensor = int(held.group[box]), int(held.tensor[box])
        whole = Region(tuple(held.start[box].tolist()), tuple(held.stop[box].tolist()))
        known = [part for g, t, part in parts if (g, t) == (group, tensor)]
        parts += [(group, tensor, part) for part in without(whole, known)]
    return _Fragments(
        np.array([group for group, _, _ in parts]),
        np.array([tensor for _, tensor, _ in parts]),
        np.array([part.start for _, _, part in parts]),
        np.array([part.stop for _, _, part in parts]),
    )


def _missing(whole: Region, brought: Iterable[Region]) -> Region:
    """The first part of ``whole`` that is not brought; pieces that overlap have been named."""
    rest = without(whole, brought)
    assert rest, "pieces that do not overlap add up to less than the fragment they fill"
    return min(rest)


def _region(start: IntArray, stop: IntArray, ndim: int) -> Region:
    return Region(tuple(start[:ndim].tolist()), tuple(stop[:ndim].tolist()))


def _shown(region: Region) -> str:
    return f"[{list(region.start)}, {list(region.stop)})"


def _piece(routes: Routes, target: RosterSet, i: int) -> str:
    return (
        f"{_name(target, int(routes.tensor[i]))} "
        f"{_box(routes, target, i, routes.start[i], routes.stop[i])} "
        f"from rank {int(routes.src[i])} to rank {int(routes.dst[i])}"
    )


def _name(rosters: RosterSet, tensor: int) -> str:
    known = 0 <= tensor < len(rosters.tensors)
    return repr(rosters.tensors[tensor].name) if known else f"tensor {tensor} of none"


def _box(routes: Routes, target: RosterSet, i: int, start: IntArray, stop: IntArray) -> str:
    """A part of piece ``i``, in its tensor's dims."""
    tensor = int(routes.tensor[i])
    known = 0 <= tensor < len(target.tensors)
    ndim = len(target.tensors[tensor].shape) if known else len(start)
    return f"[{start[:ndim].tolist()}, {stop[:ndim].tolist()})"
