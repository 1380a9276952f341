"""Shares: who sends which part of a flow's stream to whom.

Everything here is known to every rank and small: a few numbers for each pair of ranks that have
something to do with each other. What each rank sends and receives in detail follows from it
(:mod:`planner.routes`), and no rank needs to know that of others.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def choose_shares(flows: Flows, topology: Topology, sources: Sources = Sources.balanced) -> Shares:
    """Let every wanter have its flows.

    What the wanter holds itself is kept. Everything else comes from the nearest holders (same node
    first): balanced, shared out between equally near ones so that the busiest sender has the least.
    """
    flow, at = _expand(flows.wanters, flows.targets)
    dst = flows.targets.rank[at]
    first, count = _candidates(flows, flow, dst, topology)
    if sources is Sources.first:
        count = np.ones_like(count)
    src = flows.sources.rank[first]
    fixed = count == 1
    whole = Shares(flow, src, dst, np.zeros_like(flow), flows.numel[flow]).take(fixed)
    if fixed.all():
        return _in_order(whole, len(topology.node))
    open_ = ~fixed
    shared = _shared_out(
        flows, flow[open_], dst[open_], first[open_], count[open_], whole, topology
    )
    return _in_order(_both(whole, shared), len(topology.node))


def share_cover(flows: Flows, topology: Topology) -> Shares:
    """One holder for each element of each flow, evenly; ``dst`` is ``src``."""
    count = flows.sources.size[flows.holders]
    first = flows.sources.first[flows.holders]
    every = np.arange(len(flows))
    none = np.zeros(0, dtype=np.int64)
    nothing = Shares(none, none, none, none, none)
    shared = _shared_out(flows, every, flows.sources.rank[first], first, count, nothing, topology)
    owned = Shares(shared.flow, shared.src, shared.src, shared.start, shared.stop)
    return _in_order(owned, len(topology.node))


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


def _shared_out(
    flows: Flows,
    flow: IntArray,
    dst: IntArray,
    first: IntArray,
    count: IntArray,
    whole: Shares,
    topology: Topology,
) -> Shares:
    """Cut the streams wanted by ``dst`` between candidates, given as (first, count).

    ``whole`` are the shares without a choice.
    """
    node = np.array(topology.node, dtype=np.int64)
    far = node[flows.sources.rank[first]] != node[dst]
    # Receiver by receiver, so that few pairs of ranks come of it.
    order = np.lexsort((flow, dst, far, count, first))
    flow, dst, first, count = (x[order] for x in (flow, dst, first, count))
    far = far[order]
    begin = np.nonzero(run_starts(first, count, far))[0]
    nbytes = (flows.numel * flows.element_bytes)[flow]
    at, _ = ranges(first[begin], count[begin])
    bounds = np.concatenate(([0], np.cumsum(count[begin])))
    rank = flows.sources.rank[at]
    total = np.add.reduceat(nbytes, begin) if len(begin) else np.zeros(0, dtype=np.int64)
    classes = Classes(bounds, rank, total, far[begin])
    amount = share_out(classes, *_loads(flows, whole, node), topology)
    # Demands and candidates lie one after the other on the same line of bytes; wherever either
    # ends a share ends, at the beginning of the element there.
    wanted, given = np.cumsum(nbytes), np.cumsum(amount)
    cuts = np.unique(np.concatenate((wanted, given, [0])))
    begin_of = wanted - nbytes
    low, high = cuts[:-1], cuts[1:]
    demand = np.searchsorted(wanted, low, side="right")
    size = flows.element_bytes[flow[demand]]
    source = rank[np.searchsorted(given, low, side="right")]
    start, stop = (low - begin_of[demand]) // size, (high - begin_of[demand]) // size
    some = start < stop
    return Shares(flow[demand], source, dst[demand], start, stop).take(some)


def _loads(flows: Flows, shares: Shares, node: IntArray) -> tuple[IntArray, IntArray]:
    """Bytes that each rank sends, and that leave each node, [num_ranks] and [num_nodes]."""
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


def _in_order(shares: Shares, num_ranks: int) -> Shares:
    return shares.take(grouped_order(shares.src * num_ranks + shares.dst))
