"""What becomes of a job whose store is gone: it trains on, and says so once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynatrain_megatron.config import DynaTrainConfig, OnRefusal
from dynatrain_megatron.errors import SwitchRefused, WorldError
from dynatrain_megatron.plugin.session import Session


def test_without_its_store_a_job_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def at_boundary(iteration: int) -> None:
        asked.append(iteration)
        raise WorldError("where to stop cannot be known: Broken pipe")

    steps = ({"iteration": 6, "layout": {"tp": 2}},)
    session = Session(DynaTrainConfig(run_dir=str(tmp_path), schedule=steps))
    monkeypatch.setattr(session, "_feasible", lambda wanted, world: "tp2")
    session._membership = SimpleNamespace(at_boundary=at_boundary, leads=True)  # type: ignore[assignment]
    session._launch_layout = "dp2"  # type: ignore[assignment]
    job: Any = SimpleNamespace(
        iteration=5, layout="dp2", built=True, args=SimpleNamespace(rank=0, world_size=2)
    )
    for job.iteration in (5, 6, 7):
        assert not session._switch_is_due(job)
    assert asked == [5]
    told = capsys.readouterr().out
    assert told.count("no switch can be made any more: where to stop cannot be known") == 1
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["iteration"]) == ("refused", 6)
    assert "the job's store is gone" in event["reason"]


def test_a_run_that_was_not_begun_by_megatron_s_prologue_trains_without_switches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one with --yaml-cfg, of which the plugin sees no flags."""

    def train() -> str:
        return "trained"

    call: Any = SimpleNamespace(args=(), kwargs={}, arguments={})
    steps = ({"iteration": 6, "layout": {"tp": 2}},)
    session = Session(DynaTrainConfig(run_dir=str(tmp_path), schedule=steps))
    assert session.on_train(train, call) == "trained"
    told = capsys.readouterr().out
    assert "no switch can be made in this run, which trains on: train() was called without" in told
    strict = DynaTrainConfig(run_dir=str(tmp_path), schedule=steps, on_refusal=OnRefusal.fail)
    with pytest.raises(SwitchRefused, match="without Megatron's own prologue"):
        Session(strict).on_train(train, call)


def test_a_release_that_cannot_switch_refuses_also_what_is_asked_for(tmp_path: Path) -> None:
    session = Session(DynaTrainConfig(run_dir=str(tmp_path)))
    session.job = SimpleNamespace(args=SimpleNamespace(rank=0, world_size=2))  # type: ignore[assignment]
    session._launch = session._launch_layout = "given"  # type: ignore[assignment]
    session.cannot_switch = "layouts change from megatron-core 0.18 on, and this is 0.17.1"
    with pytest.raises(SwitchRefused, match=r"from megatron-core 0\.18 on"):
        session._feasible("tp2", 2)
