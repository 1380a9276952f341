"""A rank that fails in the middle of a transfer: the others learn of it in time, sources stay."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron import faults
from dynatrain_megatron.engine import Transport, execute
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.faults import Fault, Kind, Phase
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions
from tests.engine.test_execute import assert_holds_its_values, bind
from tests.engine.test_transport import TRANSPORTS
from tests.planner.worlds import Model, layout_case
from tests.ranks import RankFailure

CASE = layout_case(ParallelLayout(tp=4), ParallelLayout(pp=4), Model(hidden=8))
TIMEOUT_S = 2.0


def told(
    fault: Fault, transport: str, directory: Path, *, check_messages: bool = True
) -> dict[int, dict[str, Any]]:
    """What each rank that survived says of a transfer: its error, and the seconds it took."""
    plan = CASE.plan(options=PlanOptions(staging_bytes=200))

    def body(end: Transport) -> None:
        faults.arm([fault])
        source = bind(CASE.before[end.rank], filled=True)
        target = bind(CASE.after[end.rank], filled=False)
        begin, error = time.monotonic(), ""
        try:
            execute(plan, source, target, end, timeout_s=TIMEOUT_S, check_messages=check_messages)
            assert_holds_its_values(target)
        except (TransitionError, RuntimeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
            end.close()
        assert_holds_its_values(source)
        said = {"error": error, "seconds": time.monotonic() - begin}
        (directory / f"{end.rank}.json").write_text(json.dumps(said))
        if fault.kind is Kind.kill:
            time.sleep(TIMEOUT_S)  # whoever goes first takes the others along
        if error:
            raise RuntimeError(error)  # skips the barrier at the end

    with contextlib.suppress(RankFailure):
        TRANSPORTS[transport](4, body)
    return {int(path.stem): json.loads(path.read_text()) for path in directory.glob("*.json")}


@pytest.mark.parametrize(
    ("kind", "phase", "transport"),
    [
        (Kind.exception, Phase.wire, "one host"),
        (Kind.oom, Phase.pack, "gloo"),
        (Kind.kill, Phase.unpack, "gloo"),
        (Kind.kill, Phase.wire, "one host"),
        (Kind.kill, Phase.wire, "rings"),
    ],
)
def test_a_failed_rank_is_noticed_in_time(
    kind: Kind, phase: Phase, transport: str, tmp_path: Path
) -> None:
    found = told(Fault((1,), phase, kind), transport, tmp_path)
    own = found.pop(1, None)
    if kind is Kind.kill:
        assert own is None
    else:
        assert own is not None and f"rank 1: injected {kind} in phase {phase}" in own["error"]
    assert sorted(found) == [0, 2, 3]
    for said in found.values():
        assert said["error"].startswith("TransitionError: "), said
        assert said["seconds"] < 3 * TIMEOUT_S


def test_a_slow_rank_delays_and_nothing_else(tmp_path: Path) -> None:
    found = told(Fault((1,), Phase.wire, Kind.slow, seconds=0.3), "one host", tmp_path)
    assert [said["error"] for said in found.values()] == [""] * 4
    assert found[1]["seconds"] >= 0.3


def test_what_is_not_checked_is_corrupted_silently(tmp_path: Path) -> None:
    """The flip is real: without a check the transfer ends well, and the target is wrong."""
    fault = Fault((1,), Phase.wire, Kind.bitflip)
    found = told(fault, "gloo", tmp_path, check_messages=False)
    assert 1 not in found  # its values were not what they should be
