"""How a run that has switched ends: by the clock, by a signal, by Ctrl-C; and what it leaves."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.host import around
from tests.ranks import TINY_LLAMA, RankFailure, run_megatron, run_ranks

COMMON = [*TINY_LLAMA, "--use-distributed-optimizer", "--global-batch-size", "4"]
BY_CLOCK = [
    *COMMON,
    *("--exit-duration-in-mins", "60", "--save-interval", "4", "--train-iters", "8"),
    *("--async-save", "--async-strategy", "mcore"),
    *("--overlap-grad-reduce", "--overlap-param-gather"),  # saving has to gather first
]
BY_SIGNAL = [*COMMON, "--exit-signal-handler", "--save-interval", "1000", "--train-iters", "1000"]
FLAGS = [BY_CLOCK, BY_SIGNAL]

ENDS_AT = 6


def an_hour_passes() -> None:
    """Set the start of training back before the last step is over; in a rank."""

    def note(logged: Mapping[str, Any]) -> None:
        from megatron.training import training

        if logged["iteration"] == ENDS_AT:
            training._TRAIN_START_TIME = time.time() - 3601

    around.at_each_log(note)


def layout_saved_in(checkpoint: Path) -> list[int]:
    """Tensor and pipeline parallel size of the run that wrote a checkpoint."""

    def worker(rank: int) -> list[int]:
        import torch
        from megatron.core.dist_checkpointing import load_common_state_dict

        torch.distributed.init_process_group("gloo")
        args = load_common_state_dict(str(checkpoint))["args"]
        return [args.tensor_model_parallel_size, args.pipeline_model_parallel_size]

    (found,) = run_ranks(1, worker)
    return list(found)


@pytest.mark.host
@pytest.mark.slow
def test_checkpoints_after_switches_and_an_end_by_the_clock(tmp_path: Path) -> None:
    """Saved with ``save_after_switch``: at once at 3; at 4 the loop has saved, so at 5."""
    ckpt = tmp_path / "ckpt"
    whole = run_megatron(
        2,
        [*BY_CLOCK, "--save", str(ckpt)],
        [
            "schedule=[{iteration: 3, layout: {tp: 2}}, {iteration: 4, layout: {pp: 2}}]",
            "save_after_switch=true",
        ],
        tmp_path / "whole",
        inside=an_hour_passes,
    )
    events = around.events(whole.run_dir)
    assert [(event["iteration"], event["target"]) for event in events] == [(3, "tp2"), (4, "pp2")]
    assert all(0 < event["seconds"]["save"] < event["stall_s"] for event in events)
    assert "iteration 4 was saved in the layout before; the checkpoint in pp2" in whole.logs[0]
    assert re.search(r"exiting program after 60\.\d+ minutes", whole.logs[0])
    assert around.saved_iterations(ckpt) == [3, 4, 5, ENDS_AT]
    assert around.latest_iteration(ckpt) == ENDS_AT
    saved_in = {at: layout_saved_in(ckpt / f"iter_{at:07d}") for at in (3, 4, 5, ENDS_AT)}
    assert saved_in == {3: [2, 1], 4: [2, 1], 5: [1, 2], ENDS_AT: [1, 2]}
    expected = around.steps(whole.run_dir)
    assert [step["iteration"] for step in expected] == list(range(1, ENDS_AT + 1))

    # The checkpoint that followed the first switch goes on, under its layout, as the job did.
    resumed = run_megatron(
        2,
        [
            *COMMON,
            *("--train-iters", "8", "--exit-interval", str(ENDS_AT)),
            *("--load", str(ckpt), "--ckpt-step", "3", "--tensor-model-parallel-size", "2"),
        ],
        [],
        tmp_path / "resumed",
    )
    got = around.steps(resumed.run_dir)
    assert [step["iteration"] for step in got] == [4, 5, 6]
    for a, b in zip(got, expected[3:], strict=True):
        assert (a["lr"], a["consumed_samples"]) == (b["lr"], b["consumed_samples"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_save_after_switch_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exited with code 2"):
        run_megatron(
            2, COMMON, ["target=tp2", "switch_at=2", "save_after_switch=true"], tmp_path
        )  # fmt: skip
    log = (tmp_path / "rank0.log").read_text()
    assert "save_after_switch=true needs a directory for the checkpoints; add --save DIR and" in log
    assert "Traceback" not in log and "initializing torch distributed" not in log


def somebody_sends_sigterm() -> None:
    """Another process sends SIGTERM to this rank after the third step; in a rank."""

    def note(logged: Mapping[str, Any]) -> None:
        if logged["iteration"] == 3:
            subprocess.Popen(["sh", "-c", f"kill -TERM {os.getpid()}"])

    around.at_each_log(note)


@pytest.mark.host
@pytest.mark.slow
def test_sigterm_saves_in_the_new_layout_and_ends(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    run = run_megatron(
        2,
        [*BY_SIGNAL, "--save", str(ckpt)],
        ["target=tp2", "switch_at=2"],
        tmp_path / "run",
        inside=somebody_sends_sigterm,
    )
    assert [event["target"] for event in around.events(run.run_dir)] == ["tp2"]
    assert "exiting program after receiving SIGTERM." in run.logs[0]
    last = around.steps(run.run_dir)[-1]["iteration"]
    assert 3 <= last < 1000
    assert around.saved_iterations(ckpt) == [last] == [around.latest_iteration(ckpt)]
    assert layout_saved_in(ckpt / f"iter_{last:07d}") == [2, 1]


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    """As a terminal does it: SIGINT to all processes of the foreground group, real ones."""
    root = Path(__file__).parents[2]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(root / "scripts" / "pretrain_gpt.py"), *COMMON]
    command += ["--train-iters", "100000"]
    command += ["--dynatrain", "target=tp2", "switch_at=2", f"run_dir={tmp_path}"]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(2):
            env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
            with (tmp_path / f"rank{rank}.log").open("wb") as log:
                group = ranks[0].pid if ranks else 0
                ranks.append(
                    subprocess.Popen(
                        command, env=env, cwd=tmp_path, stdout=log, stderr=log, process_group=group
                    )
                )
        until = time.monotonic() + 240
        while not re.search(r"iteration +4/", (tmp_path / "rank1.log").read_text()):
            assert all(rank.poll() is None for rank in ranks), tail(tmp_path)
            assert time.monotonic() < until, tail(tmp_path)
            time.sleep(0.2)
        os.killpg(ranks[0].pid, signal.SIGINT)
        codes = [rank.wait(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(code != 0 for code in codes), codes
    assert "KeyboardInterrupt" in tail(tmp_path)
    assert [event["target"] for event in around.events(tmp_path)] == ["tp2"]


def tail(run_dir: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(run_dir.glob("rank*.log")))
