"""Cost: how long messages placed in windows will take on a topology.

Every rank has a wire of its own, both ways at once, on which a byte takes the time of its kind of
link (:class:`planner.topology.Speeds`); every message costs each of its two ranks an operation. A
rank begins a window when its own part of the one before is over its wire and the window before that
is done; a message is done when both its ranks have begun its window and the slower one is through::

    rank 0   |-- window 0 --|-- 1 --|........|-- 2 --|      done with 0 only when rank 1 is
    rank 1   |------- window 0 --------|---- 1 ----|-- 2 --|

What leaves a node takes at least the time that its way out needs for all of it. Times are whole
nanoseconds, so that every rank finds the same.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dynatrain_megatron.planner.schedule import Links, Messages
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import IntArray, run_starts

_NS = 1e9
_NOTHING = np.int64(1 << 62)  # ns that no time reaches


def predicted_seconds(links: Links, messages: Messages, topology: Topology) -> float:
    """Seconds from the first window's begin until the last message is done."""
    num_ranks, operation = len(topology.node), _operation_ns(topology)
    wire, clocks = _wire_ns(links, topology), _Clocks(num_ranks)
    for link, part in messages.by_window():
        ends = links.src[link], links.dst[link]
        share = links.parts(link, part, messages.steps) / links.numel[link]
        amount = np.rint(wire[link] * share).astype(np.int64)
        busy = np.zeros((3, num_ranks), dtype=np.int64)  # sending, receiving, with operations
        for way, rank in enumerate(ends):
            np.add.at(busy[way], rank, amount)
            np.add.at(busy[2], rank, operation)
        own = busy[2] + np.maximum(busy[0], busy[1])
        clocks.advance(np.stack(ends), own[np.stack(ends)], _NOTHING)
    return max(clocks.end, _ways_out_ns(links, wire, topology)) / _NS


def predicted_pairwise_seconds(
    links: Links, round_of_link: IntArray, messages: Messages, topology: Topology
) -> float:
    """The same where a rank has one peer in a round: all windows of a round at once."""
    operation, wire, back = _operation_ns(topology), _wire_ns(links, topology), links.opposite()
    first = np.nonzero((back < 0) | (links.src < links.dst))[0]  # each pair once
    first = first[np.argsort(round_of_link[first], kind="stable")]
    second, both = back[first], back[first] >= 0
    num_operations = messages.count[first] + np.where(both, messages.count[second], 0)
    own = operation * num_operations + np.maximum(wire[first], np.where(both, wire[second], 0))
    num_windows = np.maximum(messages.count[first], np.where(both, messages.count[second], 0))
    last = np.where(num_windows > 1, own // num_windows, _NOTHING)
    ends = np.stack((links.src[first], links.dst[first]))
    clocks = _Clocks(len(topology.node))
    begins = np.nonzero(run_starts(round_of_link[first]))[0].tolist()
    for low, high in pairwise([*begins, len(first)]):
        clocks.advance(ends[:, low:high], own[None, low:high], last[low:high])
    return max(clocks.end, _ways_out_ns(links, wire, topology)) / _NS


def least_pairwise_seconds(links: Links, topology: Topology) -> float:
    """What any schedule takes at the least in which a rank has one peer at a time."""
    operation, wire, back = _operation_ns(topology), _wire_ns(links, topology), links.opposite()
    # Both ways at once take as long as the longer one; half of it is counted with each.
    pair = np.where(back < 0, 2 * wire, np.maximum(wire, wire[back]))
    busy = np.zeros(len(topology.node), dtype=np.int64)
    for end in (links.src, links.dst):
        np.add.at(busy, end, pair + 2 * operation)
    return max(int(busy.max(initial=0)) // 2, _ways_out_ns(links, wire, topology)) / _NS


class _Clocks:
    """When each rank may begin its next window, and when its last one is done; ns."""

    def __init__(self, num_ranks: int) -> None:
        self._ready, self._done = np.zeros((2, num_ranks), dtype=np.int64)

    @property
    def end(self) -> int:
        return int(self._done.max(initial=0))

    def advance(self, rank: IntArray, own: IntArray, last: IntArray | np.int64) -> None:
        """One window: the two ranks [2, n] of each message, and how long each is busy.

        Or all windows of a round, of which the last takes ``last`` [n] of ``own``; ``_NOTHING``
        where there is only one.
        """
        done = self._done[rank]
        begin = np.maximum(self._ready[rank], done - last)
        finish = begin.max(axis=0) + own.max(axis=0)
        self._ready[rank] = np.maximum(np.maximum(begin + own, done), finish - last)
        for end in rank:
            np.maximum.at(self._done, end, finish)


def _operation_ns(topology: Topology) -> int:
    return round(topology.speeds.operation_s * _NS)


def _wire_ns(links: Links, topology: Topology) -> IntArray:
    """Nanoseconds of each link's bytes on a rank's wire, [n]."""
    node, speeds = np.array(topology.node), topology.speeds
    near = node[links.src] == node[links.dst]
    gb_s = np.where(near, speeds.near_gb_s, speeds.far_gb_s)
    return np.rint(links.nbytes / gb_s).astype(np.int64)


def _ways_out_ns(links: Links, wire: IntArray, topology: Topology) -> int:
    """Nanoseconds of the busiest way out of a node."""
    if topology.node_width is None:
        return 0
    node = np.array(topology.node)
    out = np.zeros(int(node.max()) + 1, dtype=np.int64)
    far = node[links.src] != node[links.dst]
    np.add.at(out, node[links.src[far]], wire[far])
    return int(out.max()) // topology.node_width
