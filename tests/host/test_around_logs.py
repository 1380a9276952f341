"""A run that switches, saves, ends and is resumed, against one that does none of it.

One static run, one that switches three times and ends at ``--exit-interval``, and a fresh process
that loads what it saved, under the new layout, switches once more and goes to the end. All that a
user can see of the last two together must be what the first shows.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.host import around
from tests.ranks import TINY_LLAMA, MegatronRun, run_megatron

ITERATIONS, ENDS_AT = 14, 10
WANDB = ["--wandb-project", "tests", "--wandb-exp-name", "around"]
FLAGS = [
    *TINY_LLAMA,
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--log-params-norm", "--log-num-zeros-in-grad", "--log-throughput", "--log-progress"),
    *("--tensorboard-log-interval", "1", "--log-timers-to-tensorboard", "--timing-log-level", "1"),
    *("--log-world-size-to-tensorboard", "--log-validation-ppl-to-tensorboard"),
    *WANDB,
    *("--eval-interval", "3", "--eval-iters", "2", "--save-interval", "4"),
    *("--manual-gc", "--manual-gc-interval", "2", "--iterations-to-skip", "6"),
    *("--check-weight-hash-across-dp-replicas-interval", "4"),
    *("--distributed-timeout-seconds-after-init", "600", "--log-memory-interval", "5"),
    *("--train-iters", str(ITERATIONS)),
]
ENDS = ["--exit-interval", str(ENDS_AT)]
HAS_WANDB = importlib.util.find_spec("wandb") is not None
# At an evaluation; at a skipped iteration, so one later; right after a save.
FIRST = (
    "schedule=[{iteration: 3, layout: {tp: 1, pp: 2}}, {iteration: 6, layout: tp4-sp}, "
    "{iteration: 8, layout: pp2-dp2}]"
)
# At an evaluation and a save.
SECOND = "schedule=[{iteration: 12, layout: tp2-dp2}]"


def flags(files: Path, *more: str) -> list[str]:
    """All flags of a run that writes below ``files``."""
    where = ["--save", str(files / "ckpt"), "--tensorboard-dir", str(files / "tb")]
    if HAS_WANDB:
        return [*FLAGS, *where, *more, "--wandb-save-dir", str(files / "wandb")]
    return [flag for flag in [*FLAGS, *where, *more] if flag not in WANDB]


@dataclass(frozen=True)
class Runs:
    """The three runs; ``first`` and ``second`` write into the same directories."""

    static: MegatronRun
    first: MegatronRun
    second: MegatronRun
    static_files: Path
    files: Path

    @property
    def done(self) -> list[dict[str, Any]]:
        """The events of the two runs that switch."""
        return [*around.events(self.first.run_dir), *around.events(self.second.run_dir)]

    @property
    def logs(self) -> list[str]:
        """Output of the rank that writes log lines: the static run's, the other two's."""
        return [run.logs[-1] for run in (self.static, self.first, self.second)]


def log_as_megatron_does() -> None:
    """Megatron's own handler, for whose place pytest was first; in a rank."""
    from megatron.training.log_handler import CustomHandler

    logging.basicConfig(handlers=[CustomHandler()], level=logging.INFO, force=True)


