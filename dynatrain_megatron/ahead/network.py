"""Messages on the links of a topology, event by event.

Every rank has a link to its own node and one out of it, each way by itself; ranks of a node share
its ways out and in. Messages under way share links as max-min fairness has it: all rates grow
together until a link is full, those on it stop there, the others go on growing. A rank has its
messages of two windows under way at a time, as the engine has; a message begins when both its ranks
have come to its window, after what their operations in it cost and the links' latency::

    rank 0  |== window 0 ==|== window 2 ==|         a message moves only while
            |==== window 1 ====|                     both its ranks have its window under way

Between two events rates stay as they are. Ends nearer to each other than a small share of a window
are taken as one, at the last of them, which bounds the work and makes the result at most
:data:`STEP` larger. What is not counted:
copying in memory (packing, unpacking), other traffic, switches between nodes (they are taken to
carry all that the nodes' ways out can).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import IntArray, ranges

STEP = 0.02
"""Ends within this share of the busiest link's time, over the most windows of a rank, are one."""
UNDER_WAY = 2
"""Windows of a rank that are under way at a time."""

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Network:
    """A topology as messages see it.

    Links carry ``efficiency`` times their rate. ``latency_s`` is what each message waits before its
    first byte. ``node_gb_s`` is what all ranks of a node together can move inside it, None where
    their links are the only limit.
    """

    topology: Topology
    efficiency: float = 1.0
    latency_s: float = 0.0
    node_gb_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Messages as columns: ``src``, ``dst``, ``window`` and ``nbytes`` [m]."""

    src: IntArray
    dst: IntArray
    window: IntArray
    nbytes: IntArray

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``seconds`` until the last message is done, and what the busiest link alone would take."""

    seconds: float
    least_s: float
    busiest: str


def run(traffic: Traffic, network: Network) -> Outcome:
    """Let all messages travel; deterministic."""
    links = _Links.of(network)
    use = links.used_by(traffic)
    least_s, busiest = links.busiest(use, traffic.nbytes)
    if not len(traffic):
        return Outcome(0.0, 0.0, busiest)
    state = _State(traffic, network)
    step = STEP * max(least_s, 1e-12) / state.most_windows
    left = np.maximum(traffic.nbytes.astype(np.float64), 1.0)
    now = 0.0
    active = np.zeros(0, dtype=np.int64)
    while True:
        begun = state.begun(now + step)
        if len(begun):
            active = np.concatenate((active, begun))
        if not len(active):
            if state.next_begin == np.inf:
                break
            now = state.next_begin
            continue
        rates = fair_rates(use[active], links.capacity)
        ahead = left[active] / rates
        together = ahead <= ahead.min() + step
        moved_s = max(0.0, min(float(ahead[together].max()), state.next_begin - now))
        now += moved_s
        left[active] = np.maximum(left[active] - rates * moved_s, 0.0)
        done = ahead <= moved_s
        if done.any():
            state.finish(active[done], now)
            active = active[~done]
    return Outcome(now, least_s, busiest)


def fair_rates(use: IntArray, capacity: FloatArray) -> FloatArray:
    """The max-min fair rate of each flow, [m]; flow i uses the links ``use[i]`` [m, 4].

    A link is full first among all that its flows use: these get an equal share of it. What is left
    to the others is shared out in the same way.
    """
    num_links, width = len(capacity), use.shape[1]
    rate, left = np.zeros(len(use)), capacity.copy()
    going = np.arange(len(use))
    while len(going):
        own = use[going]
        count = np.bincount(own.ravel(), minlength=num_links)
        share = np.full(num_links, np.inf)
        np.divide(left, count, out=share, where=count > 0)
        least = share[own].min(axis=1)
        low = np.full(num_links, np.inf)
        np.minimum.at(low, own.ravel(), np.repeat(least, width))
        full = share <= low * (1 + 1e-9)
        stops = full[own].any(axis=1)
        rate[going[stops]] = least[stops]
        taken = np.bincount(own[stops].ravel(), np.repeat(least[stops], width), num_links)
        left = np.maximum(left - taken, 0.0)
        going = going[~stops]
    return rate


