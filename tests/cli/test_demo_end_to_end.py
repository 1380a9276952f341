"""The whole demo as a user runs it: real Megatron, real torchrun, real switches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_switches_four_times_and_keeps_the_losses(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "dynatrain_megatron.cli", "demo", "--json"]
    done = subprocess.run(
        [*command, "--iterations", "10", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
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
    assert json.loads((out / "demo.json").read_text())["result"] == told
    for name in ("static", "switched"):
        assert (out / name / "events.jsonl").is_file()
    assert "switched: step 10/10, layout dp4" in done.stderr
