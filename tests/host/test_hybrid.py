"""Hybrid models are switched: bit for bit, by the losses, and refused where a cut is not even."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.host import around, oracle, tours
from tests.ranks import TINY_LLAMA, run_megatron
from tests.support import How

_LAYERS = TINY_LLAMA.index("--num-layers")
FLAGS = [
    *(*TINY_LLAMA[:_LAYERS], *TINY_LLAMA[_LAYERS + 2 :]),  # the pattern has their number
    *("--hybrid-layer-pattern", "*-*-|*E*E/*-", "--pipeline-model-parallel-size", "2"),
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-dtype", "fp32"),
    *("--moe-token-dispatcher-type", "alltoall", "--use-distributed-optimizer"),
    *("--init-method-std", "0.2"),
]


@pytest.mark.host
@pytest.mark.slow
def test_switches_are_bit_equal_to_save_and_reshard(tmp_path: Path, support: Any) -> None:
    """With cuts at other places, several a rank, and experts in an optimizer of their own."""
    tour = [*tours.every_pair(["pp2", "tp2-sp", "dp2"]), "pp2-vpp2", "dp2-ep2", "pp2-vpp2"]
    # Stages of an odd number of layers would be padded, which the host's checkpoints cannot stand.
    tour += ["pp2-pipeline:*-|*-*E*E", "cp2"]
    pairs = oracle.run_tour(2, [*FLAGS, "--bf16"], tour, tmp_path)
    assert pairs == list(pairwise(tour))
    support("Hybrid with experts and prediction, bf16", How.TRAINED, pairs)


@pytest.mark.host
def test_losses_equal_the_run_that_never_switched(tmp_path: Path) -> None:
    """In float32; a first switch, to six stages of eight layers, is refused."""
    tour = ["pp2", "dp2-ep2", "tp2-sp", "pp2-vpp2", "dp2"]
    flags = [*FLAGS, "--train-iters", "10", "--data-cache-path", str(tmp_path / "cache")]
    switches = [f"{{iteration: {2 * i}, layout: {to}}}" for i, to in enumerate(tour) if i]
    switches.insert(0, "{iteration: 1, layout: pp2-vpp3}")
    run_megatron(2, flags, [], tmp_path / "static")
    run_megatron(2, flags, [f"schedule=[{', '.join(switches)}]"], tmp_path / "switched")
    expected, got = around.steps(tmp_path / "static"), around.steps(tmp_path / "switched")
    assert [step["layout"] for step in got] == [layout for layout in tour for _ in range(2)]
    for a, b in zip(expected, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), (a, b)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), (a, b)
    refused, *switched = around.events(tmp_path / "switched")
    assert refused["event"] == "refused" and len(switched) == len(tour) - 1
    assert "pp*vpp=2*3=6 must divide the 8 layers" in refused["reason"]