def look_at_the_callers_frame() -> None:
    """At the very end, note whether ``pretrain`` holds what training used; in a rank."""
    from megatron.training import training

    real = training.ft_integration.shutdown

    def shutdown() -> None:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        if frame.f_back.f_code.co_name != "pretrain":  # an exit from within train()
            return real()
        held = frame.f_back.f_locals
        model, optimizer, scheduler = (
            held[name] for name in ("model", "optimizer", "opt_param_scheduler")
        )
        inner = optimizer.chained_optimizers[0]
        in_model = {id(param) for chunk in model for param in chunk.parameters()}
        in_buffers = {
            id(param) for chunk in model for buffer in chunk.buffers for param in buffer.params
        }
        in_optimizer = {id(param) for param in inner.model_param_group_index_map}
        states = inner.optimizer.state.values()
        args = training.get_args()
        note = {
            "layout": [
                args.tensor_model_parallel_size,
                held["model_cfg"].tensor_model_parallel_size,
                held["cfg_container"].model.pipeline_model_parallel_size,
            ],
            "params": len(in_model),
            "one_set": in_model == in_buffers and in_optimizer <= in_model,
            "bytes": sum(param.untyped_storage().nbytes() for param in model[0].parameters()),
            "adam_steps": sorted({int(state["step"]) for state in states}),
            "norm": float(sum(param.detach().double().square().sum() for param in in_order(model))),
            "scheduler_steps": scheduler.num_steps,
            "scheduler_is_bound": all(
                group is mine
                for group, mine in zip(
                    scheduler.optimizer.param_groups, optimizer.param_groups, strict=True
                )
            ),
            "lr": max(group["lr"] for group in optimizer.param_groups),
            "config_is_the_models": held["model_cfg"].__dict__
            is training.get_model_config(model[0]).__dict__,
        }
        (Path(args.save) / f"caller-{args.rank}.json").write_text(json.dumps(note))
        real()

    training.ft_integration.shutdown = shutdown


def in_order(model: Any) -> Iterator[Any]:
    return (param for chunk in model for param in chunk.parameters())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    base = tmp_path_factory.mktemp("around")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        yield run_all(base)


def run_all(base: Path) -> Runs:

    tp2 = ("--tensor-model-parallel-size", "2")

    def look() -> None:
        log_as_megatron_does()
        look_at_the_callers_frame()

    static = run_megatron(4, flags(base / "A", *tp2), [], base / "static", inside=look)
    first = run_megatron(4, flags(base / "B", *tp2, *ENDS), [FIRST], base / "first", inside=look)
    loads = ("--pipeline-model-parallel-size", "2", "--load", str(base / "B" / "ckpt"))
    second = run_megatron(4, flags(base / "B", *loads), [SECOND], base / "second", inside=look)
    return Runs(static, first, second, base / "A", base / "B")


