"""Unmodified Megatron trains on CPU ranks through our own entry: layouts, data, checkpoints."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import TINY_LLAMA, MegatronRun, RankFailure, run_megatron, run_ranks

LOSS = re.compile(r"iteration +(\d+)/.* lm loss: (\S+) .* grad norm: (\S+) ")


def steps(run: MegatronRun) -> dict[int, tuple[float, float]]:
    """Iteration → (loss, gradient norm), as the last rank printed them."""
    found = LOSS.findall(run.logs[-1])
    return {int(iteration): (float(loss), float(norm)) for iteration, loss, norm in found}


def flags(text: str, iterations: int = 3) -> list[str]:
    return [*TINY_LLAMA, "--train-iters", str(iterations), *text.split()]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of an indexed dataset: 40 documents that count up by one."""
    prefix = tmp_path_factory.mktemp("data") / "counting"

    def build(rank: int) -> None:
        import numpy
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
        for document in range(40):
            tokens = torch.arange(document, document + 400) % 900
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{prefix}.idx")

    run_ranks(1, build)
    return prefix


def test_tensor_and_data_parallel_bf16_on_an_indexed_dataset(dataset: Path, tmp_path: Path) -> None:
    data = f"--data-path {dataset} --split 8,1,1 --data-cache-path {tmp_path}/cache"
    run = run_megatron(
        4,
        [
            *(flag for flag in flags("", iterations=6) if flag != "--mock-data"),
            *"--tensor-model-parallel-size 2 --bf16 --use-distributed-optimizer".split(),
            *"--overlap-grad-reduce --overlap-param-gather --num-workers 1".split(),
            *"--eval-iters 1 --eval-interval 3 --log-memory-interval 3".split(),
            *data.split(),
        ],
        None,
        tmp_path,
    )
    losses = [loss for loss, _ in steps(run).values()]
    assert losses[0] == pytest.approx(6.93, abs=0.1)  # ln 1024: nothing is known yet
    assert losses[-1] < losses[0] - 0.1  # counting is easy to learn
    assert run.logs[-1].count("validation loss at iteration") >= 2
    assert min(map(float, re.findall(r"allocated: ([\d.]+)", run.logs[0]))) > 50
    assert "added --distributed-backend gloo: NCCL joins GPUs only" in run.logs[0]
    assert "[dynatrain]" not in run.logs[1]


def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path: Path) -> None:
    saved = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    saved += " --ckpt-fully-parallel-save"
    whole = run_megatron(
        4,
        flags(
            f"{saved} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
            f" --mtp-num-layers 1 --save {tmp_path}/ckpt --save-interval 2",
            iterations=4,
        ),
        None,
        tmp_path / "whole",
    )
    resumed = run_megatron(
        4,
        flags(
            f"{saved} --tensor-model-parallel-size 2 --sequence-parallel --mtp-num-layers 1"
            f" --load {tmp_path}/ckpt --ckpt-step 2",
            iterations=4,
        ),
        None,
        tmp_path / "resumed",
        inside=_count_adam_steps,
    )
    expected, seen = steps(whole), steps(resumed)
    assert set(seen) == {3, 4}
    assert seen[3] == pytest.approx(expected[3], rel=2e-6, abs=2e-3)
    # Megatron's second line after a start is the mean of two iterations.
    assert seen[4][0] == pytest.approx((expected[3][0] + expected[4][0]) / 2, rel=2e-6)
    for log in resumed.logs:
        assert "Adam steps at the end: [4.0], one tensor each: True" in log


def _count_adam_steps() -> None:
    import megatron.training.training as training

    train = training.train

    def counting(
        forward_step: object, model: object, optimizer: Any, *args: Any, **kwargs: Any
    ) -> object:
        result = train(forward_step, model, optimizer, *args, **kwargs)
        states = [
            state
            for inner in optimizer.chained_optimizers
            for state in inner.optimizer.state.values()
        ]
        distinct = len({id(state["step"]) for state in states}) == len(states)
        values = sorted({float(state["step"]) for state in states})
        print(f"Adam steps at the end: {values}, one tensor each: {distinct}", flush=True)
        return result

    training.train = counting


