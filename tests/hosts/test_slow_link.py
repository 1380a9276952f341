"""What a plan that knows of a slow link between hosts saves, measured on two emulated ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.host import around
from tests.hosts.emulated import Network
from tests.hosts.events import across
from tests.ranks import TINY_LLAMA, run_megatron

MEGABITS = 80
WIDER = ["--hidden-size", "128", "--ffn-hidden-size", "256"]
FLAGS = [*TINY_LLAMA, *WIDER, "--pipeline-model-parallel-size", "2", "--train-iters", "2"]
SCHEDULE = "schedule=[{iteration: 1, layout: dp4}]"
KNOWN = "node_width: 1\nspeeds: {far_gb_s: 0.01}\n"
BLIND = "ranks_per_node: 4\n"
NODES = [0, 0, 1, 1]


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("two_hosts", [MEGABITS], indirect=True)
def test_what_crosses_the_link_once_takes_half_the_time(two_hosts: Network, tmp_path: Path) -> None:
    """Both stages are wanted by both ranks of the host that has none of them."""

    def switched(name: str, topology: str, *overrides: str) -> dict[str, Any]:
        """The event of the same switch, planned with what ``topology`` tells."""
        file = tmp_path / f"{name}.yaml"
        file.write_text(topology)

        def enter_host() -> None:
            two_hosts.hosts[int(os.environ["RANK"]) // 2].enter()
            os.environ["MASTER_ADDR"] = two_hosts.hosts[0].address

        given = [SCHEDULE, f"topology={file}", *overrides]
        run = run_megatron(4, FLAGS, given, tmp_path / name, inside=enter_host)
        (event,) = around.events(run.run_dir)
        assert event["ok"], event
        wire_s, predicted_s = event["seconds"]["wire"], event["predicted_s"]
        assert "the store that the launch's rank 0 holds: it ends with that" in run.logs[0]
        print(f"{name}: {across(event, NODES)} bytes across, {wire_s:.2f} s ({predicted_s:.2f})")
        return event

    auto = switched("auto", KNOWN, "engine.schedule=auto")
    blind = switched("blind", BLIND, "engine.schedule=direct", "engine.promote=off")
    assert auto["nodes"] == NODES
    assert blind["nodes"] == [0, 0, 0, 0]
    assert auto["bytes"]["moved"] == blind["bytes"]["moved"] == auto["bytes"]["lower_bound"]
    assert across(auto, NODES) * 2 == across(blind, NODES)
    ratio = blind["seconds"]["wire"] / auto["seconds"]["wire"]
    print(f"the blind plan takes {ratio:.2f} times as long on the wire")
    assert ratio > 1.5
    losses = [
        [step["loss"] for step in around.steps(tmp_path / name)] for name in ("auto", "blind")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
