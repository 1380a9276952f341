"""Parameters that are not moved: each rank gathers them anew from its group's main parameters.

bf16 parameters are roundings of main parameters, of which the distributed optimizer gives every
rank of a data-parallel group a part. After a switch each rank lacks the others' parts. They go
round in a ring, one for each rank of the group in a node, so that a node's ways out are shared by
its rings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.ahead.network import Network
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes import Model, make_rosters
from dynatrain_megatron.vps.boxes import IntArray, volumes
from dynatrain_megatron.vps.roster import RosterSet

PARAM_BYTES = 2
_EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """Parameters of each rank, elements: ``dense`` and ``expert`` [num_ranks].

    Those of experts are by themselves where they have groups of their own, else with the others.
    """

    dense: IntArray
    expert: IntArray

    @classmethod
    def of(cls, model: Model, layout: ParallelLayout, num_ranks: int) -> Local:
        rosters = make_rosters(model, layout, weights_only=True, num_ranks=num_ranks)
        apart = layout.ep > 1 or layout.expert_tp != layout.tp
        is_expert = np.array([apart and _EXPERTS in t.name for t in rosters.tensors])
        trained = np.array([t.states[0].kind != "buffer" for t in rosters.tensors])
        return cls(_numel(rosters, trained & ~is_expert), _numel(rosters, trained & is_expert))

    @property
    def numel(self) -> IntArray:
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Bytes that all ranks gather, and the seconds of the slowest."""

    nbytes: int
    seconds: float


def rebuild(local: Local, layout: ParallelLayout, network: Network) -> Rebuild:
    """Gathering the parameters of ``layout``; nothing where the optimizer is not distributed."""
    if not layout.dist_opt:
        return Rebuild(0, 0.0)
    total, slowest = 0, 0.0
    for numel, axes in ((local.dense, ("pp", "tp")), (local.expert, ("pp", "ep", "etp"))):
        own = numel[: layout.world]
        if not own.any():
            continue
        groups = _groups(layout, axes)
        size = groups.shape[1] // layout.instances
        lacking = own * PARAM_BYTES * (size - 1) // size
        total += int(lacking.sum())
        slowest += float(lacking.max()) / (_ring_gb_s(groups[:, :size], network) * 1e9)
    return Rebuild(total, slowest)


def _numel(rosters: RosterSet, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> IntArray:
    rows = rosters.rows
    numel = np.where(chosen[rows.tensor], volumes(rows.start, rows.stop), 0)
    by_kind = np.zeros(rosters.num_kinds, dtype=np.int64)
    np.add.at(by_kind, rows.kind, numel)
    return by_kind[rosters.kind_of_rank]


def _groups(layout: ParallelLayout, axes: tuple[str, ...]) -> IntArray:
    """The data-parallel groups [groups, size]: ranks with the same index on ``axes``."""
    key = [tuple(layout.coordinate(rank)[axis] for axis in axes) for rank in range(layout.world)]
    _, number = np.unique(np.array(key), axis=0, return_inverse=True)
    order = np.argsort(number.reshape(-1), kind="stable")
    return order.reshape(int(number.max()) + 1, -1)


def _ring_gb_s(groups: IntArray, network: Network) -> float:
    """What a rank gets of a ring, GB/s."""
    topology = network.topology
    node, speeds = np.array(topology.node), topology.speeds
    members = node[groups[0]]
    if (members == members[0]).all():
        return speeds.near_gb_s * network.efficiency
    together = int(np.bincount(members).max())  # ranks of a group in one node, a ring each
    rate = speeds.far_gb_s * together
    if topology.node_width is not None:
        ranks = int(np.bincount(node).max())
        rate = min(rate, topology.node_width * speeds.far_gb_s * together / ranks)
    return min(rate, speeds.near_gb_s) * network.efficiency
