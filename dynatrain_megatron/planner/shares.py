"""Shares: who sends which part of a flow's stream to whom.

Everything here is known to every rank and small: a few numbers for each pair of ranks that have
something to do with each other. What each rank sends and receives in detail follows from it
(:mod:`planner.routes`), and no rank needs to know that of others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from dynatrain_megatron.planner.balance import Classes, share_out
from dynatrain_megatron.planner.cells import RankSets, grouped_order
from dynatrain_megatron.planner.flows import Flows
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import BoolArray, IntArray, ranges, run_starts


class Sources(StrEnum):
    """Who sends what several ranks hold: all of the nearest share it out, or the first does."""

    balanced = "balanced"
    first = "first"


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Elements ``start[i] … stop[i] - 1`` of flow ``flow[i]`` go from ``src[i]`` to ``dst[i]``.

    In order of source and destination; where both are one rank it keeps what it has.
    """

    flow: IntArray
    src: IntArray
    dst: IntArray
    start: IntArray
    stop: IntArray

    def __len__(self) -> int:
        return len(self.flow)

    @property
    def numel(self) -> IntArray:
        return self.stop - self.start

    def take(self, index: IntArray | BoolArray) -> Shares:
        """The shares at ``index``, in that order."""
        return Shares(
            self.flow[index], self.src[index], self.dst[index], self.start[index], self.stop[index]
        )


@dataclass(frozen=True, slots=True, eq=False)
class Demands:
    """Elements ``start[i] … stop[i] - 1`` of flow ``flow[i]`` are to come to ``dst[i]``.

    Any of the ``count[i]`` ranks from ``first[i]`` on in ``flows.sources.rank`` may send them.
    """

    flow: IntArray
    dst: IntArray
    start: IntArray
    stop: IntArray
    first: IntArray
    count: IntArray

    def __len__(self) -> int:
        return len(self.flow)

    def take(self, index: IntArray | BoolArray) -> Demands:
        """The demands at ``index``, in that order."""
        return Demands(*(getattr(self, name)[index] for name in Demands.__slots__))

    def nbytes(self, flows: Flows) -> IntArray:
        """Bytes of each demand."""
        return (self.stop - self.start) * flows.element_bytes[self.flow]

    def and_also(self, other: Demands) -> Demands:
        """The demands of both, one after the other."""
        return Demands(
            *(np.concatenate((getattr(self, n), getattr(other, n))) for n in Demands.__slots__)
        )


def choose_shares(flows: Flows, topology: Topology, sources: Sources = Sources.balanced) -> Shares:
    """Let every wanter have its flows.

    What the wanter holds itself is kept. Everything else comes from the nearest holders (same node
    first): balanced, shared out between equally near ones so that the busiest sender has the least.
    """
    demands = find_demands(flows, topology)
    if sources is Sources.first:
        demands = replace(demands, count=np.ones_like(demands.count))
    return bring(flows, demands, topology)


def find_demands(flows: Flows, topology: Topology) -> Demands:
    """Whole flows, from the wanter itself or else from the nearest holders.

    In order of flow, and of the wanter's node.
    """
    flow, at = _expand(flows.wanters, flows.targets)
    dst = flows.targets.rank[at]
    first, count = _candidates(flows, flow, dst, topology)
    return Demands(flow, dst, np.zeros_like(flow), flows.numel[flow], first, count)


def bring(
    flows: Flows, demands: Demands, topology: Topology, besides: Shares | None = None
) -> Shares:
    """Share ``demands`` out between those who may send, who also have ``besides`` to send."""
    whole, open_ = without_choice(flows, demands)
    if not len(open_):
        return in_order(whole, topology)
    known = whole if besides is None else _both(whole, besides)
    return in_order(_both(whole, _shared_out(flows, open_, known, topology)), topology)


def without_choice(flows: Flows, demands: Demands) -> tuple[Shares, Demands]:
    """(shares of the demands that one rank alone may send, the other demands)."""
    fixed = demands.count == 1
    one = demands.take(fixed)
    whole = Shares(one.flow, flows.sources.rank[one.first], one.dst, one.start, one.stop)
    return whole, demands.take(~fixed)


def classes_of(flows: Flows, demands: Demands, topology: Topology) -> tuple[Demands, Classes]:
    """(the demands in order of their class, the classes).

    Receiver by receiver in each, so that few pairs of ranks come of it.
    """
    node = np.array(topology.node, dtype=np.int64)
    far = node[flows.sources.rank[demands.first]] != node[demands.dst]
    order = np.lexsort((demands.flow, demands.dst, far, demands.count, demands.first))
    demands, far = demands.take(order), far[order]
    begin = np.nonzero(run_starts(demands.first, demands.count, far))[0]
    at, _ = ranges(demands.first[begin], demands.count[begin])
    nbytes = demands.nbytes(flows)
    return demands, Classes(
        np.concatenate(([0], np.cumsum(demands.count[begin]))),
        flows.sources.rank[at],
        np.add.reduceat(nbytes, begin) if len(begin) else nbytes,
        far[begin],
    )


