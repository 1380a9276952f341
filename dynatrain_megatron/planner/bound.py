"""How little the busiest rank and node could send: a linear program over all choices.

For judging plans, not for making them. Needs scipy (``pip install dynatrain-megatron[bound]``).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.planner.flows import find_flows
from dynatrain_megatron.planner.plan import Plan
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.roster import RosterSet


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes of the busiest sender, of the busiest way out of a node, and what counts of both.

    ``time`` is in bytes at the speed of one rank: a node's way out is ``node_width`` times as fast.
    """

    sender: float
    node: float
    time: float


def load_of(plan: Plan, topology: Topology) -> Load:
    """What a plan makes of it."""
    node = np.array(topology.node)
    out = np.zeros(int(node.max()) + 1)
    for links in (each.links for each in plan.passes):
        far = node[links.src] != node[links.dst]
        np.add.at(out, node[links.src[far]], links.nbytes[far])
    sender, way_out = float(plan.sent_bytes.max()), float(out.max())
    return Load(sender, way_out, max(sender, way_out / (topology.node_width or np.inf)))


def least_load(source: RosterSet, target: RosterSet, topology: Topology) -> tuple[Load, float]:
    """(the least of each figure by itself, the part of the moved bytes that has a choice).

    Everything comes from a nearest holder, as in a plan.
    """
    from scipy.optimize import linprog

    demands, fixed = _demands(source, target, topology)
    choices = [(demand, rank, ranks) for demand, (ranks, _) in enumerate(demands) for rank in ranks]
    senders = {rank: i for i, rank in enumerate(range(len(topology.node)))}
    num_ranks, num_nodes = len(senders), max(topology.node) + 1
    # Bytes over candidates add up to the demand; loads stay below the last variable.
    equal = np.zeros((len(demands), len(choices) + 1))
    rank_load = np.zeros((num_ranks, len(choices) + 1))
    node_load = np.zeros((num_nodes, len(choices) + 1))
    amounts = list(demands)
    for column, (demand, rank, _) in enumerate(choices):
        equal[demand, column] = 1
        rank_load[rank, column] = 1
        if amounts[demand][1]:
            node_load[topology.node[rank], column] = 1
    total = np.array([demands[key] for key in demands], dtype=float)
    scale = max(1.0, float(total.max(initial=0)), float(fixed.sender.max(initial=0)))

    def least(rows: list[tuple[np.ndarray, np.ndarray, float]]) -> float:
        upper = [
            np.column_stack((load[:, :-1], np.full(len(load), -width))) for load, _, width in rows
        ]
        goal = np.zeros(len(choices) + 1)
        goal[-1] = 1
        found = linprog(
            goal,
            A_ub=np.concatenate(upper),
            b_ub=-np.concatenate([base for _, base, _ in rows]) / scale,
            A_eq=equal if len(demands) else None,
            b_eq=total / scale if len(demands) else None,
        )
        assert found.success, found.message
        return float(found.fun * scale)

    by_rank, by_node = (rank_load, fixed.sender, 1.0), (node_load, fixed.node, 1.0)
    sender, node = least([by_rank]), least([by_node])
    width = topology.node_width
    time = sender if width is None else least([by_rank, (node_load, fixed.node, float(width))])
    moved = total.sum() + fixed.sender.sum()
    return Load(sender, node, time), float(total.sum() / max(moved, 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Fixed:
    """Bytes that have one holder only, by sender and by node they leave."""

    sender: np.ndarray
    node: np.ndarray


def _demands(
    source: RosterSet, target: RosterSet, topology: Topology
) -> tuple[dict[tuple[tuple[int, ...], bool], int], _Fixed]:
    """Bytes by (candidates, whether they leave the node), and those without a choice."""
    flows = find_flows(source, target, topology)
    node = topology.node
    demands: dict[tuple[tuple[int, ...], bool], int] = defaultdict(int)
    fixed = _Fixed(np.zeros(len(node)), np.zeros(max(node) + 1))
    nbytes = (flows.numel * flows.element_bytes).tolist()
    for flow in range(len(flows)):
        holders, wanters = (
            sets.rank[sets.first[i] : sets.first[i + 1]].tolist()
            for sets, i in (
                (flows.sources, flows.holders[flow]),
                (flows.targets, flows.wanters[flow]),
            )
        )
        for wanter in wanters:
            if wanter in holders:
                continue
            near = [rank for rank in holders if node[rank] == node[wanter]]
            chosen = near or holders
            if len(chosen) > 1:
                demands[tuple(chosen), not near] += nbytes[flow]
                continue
            fixed.sender[chosen[0]] += nbytes[flow]
            if not near:
                fixed.node[node[chosen[0]]] += nbytes[flow]
    return demands, fixed
