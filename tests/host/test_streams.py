"""Random streams after a switch: Megatron's formula, with a seed that no other layout had.

The streams expected are made here from the formula's own terms, without Megatron.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynatrain_megatron.adapters.skeleton import base_seed
from tests.host import around
from tests.ranks import TINY_LLAMA, run_megatron

SEED = 4321
ITERATIONS = 8
FLAGS = [
    *TINY_LLAMA,
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--seed", str(SEED)),
    *("--use-distributed-optimizer", "--tensor-model-parallel-size", "2"),
    *("--global-batch-size", "4", "--train-iters", str(ITERATIONS)),
]
# (iteration, layout) and in it (tp, pp, dp) of both ranks
SWITCHES = {
    2: ("pp2", [(0, 0, 0), (0, 1, 0)]),
    4: ("dp2", [(0, 0, 0), (0, 0, 1)]),
    6: ("tp2", [(0, 0, 0), (1, 0, 0)]),
}
STEPS = [f"{{iteration: {at}, layout: {to}}}" for at, (to, _) in SWITCHES.items()]
SCHEDULE = f"schedule=[{', '.join(STEPS)}]"


def digest(state: object) -> str:
    data = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def of_torch(seed: int) -> str:
    return digest(torch.Generator().manual_seed(seed).get_state())


def note_streams(directory: Path) -> Callable[[], None]:
    """Write down the state of every stream right after each switch; in a rank."""

    def inside() -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        from dynatrain_megatron.plugin import session

        real = session.switch

        def noted(job: Any, target: Any, options: Any, *worlds: Any) -> Any:
            report = real(job, target, options, *worlds)
            streams = {
                name: digest(state) for name, state in get_cuda_rng_tracker().get_states().items()
            }
            streams["python"] = digest(random.getstate())
            streams["numpy"] = digest(np.random.get_state()[1].tolist())
            streams["torch"] = digest(torch.get_rng_state())
            with (directory / f"streams-{dist.get_rank()}.jsonl").open("a") as file:
                file.write(json.dumps(streams) + "\n")
            return report

        session.switch = noted  # type: ignore[assignment]

    return inside


def expected_streams(
    iteration: int, tp: int, pp: int, dp: int, per_replica: bool
) -> dict[str, str]:
    """Seeds by Megatron's formula: each stage its own, each tensor-parallel rank where it cuts."""
    seed = base_seed(SEED, iteration) + 100 * pp + (10 * dp if per_replica else 0)
    return {
        "model-parallel-rng": of_torch(seed + 2718 + tp),
        "expert-parallel-rng": of_torch(seed + 1024 + tp),
        "data-parallel-rng": of_torch(seed),
        "torch": of_torch(seed),
        "python": digest(random.Random(seed).getstate()),
        "numpy": digest(np.random.RandomState(seed).get_state()[1].tolist()),
    }


@pytest.mark.host
@pytest.mark.parametrize("per_replica", [False, True], ids=["shared", "own of each replica"])
def test_streams_begin_anew_by_the_formula(per_replica: bool, tmp_path: Path) -> None:
    extra = ["--data-parallel-random-init"] if per_replica else []
    runs = [
        run_megatron(2, [*FLAGS, *extra], [SCHEDULE], tmp_path / name, inside=inside)
        for name, inside in (("first", note_streams(tmp_path)), ("again", None))
    ]
    seen: list[str] = []
    for rank in range(2):
        states = around.json_lines(tmp_path / f"streams-{rank}.jsonl")
        assert len(states) == len(SWITCHES)
        for (iteration, (_, ranks)), streams in zip(SWITCHES.items(), states, strict=True):
            assert streams == expected_streams(iteration, *ranks[rank], per_replica)
            seen += {streams["model-parallel-rng"], streams["python"]}
    # pp2 has four of its own; in dp2 both ranks share theirs, in tp2 the python one.
    assert len(set(seen)) == (11 if per_replica else 9)
    assert of_torch(SEED + 2718) not in seen and of_torch(SEED + 2719) not in seen

    first, again = (around.steps(run.run_dir) for run in runs)
    assert [step["loss"] for step in first] == [step["loss"] for step in again]
    assert all(5 < step["loss"] < 8 for step in first) and len(first) == ITERATIONS
    assert [event["target"] for event in around.events(runs[0].run_dir)] == ["pp2", "dp2", "tp2"]


def test_no_iteration_has_the_seed_of_another() -> None:
    # 100 for each stage, 10 for each replica, and what streams add: far less than the distance.
    seeds = sorted(base_seed(SEED, iteration) for iteration in range(2000))
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 100_000
    assert base_seed(SEED, 1) != SEED
    assert min(seeds) > 0 and max(seeds) < 2**31
