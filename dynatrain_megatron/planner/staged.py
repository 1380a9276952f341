"""A transition in stages: one plan for each, and the figures of all of them together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner.plan import Plan, PlanOptions, make_plan
from dynatrain_megatron.planner.stages import Stages
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import IntArray
from dynatrain_megatron.vps.roster import RosterSet


@dataclass(frozen=True, slots=True, eq=False)
class StagedPlan:
    """``plans[k]`` is that of the fragments in stage k, with slots that count those alone."""

    stages: Stages
    plans: tuple[Plan, ...]

    @property
    def digest(self) -> str:
        """Equal for the same inputs, whichever rank it is made for."""
        parts = [self.stages.digest(), *(plan.digest for plan in self.plans)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def bytes_matrix(self) -> IntArray:
        """Bytes from rank (row) to rank (column), [num_ranks, num_ranks]; diagonal: retained.

        For small worlds: at 4,096 ranks these are 16 million numbers.
        """
        return np.sum([plan.bytes_matrix for plan in self.plans], axis=0)

    @property
    def retained_bytes(self) -> int:
        return sum(plan.retained_bytes for plan in self.plans)

    @property
    def lower_bound_bytes(self) -> int:
        return sum(plan.lower_bound_bytes for plan in self.plans)

    @property
    def max_send_bytes(self) -> int:
        """Bytes of the busiest sender."""
        return int(np.sum([plan.sent_bytes for plan in self.plans], axis=0).max(initial=0))

    @property
    def max_recv_bytes(self) -> int:
        """Bytes of the busiest receiver."""
        return int(np.sum([plan.received_bytes for plan in self.plans], axis=0).max(initial=0))

    @property
    def num_operations(self) -> int:
        return sum(plan.num_operations for plan in self.plans)

    @property
    def num_windows(self) -> int:
        return sum(plan.num_windows for plan in self.plans)

    @property
    def predicted_s(self) -> float:
        """Seconds that all passes of all stages should take, one after the other."""
        return sum(plan.predicted_s for plan in self.plans)

    @property
    def windows_by(self) -> tuple[EngineSchedule, ...]:
        """The schedules that placed the messages of any pass, each once."""
        used = (each.windows_by for plan in self.plans for each in plan.passes)
        return tuple(dict.fromkeys(used))

    def staging_bytes(self, rank: int) -> IntArray:
        """Staging memory of ``rank`` in each stage, [stages]."""
        return np.array([plan.peak_staging_bytes(rank) for plan in self.plans], dtype=np.int64)


def make_staged_plan(
    source: RosterSet,
    target: RosterSet,
    stages: Stages,
    topology: Topology,
    options: PlanOptions,
    *,
    rank: int | None = None,
) -> StagedPlan:
    """A plan for each stage; see :func:`planner.plan.make_plan`."""
    parts = [stages.parts(source, target, number) for number in range(stages.count)]
    return StagedPlan(
        stages,
        tuple(make_plan(given, got, topology, options, rank=rank) for given, got in parts),
    )
