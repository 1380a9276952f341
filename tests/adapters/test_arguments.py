"""Megatron's arguments for a target layout, where batches and evaluations depend on the layout."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dynatrain_megatron import platform
from dynatrain_megatron.adapters.arguments import LaunchArguments
from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout
from tests.ranks import TINY_LLAMA, run_ranks

BATCH = TINY_LLAMA.index("--global-batch-size")
GROWING = [*TINY_LLAMA[:BATCH], *TINY_LLAMA[BATCH + 2 :], "--step-batch-size-schedule", "0:4 1K:8"]
WHOLE = [*TINY_LLAMA, "--full-validation", "--multiple-validation-sets"]


def validated(flags: list[str], layout: ParallelLayout) -> tuple[Any, ...] | str:
    """Batch sizes that the arguments for ``layout`` have, after a launch in dp2; or the refusal."""

    def worker(rank: int) -> tuple[Any, ...] | str:
        from megatron.training.arguments import parse_args

        sys.argv = ["pretrain", *flags, *platform.current().default_flags(flags)]
        live = parse_args()
        launch = LaunchArguments.capture(live, {})
        live.global_batch_size = live.global_batch_size or 2  # as the host's validation does
        live.eval_global_batch_size = live.global_batch_size
        try:
            args = launch.validated(layout, live)
        except LayoutError as error:
            return str(error)
        return (
            args.global_batch_size,
            args.eval_global_batch_size,
            args.micro_batch_size,
            args.eval_micro_batch_size,
        )

    (found,) = run_ranks(1, worker)
    return found


@pytest.mark.host
def test_batch_sizes_stay_those_of_the_launch() -> None:
    larger = ParallelLayout(dp=2, mbs=4)
    assert validated(TINY_LLAMA, larger) == (8, 8, 4, 4)
    assert validated([*TINY_LLAMA, "--eval-micro-batch-size", "2"], larger) == (8, 8, 4, 2)
    # Without evaluations no batch has to be cut for them.
    assert validated(GROWING, larger) == (2, 8, 4, 4)
    refusal = validated([*GROWING, "--eval-iters", "1"], larger)
    assert "eval_global_batch_size (2) must be divisible" in str(refusal)


@pytest.mark.host
@pytest.mark.parametrize(
    ("extra", "layout", "reason"),
    [
        ([], ParallelLayout(tp=2), None),
        ([], ParallelLayout(pp=2), None),
        ([], ParallelLayout(dp=2, mbs=2), None),
        ([], ParallelLayout(tp=2, mbs=2), "expect micro-batches of 2; add --eval-micro-batch-size"),
        ([], ParallelLayout(pp=2, mbs=2), "expect micro-batches of 2; add --eval-micro-batch-size"),
        (["--eval-micro-batch-size", "1"], ParallelLayout(pp=2, mbs=2), None),
        ([], ParallelLayout(pp=4), "between the first and the last read none"),
        ([], ParallelLayout(pp=2, vpp=2), "between the first and the last read none"),
    ],
    ids=str,
)
def test_whole_validation_sets(extra: list[str], layout: ParallelLayout, reason: str) -> None:
    """Refused where Megatron itself, launched in that layout, ends with an error."""
    found = validated([*WHOLE, *extra], layout)
    if reason is None:
        assert found[0] == 8, found
    else:
        assert reason in str(found)
