"""What the event of a switch says of its plan."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner import PlanOptions, Topology
from dynatrain_megatron.planner.staged import make_staged_plan
from dynatrain_megatron.planner.stages import Peak, one_stage
from dynatrain_megatron.transition.report import SwitchReport, fill_in
from dynatrain_megatron.vps import LogicalTensor, Region, RosterBuilder, State, StateKind
from tests.engine.local import LocalTransport
from tests.planner.worlds import Case


class _Alone(LocalTransport):
    """One end of a mesh on which all others say what it says."""

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        return [data] * self.size


@pytest.mark.parametrize(("num_ranks", "has_matrix"), [(64, True), (65, False)])
def test_bytes_from_rank_to_rank_are_told_of_64_ranks_at_most(
    num_ranks: int, has_matrix: bool
) -> None:
    tensor = LogicalTensor("norm", (8,), (State(StateKind.PARAM, "float32"),))
    nothing = RosterBuilder().build()
    held = RosterBuilder()
    held.add(tensor, Region.whole(tensor.shape))
    before = (held.build(), *[nothing] * (num_ranks - 1))
    case = Case(before, before[::-1])
    plan = make_staged_plan(
        case.source,
        case.target,
        one_stage(case.source, case.target),
        Topology.single_node(num_ranks),
        PlanOptions(schedule=EngineSchedule.ring),
    )
    report = SwitchReport(1, "dp1", "dp1")
    fill_in(
        report,
        plan,
        cast(Any, SimpleNamespace(reports=[])),
        Peak(0, 0, 0, 0),
        0,
        num_ranks,
        partial(_Alone.mesh(num_ranks)[0].all_gather, timeout_s=1.0),
    )
    assert (report.schedule, report.predicted_s) == ("ring", plan.predicted_s)
    assert report.predicted_s > 0
    if has_matrix:
        assert np.nonzero(report.bytes_matrix) == (0, num_ranks - 1)
    else:
        assert report.bytes_matrix is None
