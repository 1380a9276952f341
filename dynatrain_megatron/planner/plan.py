"""The plan: everything one transition moves and keeps, as plain data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from dynatrain_megatron.planner.checks import check_coverage, lower_bound_bytes
from dynatrain_megatron.planner.routes import Routes, choose_routes
from dynatrain_megatron.planner.schedule import Schedule, schedule_direct
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.roster import IntArray, RosterSet
from dynatrain_megatron.vps.tensors import LogicalTensor


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """``staging_bytes`` bounds the staging memory of a rank; ``window_ops`` its operations."""

    staging_bytes: int = 256 << 20
    window_ops: int = 256


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A whole transition, the same value on every rank.

    ``bytes_matrix`` [num_ranks, num_ranks]: bytes from rank (row) to rank (column); the diagonal
    is what ranks retain.
    """

    tensors: tuple[LogicalTensor, ...]
    num_ranks: int
    schedule: Schedule
    lower_bound_bytes: int
    bytes_matrix: IntArray
    digest: str = field(default="")

    @property
    def moved_bytes(self) -> int:
        return int(self.bytes_matrix.sum() - np.trace(self.bytes_matrix))

    @property
    def retained_bytes(self) -> int:
        return int(np.trace(self.bytes_matrix))

    @property
    def max_send_bytes(self) -> int:
        """Bytes of the busiest sender."""
        off = self.bytes_matrix - np.diag(np.diag(self.bytes_matrix))
        return int(off.sum(axis=1).max(initial=0))

    @property
    def max_recv_bytes(self) -> int:
        """Bytes of the busiest receiver."""
        off = self.bytes_matrix - np.diag(np.diag(self.bytes_matrix))
        return int(off.sum(axis=0).max(initial=0))


def make_plan(
    source: RosterSet, target: RosterSet, topology: Topology, options: PlanOptions
) -> Plan:
    """Plan the transition between two roster sets over the same ranks and logical tensors.

    Pure and deterministic. Raises :class:`TransitionError` where an element of the target has no
    holder, or where the coverage proof fails.
    """
    routes = choose_routes(source, target, topology)
    check_coverage(routes, source, target)
    schedule = schedule_direct(
        routes,
        target.element_bytes,
        target.num_ranks,
        staging_bytes=options.staging_bytes,
        window_ops=options.window_ops,
    )
    matrix = np.zeros((target.num_ranks, target.num_ranks), dtype=np.int64)
    for part in (schedule.pieces, schedule.retained):
        np.add.at(matrix, (part.src, part.dst), part.numel * target.element_bytes[part.tensor])
    return Plan(
        target.tensors,
        target.num_ranks,
        schedule,
        lower_bound_bytes(source, target),
        matrix,
        _digest(source, target, schedule),
    )


def _digest(source: RosterSet, target: RosterSet, schedule: Schedule) -> str:
    state = hashlib.sha256((source.digest() + target.digest()).encode())
    for name in ("src", "dst", "window", "nbytes", "first_piece"):
        state.update(np.ascontiguousarray(getattr(schedule, name), dtype="<i8").tobytes())
    for part in (schedule.pieces, schedule.retained):
        for name in Routes.__slots__:
            state.update(np.ascontiguousarray(getattr(part, name), dtype="<i8").tobytes())
    return state.hexdigest()
