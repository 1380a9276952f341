"""Stages: parts of the state that are moved one after the other, so that memory stays bounded.

A *unit* is a logical tensor, or one layer (or expert) of it where every fragment is of a single
one. A stage is a set of units, the same on all ranks. Its targets are allocated, it is moved and
verified, and then its sources are freed: no stage waits for another one, whatever the limits. What
remains to choose is the order, since a rank that gets first and gives later is full meanwhile::

    rank 0  source  ########----      ######------      ####--------
            target  ----              --####            --######
                    before            after stage 0     after stage 1

A source of one unit is read only by targets of that unit. A storage that has fragments of several
units, such as a flat parameter buffer, lives from the first stage that writes it, or to the last
one that reads it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.vps.boxes import BoolArray, IntArray
from dynatrain_megatron.vps.roster import RosterSet

_WORK = 50_000_000  # numbers looked at while units are put in order
_MOST_UNITS = 512
_LEAST_UNITS = 32
_SHARE = 32  # of the state: how much fuller than need be a rank may get, for fewer stages
_FINENESS = 16  # steps of the soft maximum to the largest unit
_DEPTH = 256  # in such steps: ranks emptier than this do not count in it


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """How much each rank has to spare, [num_ranks] bytes, in the ``first`` stage and in ``later``.

    That is on top of the larger of its shares of the state, in the source and in the target.
    """

    first: IntArray
    later: IntArray

    @classmethod
    def none(cls, num_ranks: int) -> Room:
        zero = np.zeros(num_ranks, dtype=np.int64)
        return cls(zero, zero)


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """The stage of every row of two roster sets; ``source`` and ``target`` number their rows."""

    count: int
    source: IntArray
    target: IntArray

    def digest(self) -> str:
        """What tells these stages from others of the same roster sets."""
        if self.count == 1:
            return "1"
        state = hashlib.sha256(str(self.count).encode())
        for column in (self.source, self.target):
            state.update(np.ascontiguousarray(column, dtype="<i8"))
        return state.hexdigest()

    def parts(
        self, source: RosterSet, target: RosterSet, stage: int
    ) -> tuple[RosterSet, RosterSet]:
        """The fragments of one stage on both sides, over the logical tensors that they are of."""
        if self.count == 1:
            return source, target
        given, got = self.source == stage, self.target == stage
        both = (source.rows.tensor[given], target.rows.tensor[got])
        tensors = np.unique(np.concatenate(both))
        return source.part(given, tensors), target.part(got, tensors)


def one_stage(source: RosterSet, target: RosterSet) -> Stages:
    """Everything at once."""
    rows = (len(source.rows), len(target.rows))
    return Stages(1, *(np.zeros(number, dtype=np.int64) for number in rows))


def choose_stages(source: RosterSet, target: RosterSet, room: Room) -> Stages:
    """Stages in an order that keeps the rank with the least to spare as empty as can be.

    The next unit is always the one after which the fullest rank is least full; the same is done
    from the end, and the better of both taken. Neighbours in that order become one stage while
    this fills no rank further, or by no more than a small share of the state. Deterministic, in
    whole numbers: the same on every rank.
    """
    of_source, of_target, count = _units(source, target)
    if not count:
        return one_stage(source, target)
    group = _grouped(source, target, of_source, of_target, count)
    of_source, of_target = group[of_source], group[of_target]
    number = int(group.max()) + 1
    given, got = _bytes_by_place(source, target, of_source, of_target, number)
    place = _places(source, target)[1]
    first, later = (_least(room_of, place, given.shape[1]) for room_of in (room.first, room.later))
    need = np.maximum(given.sum(0), got.sum(0)) + later
    order = _order(given, got, need)
    backwards = _order(got, given, need)[::-1]
    peaks = [int(_levels(given[o], got[o], need).max()) for o in (order, backwards)]
    if peaks[1] < peaks[0]:
        order = backwards
    slack = int(np.maximum(given.sum(0), got.sum(0)).max()) // _SHARE
    stage = np.zeros(number, dtype=np.int64)
    stage[order] = _merged(
        given[order], got[order], need, later - first, max(0, min(peaks)) + slack
    )
    return Stages(int(stage.max()) + 1, stage[of_source], stage[of_target])


# ---------------------------------------------------------------------- units


def _units(source: RosterSet, target: RosterSet) -> tuple[IntArray, IntArray, int]:
    """(the unit of each row of the source, of the target, number of units)."""
    sides = source.rows, target.rows
    key = [side.tensor.copy() for side in sides]
    lead = np.ones(len(source.tensors), dtype=np.bool_)
    num_dims = np.array([len(tensor.shape) for tensor in source.tensors], dtype=np.int64)
    size = np.ones(len(source.tensors), dtype=np.int64)
    for dim in range(sides[0].start.shape[1]):
        lead &= num_dims > dim + 1
        for side in sides:
            np.logical_and.at(lead, side.tensor, side.stop[:, dim] - side.start[:, dim] == 1)
        if not lead.any():
            break
        size[:] = 1
        size[lead] = [
            tensor.shape[dim] for tensor, cut in zip(source.tensors, lead, strict=True) if cut
        ]
        most = int(size.max())
        for k, side in zip(key, sides, strict=True):
            k *= most
            k += np.where(lead[side.tensor], side.start[:, dim], 0)
    units, number = np.unique(np.concatenate(key), return_inverse=True)
    number = number.reshape(-1)
    return number[: len(key[0])], number[len(key[0]) :], len(units)


def _places(source: RosterSet, target: RosterSet) -> tuple[IntArray, IntArray]:
    """(kinds of source and target [n, 2] that some rank has, which of them each rank has)."""
    both = np.stack((source.kind_of_rank, target.kind_of_rank), axis=1)
    places, place = np.unique(both, axis=0, return_inverse=True)
    return places, place.reshape(-1)


def _least(amount: IntArray, place: IntArray, num_places: int) -> IntArray:
    """The least of the ranks of each place."""
    found = np.full(num_places, np.iinfo(np.int64).max)
    np.minimum.at(found, place, amount)
    return found


def _grouped(
    source: RosterSet, target: RosterSet, of_source: IntArray, of_target: IntArray, count: int
) -> IntArray:
    """The group of each unit: itself, or where there are too many, others from other places.

    Units are sorted by where most of them lies and dealt out, so that every group has something
    from everywhere, in proportion. Large units stay by themselves.
    """
    places = len(_places(source, target)[0])
    limit = min(_MOST_UNITS, max(_LEAST_UNITS, math.isqrt(_WORK // max(1, places))))
    every = np.arange(count)
    if count <= limit:
        return every
    where, nbytes = [], np.zeros(count, dtype=np.int64)
    for rosters, unit in ((source, of_source), (target, of_target)):
        size = rosters.row_bytes
        order = np.lexsort((size, unit))
        last = np.append(np.nonzero(np.diff(unit[order]))[0], len(order) - 1)
        main = np.full(count, -1)
        main[unit[order[last]]] = rosters.rows.kind[order[last]]
        where.append(main)
        total = np.zeros(count, dtype=np.int64)
        np.add.at(total, unit, size * np.bincount(rosters.kind_of_rank)[rosters.rows.kind])
        nbytes = np.maximum(nbytes, total)
    large = np.zeros(count, dtype=np.bool_)
    large[np.argsort(-nbytes, kind="stable")[: limit // 4]] = True
    large &= nbytes > 2 * int(nbytes.sum()) // limit
    group = np.zeros(count, dtype=np.int64)
    group[large] = np.arange(int(large.sum()))
    rest = every[~large]
    rest = rest[np.lexsort((rest, where[1][rest], where[0][rest]))]
    group[rest] = int(large.sum()) + np.arange(len(rest)) % (limit - int(large.sum()))
    return group


def _bytes_by_place(
    source: RosterSet, target: RosterSet, of_source: IntArray, of_target: IntArray, count: int
) -> tuple[IntArray, IntArray]:
    """Bytes of each unit in the source and in the target, [count, places] each."""
    places = _places(source, target)[0]
    found = []
    for side, (rosters, unit) in enumerate(((source, of_source), (target, of_target))):
        total = np.zeros((count, rosters.num_kinds), dtype=np.int64)
        np.add.at(total, (unit, rosters.rows.kind), rosters.row_bytes)
        found.append(total[:, places[:, side]])
    return found[0], found[1]


# ---------------------------------------------------------------------- order


def _levels(given: IntArray, got: IntArray, need: IntArray) -> IntArray:
    """How far above ``need`` each place is while each unit, in order, is in both layouts."""
    held: IntArray = given.sum(0) + np.cumsum(got, axis=0) - np.cumsum(given, axis=0) + given
    return held - need


def _order(given: IntArray, got: IntArray, need: IntArray) -> IntArray:
    """Greedy: the unit that fills the fullest place least; then the least full everywhere."""
    step = max(1, int(got.max()) // _FINENESS)
    level, peak = given.sum(0) - need, np.iinfo(np.int64).min
    left = np.arange(len(given))
    order = []
    while len(left):
        during = level + got[left]
        after = during - given[left]
        worst = np.maximum(during.max(axis=1), peak)
        soft = (np.clip(after // step + _DEPTH, 0, 2 * _DEPTH) ** 3).sum(axis=1)
        best = int(np.lexsort((soft, worst))[0])
        peak, level = int(worst[best]), after[best]
        order.append(int(left[best]))
        left = np.delete(left, best)
    return np.array(order, dtype=np.int64)


def _merged(
    given: IntArray, got: IntArray, need: IntArray, less_at_first: IntArray, allowed: int
) -> IntArray:
    """The stage of each unit, in order: as many in each as leave every place within ``allowed``.

    The first stage has ``less_at_first`` bytes less than the others.
    """
    level = given.sum(0) - need + less_at_first
    stage = np.zeros(len(given), dtype=np.int64)
    begin = number = 0
    while begin < len(given):
        during = level + np.cumsum(got[begin:], axis=0)
        fits: BoolArray = (during <= allowed).all(axis=1)
        end = begin + max(1, len(fits) if fits.all() else int(np.argmin(fits)))
        stage[begin:end] = number
        level = level + got[begin:end].sum(0) - given[begin:end].sum(0)
        if not number:
            level = level - less_at_first
        begin, number = end, number + 1
    return stage


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True, eq=False)
class SideMemory:
    """What one rank's storages take in one layout, in bytes.

    ``moved`` [m] are storages that have fragments, ``stage`` [m] the first one that writes each
    (in a target) or the last one that reads it (in a source). ``gradients`` hold nothing between
    two steps, ``rebuilt`` are copies that are made anew of what was moved, ``other`` is the rest.
    ``largest`` is the largest storage of all.
    """

    moved: IntArray
    stage: IntArray
    gradients: int
    rebuilt: int
    other: int
    largest: int

    @property
    def nbytes(self) -> int:
        return int(self.moved.sum()) + self.gradients + self.rebuilt + self.other

    def by_stage(self, count: int) -> IntArray:
        """Bytes of the moved storages, by stage, [count]."""
        total = np.zeros(count, dtype=np.int64)
        np.add.at(total, self.stage, self.moved)
        return total


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a switch takes on a rank beyond its old state: ``extra`` bytes.

    What it is promised to be within is growth, or the whole target where the source is kept
    (``ends_with``), ``staging``, and the most that one stage allocates on any rank, of which
    ``largest`` is this rank's.
    """

    extra: int
    ends_with: int
    staging: int
    largest: int


def planned_peak(source: SideMemory, target: SideMemory, staging: IntArray, *, frees: bool) -> Peak:
    """The exact peak of a rank; ``staging`` [stages] bytes, ``frees`` what a stage has read.

    The old gradients go first. While the target is built, its storages have memory only one at a
    time. Then stage by stage the targets come and, where it ``frees``, the sources go, and with
    those of the first stage all that is rebuilt later. Rebuilt parameters come after the last
    stage; at last the whole source goes and the gradients come.
    """
    count = len(staging)
    base = target.other - source.gradients
    allocated = target.by_stage(count)
    freed = source.by_stage(count) if frees else np.zeros(count, dtype=np.int64)
    if frees and count:
        freed[0] += source.rebuilt
    moving = base + np.cumsum(allocated) - (np.cumsum(freed) - freed) + staging
    rebuilding = base + int(allocated.sum() - freed.sum()) + target.rebuilt
    growth = target.nbytes - source.nbytes
    extra = max(0, base + target.largest, int(moving.max(initial=0)), rebuilding, growth)
    return Peak(
        extra,
        max(0, growth) if frees else target.nbytes,
        int(staging.max(initial=0)),
        int(allocated.max(initial=0)) if frees else 0,
    )
