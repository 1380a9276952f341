"""Context parallelism and multi-latent attention: switched, bit for bit and by the losses.

Weights begin ten times larger here than Megatron has them: with its own, the attention of so small
a model looks at all tokens alike, and a wrong one would not show in the loss.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.host import around, oracle, tours
from tests.ranks import TINY_LLAMA, run_megatron
from tests.support import How

FLAGS = ["--use-distributed-optimizer", "--init-method-std", "0.2"]
_GROUPED = TINY_LLAMA.index("--group-query-attention")
LATENT = [
    *(*TINY_LLAMA[:_GROUPED], *TINY_LLAMA[_GROUPED + 3 :]),  # latent heads have no groups
    *("--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12"),
    *("--qk-layernorm", "--rotary-scaling-factor", "4"),
]


class Case(NamedTuple):
    """A model and the layouts it is taken through, first to last."""

    flags: list[str]
    tour: list[str]


CASES = {
    "context parallel, bf16": Case(
        [*TINY_LLAMA, "--bf16"], tours.every_pair(["dp2", "cp2", "tp2"])
    ),
    "multi-latent attention, float32": Case(
        LATENT, [*tours.every_pair(["dp2", "pp2", "tp2"]), "cp2", "tp2-sp"]
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_switches_are_bit_equal_to_save_and_reshard(
    name: str, tmp_path: Path, support: Any
) -> None:
    case = CASES[name]
    pairs = oracle.run_tour(2, [*case.flags, *FLAGS], case.tour, tmp_path)
    assert pairs == list(pairwise(case.tour))
    support(name, How.TRAINED, pairs)


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_the_run_that_never_switched(name: str, tmp_path: Path) -> None:
    """In float32. Tensor parallel too, of which Megatron's latent attention has wrong gradients."""
    tour = ["dp2", "tp2", "cp2", "tp2-sp", "pp2"]
    flags = [flag for flag in CASES[name].flags if flag != "--bf16"]
    flags += [*FLAGS, "--train-iters", "10", "--data-cache-path", str(tmp_path / "cache")]
    switches = [f"{{iteration: {2 * i}, layout: {to}}}" for i, to in enumerate(tour) if i]
    run_megatron(2, flags, [], tmp_path / "static")
    run_megatron(2, flags, [f"schedule=[{', '.join(switches)}]"], tmp_path / "switched")
    expected, got = around.steps(tmp_path / "static"), around.steps(tmp_path / "switched")
    assert [step["layout"] for step in got] == [layout for layout in tour for _ in range(2)]
    for a, b in zip(expected, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), (a, b)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), (a, b)
