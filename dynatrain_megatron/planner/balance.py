"""Balance: which holder sends how much, where several hold the same.

Everything with equal candidates is one *class* and may be shared out between them as one likes, so
that few numbers are chosen, however much is moved. A class is poured like water over its
candidates: the least loaded are raised to one level::

    loads before        3 more units on {a, b, c}
      a ###             a ###
      b #               b ###        level 3, by twos and ones; d is no candidate
      c ##              c ###
      d                 d

Classes are poured one after the other, then each is taken back and poured again on what the others
have left, until nothing changes: what is poured on no holder could then come from a less loaded
one, which is the best there is. Whole numbers and fixed orders only: every rank finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.vps.boxes import IntArray, ranges, run_starts, scatter

_MOST_ROUNDS = 30


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """What may be shared out: ``nbytes[c]`` over the ranks ``rank[first[c]:first[c + 1]]``."""

    first: IntArray
    rank: IntArray
    nbytes: IntArray

    def __len__(self) -> int:
        return len(self.nbytes)


def share_out(classes: Classes, load: IntArray) -> IntArray:
    """Bytes that each candidate of each class sends, in the order of ``classes.rank``.

    ``load`` [num_ranks] is what ranks send anyway.
    """
    amount = np.zeros(len(classes.rank), dtype=np.int64)
    load = load.copy()
    batches = _independent(classes)
    for _ in range(_MOST_ROUNDS):
        before = amount.copy()
        for at, owner in batches:
            rank = classes.rank[at]
            load[rank] -= amount[at]
            amount[at] = _pour(classes.nbytes, owner, load[rank])
            load[rank] += amount[at]
        if np.array_equal(before, amount):
            break
    return amount


def _pour(nbytes: IntArray, owner: IntArray, load: IntArray) -> IntArray:
    """Raise the least loaded of each class to one level; ``owner`` says whose each entry is."""
    order = np.lexsort((load, owner))
    sorted_load = load[order]
    new = run_starts(owner[order])
    begin = np.nonzero(new)[0]
    group = np.cumsum(new) - 1
    total = nbytes[owner[order][begin]]
    below = np.cumsum(sorted_load)
    below = below - (below[begin] - sorted_load[begin])[group]
    number = np.arange(len(order)) - begin[group] + 1
    wet = sorted_load * number < total[group] + below  # these lie below the water's level
    last = begin + np.add.reduceat(wet, begin) - 1
    volume = total + below[last]
    level, rest = volume // number[last], volume % number[last]
    poured = level[group] + (number <= rest[group]) - sorted_load
    amount = np.zeros(len(order), dtype=np.int64)
    amount[order] = np.where(wet, poured, 0)
    return amount


def _independent(classes: Classes) -> list[tuple[IntArray, IntArray]]:
    """Batches of classes that have no rank in common, as (entries, class of each entry).

    A class comes after all smaller ones that it has a rank in common with, so those with the least
    choice are poured first; among equally large ones chance decides, which keeps batches few.
    """
    size = np.diff(classes.first)
    order = np.lexsort((scatter(np.arange(len(classes))), size))
    turn = np.zeros(len(classes), dtype=np.int64)
    turn[order] = np.arange(len(classes))
    at, owner = ranges(classes.first[:-1], size)
    batches = []
    while len(at):
        rank, mine = classes.rank[at], turn[owner]
        lowest = np.full(int(rank.max()) + 1, len(classes))
        np.minimum.at(lowest, rank, mine)
        waits = np.bincount(owner, weights=lowest[rank] < mine, minlength=len(classes)) > 0
        ready = ~waits[owner]
        batches.append((at[ready], owner[ready]))
        at, owner = at[~ready], owner[~ready]
    return batches
