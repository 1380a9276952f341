"""The way back from a switch that has freed what it had moved: its finished stages, backwards.

What several layouts share between them at that moment is whole: the stages that all have verified
lie in the target, the others in the source. So who has not died can bring the former back, over a
bridge of its own, for the failed one is gone::

    stage         0   1   2   3
    moved         x   x   .   .     failed in stage 2
    way back      2nd 1st           target -> source, each of them moved, verified and freed

How many stages are finished is known to each process for itself, and may be one less on some: a
process that knows of one knows that all have verified it. The most that anybody says is right.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dynatrain_megatron.config import Verify
from dynatrain_megatron.engine import Transport
from dynatrain_megatron.planner import PlanOptions, Topology, make_plan
from dynatrain_megatron.planner.staged import StagedPlan
from dynatrain_megatron.planner.stages import Stages
from dynatrain_megatron.transition.move import Move
from dynatrain_megatron.vps.boxes import IntArray
from dynatrain_megatron.vps.roster import RosterSet


def move_back(
    moved: Move,
    rosters: tuple[RosterSet, RosterSet],
    finished: int,
    transport: Transport,
    topology: Topology,
    options: PlanOptions,
    *,
    verify: Verify,
    timeout_s: float,
) -> None:
    """Bring ``finished`` stages back to the source, whose storages get their memory again.

    Collective over ``transport``, of the processes of the switch by the same ranks. The target's
    memory goes. Raises :class:`TransitionError` where that fails too.
    """
    source, target = rosters
    stages = moved.plan.stages
    parts = [stages.parts(source, target, number) for number in reversed(range(finished))]
    plans = [make_plan(b, a, topology, options, rank=transport.rank) for a, b in parts]
    way_back = Stages(
        stages.count, _backwards(stages.target, finished), _backwards(stages.source, finished)
    )
    move = replace(
        moved,
        plan=StagedPlan(way_back, tuple(plans)),
        old=moved.new,
        new=moved.old,
        frees=True,
        bound=None,
        reports=[],
        checked=[],
        finished=0,
    )
    move.run((target, source), transport, verify=verify, timeout_s=timeout_s)


def _backwards(stage: IntArray, finished: int) -> IntArray:
    """The number of each stage on the way back; -1 for those that are not part of it."""
    return np.where(stage < finished, finished - 1 - stage, -1)
