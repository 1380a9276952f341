"""The whole demo as a user runs it: real Megatron, real torchrun, real switches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 540.0


def _run_demo(*options: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `dynatrain demo`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dynatrain_megatron.cli", "demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        # A demo that is told to end ends its ranks; one that is killed could not.
        process.terminate()
    return process.returncode, out, err


@pytest.mark.slow
def test_the_demo_switches_four_times_and_keeps_the_losses(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    code, told_json, progress = _run_demo("--json", "--iterations", "10", "--out", str(out))
    assert code == 0, progress
    told = json.loads(told_json)
    assert told["agrees"]
    assert told["max_loss_difference"] <= 1e-6
    assert [(switch["iteration"], switch["target"]) for switch in told["switches"]] == [
        (2, "pp2-dp2"),
        (4, "tp4"),
        (6, "pp4"),
        (8, "dp4"),
    ]
    for switch in told["switches"]:
        assert switch["stall_s"] > 0
        assert switch["bytes_moved"] == switch["bytes_lower_bound"] > 0
    assert told["last_loss"] < told["first_loss"]
    assert "over 10 steps" in Path(told["report"]).read_text()
    assert json.loads((out / "demo.json").read_text())["result"] == told
    for name in ("static", "switched"):
        assert len((out / name / "steps.jsonl").read_text().splitlines()) == 10
    assert "switched: step 10/10, layout dp4" in progress
