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

from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import BoolArray, IntArray, ranges, run_starts, scatter

_MOST_ROUNDS = 30


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """What may be shared out: ``nbytes[c]`` over the ranks ``rank[first[c]:first[c + 1]]``.

    Candidates are in order of node. ``far`` [c] says that the bytes leave the candidates' nodes.
    """

    first: IntArray
    rank: IntArray
    nbytes: IntArray
    far: BoolArray

    def __len__(self) -> int:
        return len(self.nbytes)


def share_out(classes: Classes, load: IntArray, out: IntArray, topology: Topology) -> IntArray:
    """Bytes that each candidate of each class sends, in the order of ``classes.rank``.

    ``load`` [num_ranks] is what ranks send anyway, ``out`` [num_nodes] what leaves nodes anyway.
    """
    node = np.array(topology.node, dtype=np.int64)
    width = topology.node_width
    at, owner = ranges(classes.first[:-1], np.diff(classes.first))
    # Where nodes have one way out for all, classes that leave them share that, too.
    leaves = classes.far[owner] & (width is not None)
    batches = _independent(classes, node, leaves)
    amount = np.zeros(len(classes.rank), dtype=np.int64)
    load, out = load.copy(), out.copy()
    for _ in range(_MOST_ROUNDS):
        before = amount.copy()
        for at, owner in batches:
            rank, whole = classes.rank[at], classes.nbytes
            load[rank] -= amount[at]
            far = np.nonzero(leaves[at])[0]
            if width is not None and len(far):
                np.subtract.at(out, node[rank[far]], amount[at[far]])
                whole, owner = _by_node(whole, owner, load, out, rank, node, far, width)
            amount[at] = _pour(whole, owner, load[rank])
            load[rank] += amount[at]
            np.add.at(out, node[rank[far]], amount[at[far]])
        if np.array_equal(before, amount):
            break
    return amount


def _by_node(
    nbytes: IntArray,
    owner: IntArray,
    load: IntArray,
    out: IntArray,
    rank: IntArray,
    node: IntArray,
    far: IntArray,
    width: int,
) -> tuple[IntArray, IntArray]:
    """Split the classes of the entries ``far`` by node: (bytes of all parts, part of each entry).

    Raise all ranks to one level, and each node to ``width`` times that, until all has a place.
    """
    of_class, at_node, own_load = owner[far], node[rank[far]], load[rank[far]]
    part_begins = np.nonzero(run_starts(of_class, at_node))[0]
    part_class, part_out = of_class[part_begins], out[at_node[part_begins]]
    class_begins = np.nonzero(run_starts(part_class))[0]
    group = np.cumsum(run_starts(part_class)) - 1
    goal = nbytes[part_class[class_begins]]
    part = np.cumsum(run_starts(of_class, at_node)) - 1

    def held(level: IntArray) -> IntArray:
        """What each part holds below its class's level."""
        room = np.maximum(level[group][part] - own_load, 0)
        ways_out = np.maximum(level[group] * width - part_out, 0)
        least: IntArray = np.minimum(np.add.reduceat(room, part_begins), ways_out)
        return least

    low = np.zeros_like(goal)
    high = goal + int(own_load.max()) + int(part_out.max())
    while (low < high).any():
        middle = (low + high) // 2
        enough = np.add.reduceat(held(middle), class_begins) >= goal
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    below = held(low - 1)
    more = held(low) - below
    rest = goal - np.add.reduceat(below, class_begins)
    before = np.cumsum(more) - more
    before -= before[class_begins][group]
    amount = below + np.clip(rest[group] - before, 0, more)
    number = len(nbytes) + part
    split = owner.copy()
    split[far] = number
    return np.concatenate((nbytes, amount)), split


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


def _independent(
    classes: Classes, node: IntArray, leaves: BoolArray
) -> list[tuple[IntArray, IntArray]]:
    """Batches of classes that have nothing in common, as (entries, class of each entry).

    They have a rank in common, or a node that the bytes of both leave. A class comes after all
    smaller ones that it has something in common with, so those with the least choice are poured
    first; among equally large ones chance decides, which keeps batches few.
    """
    size = np.diff(classes.first)
    order = np.lexsort((scatter(np.arange(len(classes))), size))
    turn = np.zeros(len(classes), dtype=np.int64)
    turn[order] = np.arange(len(classes))
    at, owner = ranges(classes.first[:-1], size)
    batches = []
    while len(at):
        mine, rank, left = turn[owner], classes.rank[at], leaves[at]
        lowest = np.full(len(node), len(classes))
        np.minimum.at(lowest, rank, mine)
        of_node = np.full(len(node), len(classes))
        np.minimum.at(of_node, node[rank[left]], mine[left])
        blocked = (lowest[rank] < mine) | (left & (of_node[node[rank]] < mine))
        waits = np.bincount(owner, weights=blocked, minlength=len(classes)) > 0
        ready = ~waits[owner]
        batches.append((at[ready], owner[ready]))
        at, owner = at[~ready], owner[~ready]
    return batches
