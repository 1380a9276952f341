"""Plans that were made before, by everything that shaped them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from dynatrain_megatron.planner.checks import check_nothing_lost
from dynatrain_megatron.planner.plan import Plan, PlanOptions
from dynatrain_megatron.planner.staged import StagedPlan, make_staged_plan
from dynatrain_megatron.planner.stages import Stages, one_stage
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.roster import RosterSet


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What a plan depends on; ``source``, ``target`` and ``stages`` are digests."""

    source: str
    target: str
    topology: Topology
    options: PlanOptions
    rank: int | None
    stages: str


class PlanCache:
    """The plans used last, at most ``max_plans``."""

    def __init__(self, max_plans: int = 8) -> None:
        self._plans: OrderedDict[PlanKey, StagedPlan] = OrderedDict()
        self._max_plans = max_plans

    def __len__(self) -> int:
        return len(self._plans)

    def plan(
        self,
        source: RosterSet,
        target: RosterSet,
        topology: Topology,
        options: PlanOptions,
        *,
        rank: int | None = None,
    ) -> Plan:
        """The plan of a transition that loses nothing, all in one stage; see :meth:`staged`."""
        stages = one_stage(source, target)
        return self.staged(source, target, stages, topology, options, rank=rank).plans[0]

    def staged(
        self,
        source: RosterSet,
        target: RosterSet,
        stages: Stages,
        topology: Topology,
        options: PlanOptions,
        *,
        rank: int | None = None,
    ) -> StagedPlan:
        """The plan of a transition that loses nothing; see :func:`planner.plan.make_plan`.

        Raises :class:`TransitionError` as that does, and where the two roster sets do not hold the
        same state.
        """
        key = PlanKey(source.digest(), target.digest(), topology, options, rank, stages.digest())
        if key not in self._plans:
            check_nothing_lost(source, target)
            self._plans[key] = make_staged_plan(
                source, target, stages, topology, options, rank=rank
            )
            if len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]
