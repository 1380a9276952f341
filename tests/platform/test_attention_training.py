"""Megatron trains with the sequence in pieces as it does with the whole."""

from pathlib import Path

import pytest

from tests.host import around
from tests.ranks import TINY_LLAMA, run_megatron


@pytest.mark.host
@pytest.mark.parametrize(
    "extra",
    [[], ["--no-create-attention-mask-in-dataloader", "--recompute-activations"]],
    ids=["mask from the data", "causal mask, recomputed"],
)
def test_context_parallel_trains_as_one_rank_does(extra: list[str], tmp_path: Path) -> None:
    """Weights begin ten times larger than Megatron has them, so that attention matters."""
    flags = [*TINY_LLAMA, *extra, "--init-method-std", "0.2", "--train-iters", "6"]
    run_megatron(1, flags, [], tmp_path / "cp1")
    run_megatron(2, [*flags, "--context-parallel-size", "2"], [], tmp_path / "cp2")
    whole, pieces = around.steps(tmp_path / "cp1"), around.steps(tmp_path / "cp2")
    assert len(whole) == 6 and {step["layout"] for step in pieces} == {"cp2-noopt"}
    for a, b in zip(whole, pieces, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), (a, b)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), (a, b)
