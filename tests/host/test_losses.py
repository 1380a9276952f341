"""A run that switches against the run that never does: float32 losses and gradient norms."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ranks import TINY_LLAMA, run_megatron

ITERATIONS = 14
SCHEDULE = (
    "schedule=[{iteration: 2, layout: {tp: 1, pp: 2}}, {iteration: 4, layout: {tp: 4}}, "
    "{iteration: 6, layout: {tp: 1, pp: 4}}, {iteration: 8, layout: {tp: 1, dp: 4}}, "
    "{iteration: 10, layout: {tp: 2, pp: 2, sp: true}}, {iteration: 12, layout: {tp: 2}}]"
)
LAYOUTS = ["tp2-dp2", "pp2-dp2", "tp4", "pp4", "dp4", "tp2-pp2-sp", "tp2-dp2"]
DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]


def steps(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]


def logged_losses(run_dir: Path) -> list[float]:
    """The losses in Megatron's own log lines, by step; each on the rank that was last then."""
    text = "".join(log.read_text() for log in run_dir.glob("rank*.log"))
    found = re.findall(r" iteration +(\d+)/.* lm loss: (\S+) ", text)
    return [float(loss) for _, loss in sorted(found, key=lambda line: int(line[0]))]


def freeze_the_second_layer() -> None:
    """One layer is not trained, others of the same checkpoint key are; in a rank."""
    from megatron.core.models.gpt import GPTModel

    real = GPTModel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        for layer in self.decoder.layers:
            layer.requires_grad_(layer.layer_number != 2)

    GPTModel.__init__ = init


