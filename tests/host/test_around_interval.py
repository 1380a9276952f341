"""Log lines of ten iterations each, with switches, skipped steps and NaNs between them.

Two ranks go to and fro between two layouts, with experts and a prediction layer, whose metrics have
trackers of their own, and with loader workers, which must not add up.
"""

from __future__ import annotations

import gc
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.host import around
from tests.ranks import TINY_LLAMA, MegatronRun, run_megatron

ITERATIONS = 21
SWITCHES = (3, 6, 8, 12, 13, 17)  # at a NaN, around one, and two in a row
NANS = (7, 13)
FLAGS = [
    *TINY_LLAMA,
    *("--use-distributed-optimizer", "--log-interval", "10", "--num-workers", "1"),
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-z-loss-coeff", "1e-3"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
    *("--mtp-num-layers", "1", "--rerun-mode", "validate_results"),
    # With a loss scale a step whose gradients are not finite is skipped, in float32 too.
    *("--loss-scale", "1", "--no-check-for-nan-in-loss-and-grad"),
    *("--train-iters", str(ITERATIONS), "--global-batch-size", "4"),
]


def lose_some_losses() -> None:
    """Make the loss of some iterations NaN; in a rank."""
    from megatron.training import get_args, training

    from dynatrain_megatron.plugin import gpt_steps

    real = gpt_steps.forward_step

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        output, loss = real(*args, **kwargs)
        if get_args().curr_iteration + 1 in NANS and training.unwrap_model(args[1]).post_process:
            output = output * float("nan")
        return output, loss

    gpt_steps.forward_step = forward_step


def count_into(directory: Path) -> Callable[[], None]:
    """Note processes, threads and open files of each rank at every step, before it is logged."""

    def note(logged: Mapping[str, Any]) -> None:
        from megatron.training import get_args

        args = get_args()
        gc.collect()  # an old world that waits for its time to be collected is no growth
        tasks = list(Path("/proc/self/task").iterdir())
        line = {
            "iteration": logged["iteration"],
            "children": sum(len((task / "children").read_text().split()) for task in tasks),
            "threads": len(tasks),
            "fds": len(os.listdir("/proc/self/fd")),
        }
        with (directory / f"counts-{args.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def inside() -> None:
        lose_some_losses()
        around.at_each_log(note)

    return inside


@dataclass(frozen=True)
class Runs:
    static: MegatronRun
    switched: MegatronRun


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    base = tmp_path_factory.mktemp("interval")
    layouts = [f"{{tp: 1, pp: {2 - i % 2}}}" for i in range(len(SWITCHES))]
    entries = (
        f"{{iteration: {at}, layout: {layout}}}"
        for at, layout in zip(SWITCHES, layouts, strict=True)
    )
    outcome = []
    for name, overrides in (("static", []), ("switched", [f"schedule=[{', '.join(entries)}]"])):
        (base / name).mkdir()
        flags = [*FLAGS, "--tensorboard-dir", str(base / name / "tb")]
        inside = count_into(base / name)
        outcome.append(run_megatron(2, flags, overrides, base / name, inside=inside))
    return Runs(*outcome)


@pytest.mark.host
@pytest.mark.slow
class TestInterval:
    """Two runs, one of which switches six times."""

    def test_the_switches_took_place(self, runs: Runs) -> None:
        done = around.events(runs.switched.run_dir)
        assert [event["iteration"] for event in done] == list(SWITCHES)
        assert [event["target"] for event in done] == ["pp2", "dp2"] * 3

    def test_lines_are_the_same(self, runs: Runs) -> None:
        static, switched = (
            around.training_lines(run.logs[-1]) for run in (runs.static, runs.switched)
        )
        assert [line["iteration"] for line in static] == ["1", "10", "20"]
        skipped = [int(line["number of skipped iterations"]) for line in static]
        nans = [int(line["number of nan iterations"]) for line in static]
        assert skipped == [0, 1, 1] and nans == [0, 1, 1]
        assert {"load_balancing_loss", "z_loss", "mtp_1 loss"} <= set(static[0])
        around.assert_same_lines(switched, static)

    def test_curves_are_the_same(self, runs: Runs) -> None:
        static, switched = (
            around.scalars(run.run_dir / "tb") for run in (runs.static, runs.switched)
        )
        assert {"mtp_1_cumulative_acceptance_rate", "load_balancing_loss"} <= set(static)
        nan_steps = {step for tag in ("lm loss",) for step, v in static[tag] if v != v}
        assert nan_steps == set(NANS)
        for curves in (static, switched):
            around.own(curves)
            for tag, points in curves.items():
                curves[tag] = [(step, -1.0 if value != value else value) for step, value in points]
        around.assert_same_curves(switched, static)

    def test_the_logged_time_leaves_the_switches_out(self, runs: Runs) -> None:
        lines = around.training_lines(runs.switched.logs[-1])
        for before, after in ((lines[0], lines[1]), (lines[1], lines[2])):
            first, last = int(before["iteration"]), int(after["iteration"])
            stalls = sum(
                event["stall_s"]
                for event in around.events(runs.switched.run_dir)
                if first <= event["iteration"] < last
            )
            # Megatron's first line does not start its clock anew.
            since = lines[0]["when"] == before["when"]
            logged = float(after["elapsed time per iteration (ms)"]) / 1e3 * (last - first + since)
            if since:
                logged -= float(before["elapsed time per iteration (ms)"]) / 1e3
            left_out = around.seconds_between(before, after) - logged
            assert left_out > 0.9 * stalls > 0
            assert left_out < 1.5 * stalls + 1.0  # no training time is lost either

    def test_neither_workers_nor_threads_nor_files_add_up(self, runs: Runs) -> None:
        last_steps = [*SWITCHES, ITERATIONS]  # of each layout, when it has opened all it needs
        for rank in range(2):
            lines = around.json_lines(runs.switched.run_dir / f"counts-{rank}.jsonl")
            counts: dict[str, list[dict[str, int]]] = defaultdict(list)
            for line in lines:
                if line["iteration"] in last_steps:
                    layout = ("dp2", "pp2")[last_steps.index(line["iteration"]) % 2]
                    counts[layout].append(line)
            assert [len(seen) for seen in counts.values()] == [4, 3]
            for layout, seen in counts.items():
                # Training, validation and test data have a worker each, of the layout in force.
                assert {line["children"] for line in seen} == {3}, (layout, seen)
                # The first switch opens the bridge, for good.
                for name in ("threads", "fds"):
                    later = [line[name] for line in seen if line["iteration"] > SWITCHES[0]]
                    assert max(later) == later[0], (layout, seen)
