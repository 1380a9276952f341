"""Plans that were made before, by everything that shaped them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from dynatrain_megatron.planner.checks import check_nothing_lost
from dynatrain_megatron.planner.plan import Plan, PlanOptions, make_plan
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.roster import RosterSet


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What a plan depends on; ``source`` and ``target`` are digests of roster sets."""

    source: str
    target: str
    topology: Topology
    options: PlanOptions
    rank: int | None


class PlanCache:
    """The plans used last, at most ``max_plans``."""

    def __init__(self, max_plans: int = 8) -> None:
        self._plans: OrderedDict[PlanKey, Plan] = OrderedDict()
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
        """The plan of a transition that loses nothing; see :func:`planner.plan.make_plan`.

        Raises :class:`TransitionError` as that does, and where the two roster sets do not hold the
        same state.
        """
        key = PlanKey(source.digest(), target.digest(), topology, options, rank)
        if key not in self._plans:
            check_nothing_lost(source, target)
            self._plans[key] = make_plan(source, target, topology, options, rank=rank)
            if len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]