def other_hyperparameters() -> None:
    """Those of a checkpoint that was loaded, of which the flags know nothing; in a rank."""
    from megatron.training import training

    real, is_launch = training.setup_model_and_optimizer, [True]

    @functools.wraps(real)
    def setup(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = real(*args, **kwargs)
        for group in optimizer.param_groups if is_launch else ():
            group.update(betas=(0.5, 0.7), eps=1e-3)
        is_launch.clear()
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = setup


class Pair(NamedTuple):
    """Flags of a run on 2 ranks, and what is changed on each rank before."""

    flags: list[str]
    inside: Callable[[], None] | None = None
    length: tuple[str, ...] = ("--train-iters", "9", "--lr-warmup-iters", "2")
    without: tuple[str, ...] = ()  # of the model's usual flags


# A schedule counted in samples, with or without leave to differ from a loaded one.
SAMPLES = ("--train-samples", "36", "--lr-warmup-samples", "20", "--lr-decay-samples", "38")

PAIRS = {
    "SGD with momentum": Pair(["--optimizer", "sgd", "--sgd-momentum", "0.9", "--lr", "0.1"]),
    "an embedding with a learning rate of its own": Pair(
        [*DISTRIBUTED, "--decoupled-lr", "1e-2", "--decoupled-min-lr", "1e-3"]
    ),
    "counted in samples": Pair(DISTRIBUTED, length=SAMPLES),
    "counted in samples, schedule overridden": Pair(
        [*DISTRIBUTED, "--override-opt_param-scheduler"], length=SAMPLES
    ),
    "hyperparameters of a loaded checkpoint": Pair(DISTRIBUTED, other_hyperparameters),
    "one layer frozen": Pair(DISTRIBUTED, freeze_the_second_layer),
    "LayerNorm, biases, plain MLP, QK norm": Pair(
        [*DISTRIBUTED, "--normalization", "LayerNorm", "--qk-layernorm", "--add-qkv-bias"],
        without=("--disable-bias-linear", "--swiglu"),
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_other_states_equal_the_static_run(name: str, tmp_path: Path) -> None:
    pair, at = PAIRS[name], TINY_LLAMA.index("--train-iters")
    usual = [*TINY_LLAMA[:at], *TINY_LLAMA[at + 2 :]]
    flags = [
        *(flag for flag in usual if flag not in pair.without),
        *(*pair.flags, *pair.length, "--global-batch-size", "4"),
        *("--data-cache-path", str(tmp_path / "cache")),
        *("--weight-decay", "0.1", "--clip-grad", "1.0"),
    ]
    schedule = [
        "schedule=[{iteration: 2, layout: tp2}, {iteration: 4, layout: pp2}, "
        "{iteration: 6, layout: dp2}, {iteration: 7, layout: tp2-sp}]"
    ]
    static, switched = tmp_path / "static", tmp_path / "switched"
    run_megatron(2, flags, [], static, inside=pair.inside)
    run_megatron(2, flags, schedule, switched, inside=pair.inside)
    expected, got = steps(static), steps(switched)
    assert len({step["layout"] for step in got}) == 4
    for a, b in zip(expected, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), (a, b)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), (a, b)
        assert b["lr"] == a["lr"]
    assert len({step["loss"] for step in expected}) == 9
    assert len({step["lr"] for step in expected}) == 9


@pytest.mark.host
@pytest.mark.parametrize(
    "extra",
    [["--use-distributed-optimizer", *OVERLAP], []],
    ids=["distributed optimizer with overlap", "plain optimizer"],
)
def test_losses_equal_the_run_that_never_switched(extra: list[str], tmp_path: Path) -> None:
    flags = [
        *TINY_LLAMA,
        *extra,
        *("--data-cache-path", str(tmp_path / "cache")),
        *("--tensor-model-parallel-size", "2", "--train-iters", str(ITERATIONS)),
        *("--lr-warmup-iters", "3", "--weight-decay", "0.1", "--clip-grad", "1.0"),
    ]
    static, switched = tmp_path / "static", tmp_path / "switched"
    run_megatron(4, flags, [], static)
    overrides = [SCHEDULE, "engine.placement=best"]
    run_megatron(4, flags, overrides, switched)
    expected, got = steps(static), steps(switched)
    assert [step["iteration"] for step in got] == list(range(1, ITERATIONS + 1))
    layouts = [str(step["layout"]).removesuffix("-noopt") for step in got]
    assert layouts == [LAYOUTS[i // 2] for i in range(ITERATIONS)]
    for a, b in zip(expected, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), (a, b)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), (a, b)
        assert b["lr"] == a["lr"]
        assert b["consumed_samples"] == a["consumed_samples"]
    assert len({step["loss"] for step in expected}) == ITERATIONS  # it did train

    events = [json.loads(line) for line in (switched / "events.jsonl").read_text().splitlines()]
    visited = [[str(e[end]).removesuffix("-noopt") for end in ("source", "target")] for e in events]
    assert visited == [list(pair) for pair in pairwise(LAYOUTS)]
    saved = 0
    for number, event in enumerate(events):
        assert event["event"] == "switch" and event["ok"]
        # dp4 with the plain optimizer holds everything on every rank: nothing has to move then
        copies = str(event["source"]) == "dp4-noopt"
        assert event["bytes"]["moved"] == event["bytes"]["lower_bound"]
        if event["placement"] is not None:  # nothing is worked out for a layout that is kept
            placed = event["placement"]["bytes"]
            assert event["bytes"]["moved"] == placed["best"] <= placed["identity"]
            assert (placed["identity"] == 0) == copies
            saved += placed["identity"] - placed["best"]
        assert sum(map(sum, event["bytes_matrix"])) == (
            event["bytes"]["moved"] + event["bytes"]["retained"]
        )
        assert event["fingerprint"]["before"] == event["fingerprint"]["after"]
        # one layout is kept: the launch's is gone again when the last switch goes back to it
        assert event["groups"]["created"] > 0
        assert (event["groups"]["reused"] > 0) == (number >= 1)  # of the one that is kept
        assert (event["groups"]["destroyed"] > 0) == (number >= 1)
        # less where the transport carries state as it lies and needs no staging memory
        assert event["peak_extra_bytes"] <= event["planned_peak_extra_bytes"]
        timed = {"prepare", "quiesce", "groups", "build", "plan", "pack", "wire", "unpack"}
        timed |= {"memory", "rebuild", "verify", "vote", "commit"}
        assert set(event["seconds"]) == timed | {"writers"}
        # Some are of the slowest rank, and they overlap.
        assert 0 < sum(event["seconds"].values()) <= event["stall_s"] * 1.15
    # Processes took other ranks where less had to move then; with copies it is never less here.
    assert (saved > 0) == bool(extra)
    # the gradients dropped may outweigh all that comes: then a switch takes no memory at all
    assert max(event["peak_extra_bytes"] for event in events) > 0
    ours, theirs = logged_losses(switched), logged_losses(static)
    assert len(ours) == ITERATIONS  # a line a step; Megatron's second one averages two steps
    assert ours == pytest.approx(theirs, rel=1e-6)