def share_cover(flows: Flows, topology: Topology) -> Shares:
    """One holder for each element of each flow, evenly; ``dst`` is ``src``."""
    count = flows.sources.size[flows.holders]
    first = flows.sources.first[flows.holders]
    every = np.arange(len(flows))
    whole = Demands(
        every, flows.sources.rank[first], np.zeros_like(every), flows.numel, first, count
    )
    shared = _shared_out(flows, whole, no_shares(), topology)
    owned = Shares(shared.flow, shared.src, shared.src, shared.start, shared.stop)
    return in_order(owned, topology)


def no_shares() -> Shares:
    """Nothing goes to nobody."""
    none = np.zeros(0, dtype=np.int64)
    return Shares(none, none, none, none, none)


def in_order(shares: Shares, topology: Topology) -> Shares:
    """The shares in order of source and destination."""
    return shares.take(grouped_order(shares.src * len(topology.node) + shares.dst))


def _expand(number: IntArray, sets: RankSets) -> tuple[IntArray, IntArray]:
    """(i, position in ``sets.rank``) of every member of each set ``number[i]``."""
    at, owner = ranges(sets.first[number], sets.size[number])
    return owner, at


def _candidates(
    flows: Flows, flow: IntArray, dst: IntArray, topology: Topology
) -> tuple[IntArray, IntArray]:
    """For each wanter the nearest holders, as (first, count) in ``flows.sources.rank``."""
    sets = flows.sources
    node = np.array(topology.node, dtype=np.int64)
    holders = flows.holders[flow]
    first, count = sets.first[holders], sets.size[holders]
    several = np.nonzero(count > 1)[0]
    if not len(several):
        return first, count
    owner, at = _expand(np.arange(len(sets)), sets)
    # The nearest of all is the wanter itself ...
    size = len(node)
    key = owner * size + sets.rank[at]
    order = np.argsort(key, kind="stable")
    wanted = holders[several] * size + dst[several]
    place = np.searchsorted(key[order], wanted)
    place[place == len(key)] = 0
    own = key[order][place] == wanted
    # ... then those in its node: members are in order of node.
    num_nodes = int(node.max()) + 1
    by_node = owner * num_nodes + node[sets.rank[at]]
    near = holders[several] * num_nodes + node[dst[several]]
    low, high = np.searchsorted(by_node, near), np.searchsorted(by_node, near, side="right")
    first[several] = np.where(own, order[place], np.where(low < high, low, first[several]))
    count[several] = np.where(own, 1, np.where(low < high, high - low, count[several]))
    return first, count


def _shared_out(flows: Flows, demands: Demands, known: Shares, topology: Topology) -> Shares:
    """Cut the streams of ``demands`` between candidates, who send what is ``known`` anyway."""
    demands, classes = classes_of(flows, demands, topology)
    nbytes, rank = demands.nbytes(flows), classes.rank
    amount = share_out(classes, *loads_of(flows, known, topology), topology)
    # Demands and candidates lie one after the other on the same line of bytes; wherever either
    # ends a share ends, at the beginning of the element there.
    wanted, given = np.cumsum(nbytes), np.cumsum(amount)
    cuts = np.unique(np.concatenate((wanted, given, [0])))
    begin_of = wanted - nbytes
    low, high = cuts[:-1], cuts[1:]
    demand = np.searchsorted(wanted, low, side="right")
    size = flows.element_bytes[demands.flow[demand]]
    source = rank[np.searchsorted(given, low, side="right")]
    start, stop = (demands.start[demand] + (at - begin_of[demand]) // size for at in (low, high))
    some = start < stop
    return Shares(demands.flow[demand], source, demands.dst[demand], start, stop).take(some)


def loads_of(flows: Flows, shares: Shares, topology: Topology) -> tuple[IntArray, IntArray]:
    """Bytes that each rank sends, and that leave each node, [num_ranks] and [num_nodes]."""
    node = np.array(topology.node, dtype=np.int64)
    nbytes = shares.numel * flows.element_bytes[shares.flow]
    nbytes[shares.src == shares.dst] = 0
    load, out = (np.zeros(size, dtype=np.int64) for size in (len(node), int(node.max()) + 1))
    np.add.at(load, shares.src, nbytes)
    far = node[shares.src] != node[shares.dst]
    np.add.at(out, node[shares.src[far]], nbytes[far])
    return load, out


def _both(a: Shares, b: Shares) -> Shares:
    return Shares(
        *(np.concatenate((getattr(a, name), getattr(b, name))) for name in Shares.__slots__)
    )