@pytest.mark.host
@pytest.mark.slow
class TestAround:
    """What is left of the three runs."""

    def test_the_switches_took_place(self, runs: Runs) -> None:
        assert [(event["iteration"], event["target"]) for event in runs.done] == [
            (3, "pp2-dp2"),
            (7, "tp4-sp"),  # iteration 6 is skipped, and has no boundary
            (8, "pp2-dp2"),
            (12, "tp2-dp2"),
        ]
        assert all(event["event"] == "switch" and event["ok"] for event in runs.done)

    def test_log_lines_read_as_if_nothing_had_happened(self, runs: Runs) -> None:
        static, first, second = (around.training_lines(log) for log in runs.logs)
        logged = [str(i) for i in range(1, ITERATIONS + 1) if i != 6]
        assert [line["iteration"] for line in static] == logged
        around.assert_same_lines(first, static[: len(first)])
        # Megatron itself shows the mean of two losses in the second line after any start.
        expected = [dict(line) for line in static[len(first) :]]
        two = [float(line["lm loss"]) for line in expected[:2]]
        expected[1]["lm loss"] = str(sum(two) / 2)
        around.assert_same_lines(second, expected)

    def test_steps_are_recorded_once_each(self, runs: Runs) -> None:
        static = around.steps(runs.static.run_dir)
        switched = [*around.steps(runs.first.run_dir), *around.steps(runs.second.run_dir)]
        assert len(switched) == ITERATIONS - 1
        for got, expected in zip(switched, static, strict=True):
            assert got["iteration"] == expected["iteration"]
            assert got["consumed_samples"] == expected["consumed_samples"]
            assert got["lr"] == expected["lr"]
            assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)

    def test_tensorboard_shows_one_curve(self, runs: Runs) -> None:
        expected = around.scalars(runs.static_files / "tb")
        got = around.scalars(runs.files / "tb")
        around.own(expected)
        around.own(got)
        # The first line after a start has no iteration time: 11 in the run that was resumed.
        points = expected["iteration-time"]
        expected["iteration-time"] = [p for p in points if p[0] != ENDS_AT + 1]
        assert len(expected) >= 30
        around.assert_same_curves(got, expected)

    def test_tensorboard_tells_of_layouts_and_switches(self, runs: Runs) -> None:
        static = around.own(around.scalars(runs.static_files / "tb"))
        assert {tag: len(points) for tag, points in static.items()} == dict.fromkeys(
            [f"dynatrain/{axis}" for axis in "tp pp vpp cp ep etp dp world".split()], 1
        )
        got = around.own(around.scalars(runs.files / "tb"))
        around.assert_tells_of_switches(got, runs.done)
        assert around.board_texts(runs.files / "tb", "dynatrain/layout") == [
            (1, "tp2-dp2"),
            *((event["iteration"] + 1, event["target"]) for event in runs.done[:3]),
            (ENDS_AT + 1, "pp2-dp2"),
            (13, "tp2-dp2"),
        ]
        # As timers too, where Megatron's own are asked for.
        assert [step for step, _ in got["dynatrain-wire-time"]] == [3, 7, 8, 12]
        assert [step for step, _ in got["dynatrain-stall-time"]] == [3, 7, 8, 12]

    def test_megatrons_timers_show_the_phases(self, runs: Runs) -> None:
        for log, count in zip(runs.logs, (0, 3, 1), strict=True):
            for phase in ("stall", "quiesce", "build", "plan", "wire", "verify", "vote", "commit"):
                found = re.findall(rf"^ +dynatrain-{phase} \.+: \((\S+), (\S+)\)$", log, re.M)
                assert len(found) == count, phase
                assert all(0 < float(least) <= float(most) for least, most in found), phase

    @pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed (the extra 'wandb')")
    def test_wandb_offline_shows_the_same(self, runs: Runs) -> None:
        expected = around.wandb_curves(runs.static_files / "wandb")
        got = around.wandb_curves(runs.files / "wandb")
        around.own(expected)
        around.assert_tells_of_switches(around.own(got), runs.done)
        points = expected["iteration-time"]
        expected["iteration-time"] = [p for p in points if p[0] != ENDS_AT + 1]
        assert len(expected["lm loss"]) == ITERATIONS - 1
        around.assert_same_curves(got, expected)

    def test_evaluations_have_the_same_values(self, runs: Runs) -> None:
        static, first, second = (around.validation_lines(log) for log in runs.logs)
        assert [*first, *second] == [*static]
        whole = {f"iteration {ITERATIONS} on {what} set" for what in ("validation", "test")}
        assert {"iteration 3", "iteration 9", "iteration 12"} | whole == set(static)
        for at, loss in (first | second).items():
            assert loss == pytest.approx(static[at], rel=1e-6), at

    def test_checkpoints_are_written_before_and_after_a_switch_and_at_exit(
        self, runs: Runs
    ) -> None:
        static, switched = runs.static_files / "ckpt", runs.files / "ckpt"
        assert around.saved_iterations(static) == [4, 8, 12, 14]
        assert around.saved_iterations(switched) == [4, 8, 10, 12, 14]
        assert around.latest_iteration(switched) == 14
        assert f"exiting program at iteration {ENDS_AT}" in runs.first.logs[0]
        assert "successfully loaded checkpoint" in runs.second.logs[0]

    def test_the_caller_holds_what_training_used(self, runs: Runs) -> None:
        for rank in range(4):
            at = f"caller-{rank}.json"
            expected = json.loads((runs.static_files / "ckpt" / at).read_text())
            note = json.loads((runs.files / "ckpt" / at).read_text())
            assert expected["layout"] == note["layout"] == [2, 2, 1]
            assert note["norm"] == pytest.approx(expected.pop("norm"), rel=1e-6)
            assert expected["one_set"] and expected["config_is_the_models"]
            assert expected["scheduler_is_bound"]
            assert expected["adam_steps"] == [ITERATIONS - 1]
            assert {name: note[name] for name in expected} == expected
