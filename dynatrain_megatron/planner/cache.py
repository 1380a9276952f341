"""What was made before, by everything that shaped it: plans above all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
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


class Recent[Key: Hashable, Value]:
    """The values used last, at most ``max_values``, by key."""

    def __init__(self, max_values: int) -> None:
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._max_values = max_values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Value]:
        """The values, the one used longest ago first."""
        return iter(self._values.values())

    def get(self, key: Key) -> Value | None:
        """The value of this key, now the one used last; None where there is none."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def pop(self, key: Key) -> Value | None:
        """The value of this key, taken out."""
        return self._values.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()

    def put(self, key: Key, value: Value) -> list[Value]:
        """Keep a value as the one used last; returns those that had to go, the oldest first."""
        self._values[key] = value
        self._values.move_to_end(key)
        too_many = max(0, len(self._values) - self._max_values)
        return [self._values.popitem(last=False)[1] for _ in range(too_many)]


class PlanCache:
    """The plans used last, at most ``max_plans``."""

    def __init__(self, max_plans: int = 8) -> None:
        self._plans = Recent[PlanKey, StagedPlan](max_plans)

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
        plan = self._plans.get(key)
        if plan is None:
            check_nothing_lost(source, target)
            plan = make_staged_plan(source, target, stages, topology, options, rank=rank)
            self._plans.put(key, plan)
        return plan