@dataclass(frozen=True, slots=True, eq=False)
class _Links:
    """All links of a network: ``capacity`` [links] in bytes a second, ``first`` of each kind.

    The kinds: of a rank in its node (out, in), of a rank out of it (out, in), of a node (out, in,
    inside); and last one link without a limit, for flows that use fewer than others.
    """

    capacity: FloatArray
    node: IntArray

    @classmethod
    def of(cls, network: Network) -> _Links:
        topology = network.topology
        node = np.array(topology.node, dtype=np.int64)
        ranks, nodes = len(node), int(node.max(initial=-1)) + 1
        speeds, width = topology.speeds, topology.node_width
        out = np.inf if width is None else width * speeds.far_gb_s
        inside = np.inf if network.node_gb_s is None else network.node_gb_s
        rates = [speeds.near_gb_s] * 2 * ranks + [speeds.far_gb_s] * 2 * ranks
        rates += [out] * 2 * nodes + [inside] * nodes
        capacity = np.array([*rates, np.inf]) * 1e9 * network.efficiency
        return cls(capacity, node)

    def used_by(self, traffic: Traffic) -> IntArray:
        """The links of each message, [m, 4]."""
        ranks, nodes = len(self.node), int(self.node.max(initial=-1)) + 1
        src, dst = traffic.src, traffic.dst
        from_node, to_node = self.node[src], self.node[dst]
        none = np.full(len(src), len(self.capacity) - 1)
        of_nodes = 4 * ranks
        near = (src, ranks + dst, of_nodes + 2 * nodes + from_node, none)
        far = (2 * ranks + src, 3 * ranks + dst, of_nodes + from_node, of_nodes + nodes + to_node)
        inside = (from_node == to_node)[:, None]
        return np.where(inside, np.stack(near, axis=1), np.stack(far, axis=1))

    def busiest(self, use: IntArray, nbytes: IntArray) -> tuple[float, str]:
        """(seconds that the busiest link's bytes take, which one it is)."""
        width = use.shape[1]
        load = np.bincount(use.ravel(), np.repeat(nbytes, width), len(self.capacity))
        seconds = load / self.capacity
        most = int(seconds.argmax())
        return float(seconds[most]), self._name(most)

    def _name(self, link: int) -> str:
        ranks, nodes = len(self.node), int(self.node.max(initial=-1)) + 1
        for size, name in (
            (ranks, "rank {} to its node"),
            (ranks, "rank {} from its node"),
            (ranks, "rank {} to other nodes"),
            (ranks, "rank {} from other nodes"),
            (nodes, "ways out of node {}"),
            (nodes, "ways into node {}"),
            (nodes, "inside of node {}"),
        ):
            if link < size:
                return name.format(link)
            link -= size
        return "none"


class _State:
    """Which windows of each rank are under way, and which messages begin when.

    A *slot* is one window of one rank in which it has messages; a rank's slots are numbered in
    order of its windows.
    """

    def __init__(self, traffic: Traffic, network: Network) -> None:
        self._latency_s = network.latency_s
        most = int(traffic.window.max()) + 1
        key = np.concatenate((traffic.src, traffic.dst)) * most + np.tile(traffic.window, 2)
        slots, slot, count = np.unique(key, return_inverse=True, return_counts=True)
        slot = slot.reshape(-1)
        self._ends = slot.reshape(2, len(traffic))  # [2, m]
        self._pending = count.astype(np.int64)
        self._cost_s = count * network.topology.speeds.operation_s
        self._rank = slots // most
        ranks = len(network.topology.node)
        self._first = np.searchsorted(self._rank, np.arange(ranks + 1))
        self._next = self._first[:-1].copy()  # the first slot of each rank that is not done
        self._posted_s = np.full(len(slots), np.inf)
        order = np.argsort(slot, kind="stable")
        self._messages = order % len(traffic)  # of slot i from _begin[i] to _begin[i + 1]
        self._begin = np.searchsorted(slot[order], np.arange(len(slots) + 1))
        self._waiting = np.zeros(0, dtype=np.int64)
        self._begins_s = np.full(len(traffic), np.inf)
        early, _ = ranges(self._first[:-1], np.minimum(np.diff(self._first), UNDER_WAY))
        self._post(early, 0.0)

    @property
    def most_windows(self) -> int:
        return int(np.diff(self._first).max())

    @property
    def next_begin(self) -> float:
        """When the next message begins that is not under way; infinity where there is none."""
        return float(self._begins_s[self._waiting].min(initial=np.inf))

    def begun(self, until: float) -> IntArray:
        """The messages that begin by then; each is told once."""
        ready = self._begins_s[self._waiting] <= until
        found = self._waiting[ready]
        self._waiting = self._waiting[~ready]
        return found

    def finish(self, messages: IntArray, now: float) -> None:
        """These are done; their ranks go on."""
        slots = self._ends[:, messages].ravel()
        np.subtract.at(self._pending, slots, 1)
        empty = np.unique(slots)
        empty = empty[self._pending[empty] == 0]
        posted: list[int] = []
        for rank in np.unique(self._rank[empty]).tolist():
            at, end = int(self._next[rank]), int(self._first[rank + 1])
            before = at
            while at < end and not self._pending[at]:
                at += 1
            self._next[rank] = at
            posted += range(min(before + UNDER_WAY, end), min(at + UNDER_WAY, end))
        if posted:
            self._post(np.array(posted, dtype=np.int64), now)

    def _post(self, slots: IntArray, now: float) -> None:
        self._posted_s[slots] = now + self._cost_s[slots]
        at, _ = ranges(self._begin[slots], np.diff(self._begin)[slots])
        messages = np.unique(self._messages[at])
        begins_s = self._posted_s[self._ends[:, messages]].max(axis=0) + self._latency_s
        known = np.isfinite(begins_s)
        self._begins_s[messages[known]] = begins_s[known]
        self._waiting = np.concatenate((self._waiting, messages[known]))