def test_sequence_parallel_trains_as_tensor_parallel_does(tmp_path: Path) -> None:
    plain, sequence = (
        steps(run_megatron(2, flags(f"--tensor-model-parallel-size 2 {more}"), None, tmp_path / at))
        for at, more in (("plain", ""), ("sequence", "--sequence-parallel"))
    )
    assert len(plain) == 3
    for iteration, values in plain.items():
        assert sequence[iteration] == pytest.approx(values, rel=3e-6, abs=2e-3)


def test_experts_with_expert_and_sequence_parallel(tmp_path: Path) -> None:
    moe = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    moe += " --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    run = run_megatron(
        4,
        flags(
            f"--tensor-model-parallel-size 2 --sequence-parallel --bf16 {moe}"
            " --use-distributed-optimizer --moe-router-topk 2"
        ),
        None,
        tmp_path,
    )
    losses = [loss for loss, _ in steps(run).values()]
    assert losses[-1] < losses[0]
    (balance,) = {float(x) > 0 for x in re.findall(r"load_balancing_loss: (\S+)", run.logs[-1])}
    assert balance


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["", "--bf16"])
@pytest.mark.parametrize(
    ("optimizer", "first", "second"),
    [
        ("", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"),
        ("--use-distributed-optimizer", "", ""),
    ],
)
def test_other_checkpoint_formats_resume(
    tmp_path: Path, precision: str, optimizer: str, first: str, second: str
) -> None:
    save = f"--save {tmp_path}/ckpt --save-interval 2 --async-save --async-strategy mcore"
    common = f"{precision} {optimizer}"
    whole = steps(run_megatron(2, flags(f"{common} {first} {save}", 4), None, tmp_path / "whole"))
    load = f"--load {tmp_path}/ckpt --ckpt-step 2"
    seen = steps(run_megatron(2, flags(f"{common} {second} {load}", 4), None, tmp_path / "resumed"))
    tolerance = 2e-4 if precision and first != second else 2e-6
    assert seen[3][0] == pytest.approx(whole[3][0], rel=tolerance)
    assert seen[4][0] == pytest.approx((whole[3][0] + whole[4][0]) / 2, rel=tolerance)


def failure(argv: Sequence[str], tmp_path: Path, world: int = 1) -> str:
    """What our entry writes when it ends with exit code 2 before making a process group."""

    def worker(rank: int) -> None:
        import torch

        def no_group(*args: object, **kwargs: object) -> None:
            raise AssertionError("a process group was made")

        torch.distributed.init_process_group = no_group
        from dynatrain_megatron.plugin.pretrain_gpt import main

        main(argv)

    with pytest.raises(RankFailure, match="exited with code 2"):
        run_ranks(world, worker, log_dir=tmp_path)
    return (tmp_path / "rank0.log").read_text()


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ("--distributed-backend nccl", ("--distributed-backend nccl", "use gloo")),
        ("--sft", ("--sft cannot work in this entry", "pretrain_gpt.py")),
        ("--dynatrain platform=cuda", ("platform=cuda",)),
        ("--dynatrain engine.windows=3", ("engine.windows",)),
    ],
)
def test_mistakes_end_with_one_message_and_exit_code_2(
    tmp_path: Path, extra: str, parts: Sequence[str]
) -> None:
    text = failure([*TINY_LLAMA, *extra.split()], tmp_path)
    for part in parts:
        assert part in text
    assert "Traceback" not in text


def test_a_mistake_is_said_once_a_machine(tmp_path: Path) -> None:
    failure(["--fp8-format", "hybrid"], tmp_path, world=2)
    assert "--fp8-format hybrid" in (tmp_path / "rank0.log").read_text()
    assert (tmp_path / "rank1.log").read_text() == ""


def test_help_shows_megatrons_flags_and_ours(tmp_path: Path) -> None:
    def worker(rank: int) -> None:
        from dynatrain_megatron.plugin.pretrain_gpt import main

        main(["--help"])

    run_ranks(1, worker, log_dir=tmp_path)
    text = (tmp_path / "rank0.log").read_text()
    assert "--tensor-model-parallel-size" in text and "--dynatrain" in text
    assert "change the parallel layout while training" in text


@pytest.mark.slow
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    done = subprocess.run(
        [*launch.split(), str(root / "scripts" / "pretrain_gpt.py"), *flags("", iterations=1)],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(steps(MegatronRun([done.stdout], tmp_path))) == {1}
    assert done.stderr.count("torch finds no CUDA device") == 1
