"""What the event of a switch says of its plan."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner import PlanOptions, Topology
from dynatrain_megatron.planner.staged import StagedPlan, make_staged_plan
from dynatrain_megatron.planner.stages import Peak, one_stage
from dynatrain_megatron.transition.report import SwitchReport, fill_in
from dynatrain_megatron.vps import LogicalTensor, Region, RosterBuilder, State, StateKind
from tests.engine.local import LocalTransport
from tests.planner.worlds import Case

NO_MOVE = cast(Any, SimpleNamespace(reports=[]))
NO_PEAK = Peak(0, 0, 0, 0)


class _Alone(LocalTransport):
    """One end of a mesh on which all others say what it says."""

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        return [data] * self.size


@pytest.mark.parametrize(("num_ranks", "has_matrix"), [(64, True), (65, False)])
def test_bytes_from_rank_to_rank_are_told_of_64_ranks_at_most(
    num_ranks: int, has_matrix: bool
) -> None:
    plan = ring_plan(num_ranks)
    report = SwitchReport(1, "dp1", "dp1", {"groups": 0.1, "quiesce": 0.2})
    gather = partial(_Alone.mesh(num_ranks)[0].all_gather, timeout_s=1.0)
    fill_in(report, plan, NO_MOVE, NO_PEAK, 0, num_ranks, True, gather)
    assert (report.schedule, report.predicted_s) == ("ring", plan.predicted_s)
    assert report.predicted_s > 0
    if has_matrix:
        assert np.nonzero(report.bytes_matrix) == (0, num_ranks - 1)
    else:
        assert report.bytes_matrix is None


@pytest.mark.parametrize("knows", [True, False])
def test_what_a_process_that_came_waited_for_is_no_phase_of_the_switch(knows: bool) -> None:
    report = SwitchReport(1, "dp1", "dp1", {"groups": 5.0, "quiesce": 0.1})

    def gather(own: bytes) -> list[bytes]:
        trained = json.loads(own) | {"groups": 0.3, "quiesce": 0.4}
        return [own, json.dumps(trained).encode()]

    fill_in(report, ring_plan(2), NO_MOVE, NO_PEAK, 0, 2, knows, gather)
    assert report.seconds["groups"] == (5.0 if knows else 0.3)
    assert report.seconds["quiesce"] == 0.4


def ring_plan(num_ranks: int) -> StagedPlan:
    """One tensor moves from the first rank to the last."""
    tensor = LogicalTensor("norm", (8,), (State(StateKind.PARAM, "float32"),))
    nothing = RosterBuilder().build()
    held = RosterBuilder()
    held.add(tensor, Region.whole(tensor.shape))
    before = (held.build(), *[nothing] * (num_ranks - 1))
    case = Case(before, before[::-1])
    return make_staged_plan(
        case.source,
        case.target,
        one_stage(case.source, case.target),
        Topology.single_node(num_ranks),
        PlanOptions(schedule=EngineSchedule.ring),
    )
