"""How little the busiest rank and node could send: a linear program over all choices.

For judging plans, not for making them. Needs scipy (``pip install dynatrain-megatron[bound]``).

What is free in it: every rank gets what it lacks from any mix of its nearest holders. With relays,
where several receivers of one node lack the same, one copy comes from these holders, and the others
from any mix of the receivers and, if they are in the same node, of the holders. Bytes may be cut
anywhere; all passes count together, so a plan whose second pass has to wait for the first can be
slower than its load says. What arrives is not free: a rank receives what it lacks, and a node each
element that none of its ranks holds, with relays once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dynatrain_megatron.planner.flows import find_flows
from dynatrain_megatron.planner.plan import Plan
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import BoolArray, IntArray
from dynatrain_megatron.vps.roster import RosterSet


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes of the busiest sender, of the busiest way out of a node, and what counts.

    ``sending`` is the larger of both and ``arriving`` that of the busiest receiver and the busiest
    way into a node, in bytes at the speed of one rank: a node's way is ``node_width`` times as
    fast, or no limit at all.
    """

    sender: float
    node: float
    sending: float
    arriving: float

    @property
    def time(self) -> float:
        """What takes longest, in bytes at the speed of one rank."""
        return max(self.sending, self.arriving)


def load_of(plan: Plan, topology: Topology) -> Load:
    """What a plan makes of it."""
    node, width = np.array(topology.node), topology.node_width or np.inf
    out, into = np.zeros((2, int(node.max()) + 1))
    for links in (each.links for each in plan.passes):
        far = node[links.src] != node[links.dst]
        np.add.at(out, node[links.src[far]], links.nbytes[far])
        np.add.at(into, node[links.dst[far]], links.nbytes[far])
    sender, way_out = float(plan.sent_bytes.max()), float(out.max())
    return Load(
        sender,
        way_out,
        max(sender, way_out / width),
        max(float(plan.received_bytes.max()), float(into.max()) / width),
    )


def least_load(
    source: RosterSet, target: RosterSet, topology: Topology, *, relay: bool = False
) -> tuple[Load, float]:
    """(the least of each figure by itself, the part of the moved bytes that has a choice)."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    groups, nbytes = _groups(source, target, topology, relay)
    # Variables: what each sender of each group sends to its receivers, and the highest load.
    choices = [
        (number, rank, rank not in group.holders)
        for number, group in enumerate(groups)
        for rank in group.senders
    ]
    num_ranks, num_nodes, last = len(topology.node), max(topology.node) + 1, len(choices)
    number, sender, is_relay = np.array(choices, dtype=np.int64).reshape(last, 3).T
    node = np.array(topology.node, dtype=np.int64)
    far = np.array([group.far for group in groups], dtype=np.bool_)
    column = np.arange(last)

    def table(rows: IntArray, values: IntArray | BoolArray, height: int) -> Any:
        return csr_array((values.astype(float), (rows, column)), shape=(height, last + 1))

    equal = table(number, np.ones(last, dtype=np.int64), len(groups))
    passed_on = table(number, is_relay, len(groups))
    by_rank = table(sender, np.ones(last, dtype=np.int64), num_ranks)
    by_node = table(node[sender], far[number] & ~is_relay.astype(np.bool_), num_nodes)
    received, into = np.zeros(num_ranks), np.zeros(num_nodes)
    for group, amount in zip(groups, nbytes, strict=True):
        received[list(group.receivers)] += amount
        into[topology.node[group.receivers[0]]] += amount * group.crossings
    copies = np.array([len(group.receivers) for group in groups], dtype=float)
    crossings = np.array([group.crossings for group in groups], dtype=float)
    scale = max(1.0, float(nbytes.max(initial=0)))

    def least(*bounded: tuple[Any, float]) -> float:
        """The least highest load of ranks, of nodes, or of both."""
        if not groups:
            return 0.0
        upper = [load - _last_column(load.shape, width) for load, width in bounded]
        most = np.zeros(sum(load.shape[0] for load in upper))
        found = linprog(
            np.append(np.zeros(last), 1),
            A_ub=vstack([*upper, passed_on]),
            b_ub=np.concatenate((most, (copies - 1) * nbytes / scale)),
            A_eq=vstack([equal, (equal - passed_on)[np.nonzero(far)[0]]]),
            b_eq=np.concatenate((copies * nbytes, (crossings * nbytes)[far])) / scale,
        )
        assert found.success, found.message
        return float(found.fun * scale)

    width = topology.node_width
    busiest, way_out = least((by_rank, 1.0)), least((by_node, 1.0))
    sending = busiest if width is None else least((by_rank, 1.0), (by_node, float(width)))
    arriving = max(float(received.max()), float(into.max()) / (width or np.inf))
    moved = copies * nbytes
    chosen = moved[[len(group.senders) > 1 for group in groups]].sum()
    return Load(busiest, way_out, sending, arriving), float(chosen / max(moved.sum(), 1))


def _last_column(shape: tuple[int, int], value: float) -> Any:
    """A table of nothing but ``value`` in its last column."""
    from scipy.sparse import csr_array

    height, width = shape
    rows = np.arange(height)
    return csr_array((np.full(height, value), (rows, np.full(height, width - 1))), shape=shape)


class _Group(NamedTuple):
    """Ranks of one node that lack the same, the nearest who hold it, and all who may send it."""

    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    senders: tuple[int, ...]
    far: bool

    @property
    def crossings(self) -> int:
        """How often what they lack enters their node."""
        if not self.far:
            return 0
        return len(self.receivers) if self.senders == self.holders else 1


def _groups(
    source: RosterSet, target: RosterSet, topology: Topology, relay: bool
) -> tuple[list[_Group], np.ndarray]:
    """(groups, bytes that each of their receivers lacks)."""
    flows = find_flows(source, target, topology)
    node = topology.node
    found: dict[_Group, int] = defaultdict(int)
    for flow, nbytes in enumerate((flows.numel * flows.element_bytes).tolist()):
        holders, wanters = (
            sets.rank[sets.first[i] : sets.first[i + 1]].tolist()
            for sets, i in (
                (flows.sources, flows.holders[flow]),
                (flows.targets, flows.wanters[flow]),
            )
        )
        lacking = [rank for rank in wanters if rank not in holders]
        for place in sorted({node[rank] for rank in lacking}):
            near = [rank for rank in holders if node[rank] == place]
            nearest = tuple(near or holders)
            receivers = tuple(rank for rank in lacking if node[rank] == place)
            passing = receivers if relay and len(receivers) > 1 else ()
            found[_Group(nearest, receivers, nearest + passing, not near)] += nbytes
    return list(found), np.array(list(found.values()), dtype=float)
