"""Models of Transformer Engine's modules, trained by its Adam: switched, bit for bit.

The package is real, its kernels are imitated (:mod:`.te_on_cpu`). It has to be built for that,
which takes 10 to 20 minutes: scripts/setup_te.sh.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from dynatrain_megatron.layout import ParallelLayout
from tests.host import around, oracle, te_on_cpu, tours
from tests.host.test_attention import LATENT
from tests.host.test_hybrid import FLAGS as HYBRID
from tests.ranks import TINY_LLAMA, run_megatron

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(
        find_spec("transformer_engine_torch") is None,
        reason="Transformer Engine is not here: scripts/setup_te.sh builds it",
    ),
]

FLAGS = [*te_on_cpu.FLAGS, "--init-method-std", "0.2"]
DISTRIBUTED = ["--use-distributed-optimizer"]
_EXPERTS = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-router-dtype", "fp32"),
    "--moe-grouped-gemm",
]


class Case(NamedTuple):
    """A model and the layouts it is taken through, first to last."""

    flags: list[str]
    tour: list[str]
    optimizer: list[str] = DISTRIBUTED


CASES = {
    "dense, bf16": Case(
        [*TINY_LLAMA, "--bf16"], [*tours.every_pair(["dp2", "tp2", "pp2", "cp2"]), "tp2-sp"]
    ),
    "dense, float32, layer norms with biases": Case(
        [flag for flag in TINY_LLAMA if flag not in ("--normalization", "RMSNorm")],
        ["dp2", "tp2-sp", "pp2", "tp2", "pp2-vpp2", "dp2"],
    ),
    "grouped experts, bf16": Case(
        [*TINY_LLAMA, *_EXPERTS, "--bf16"], tours.every_pair(["dp2", "dp2-ep2", "pp2"])
    ),
    "dense, SGD with momentum": Case(
        [*TINY_LLAMA, "--bf16"],
        ["dp2-noopt", "tp2-noopt", "pp2-noopt", "dp2-noopt"],
        ["--optimizer", "sgd", "--sgd-momentum", "0.9", "--lr", "1e-2"],
    ),
    "dense, fp16 with a loss scaler": Case(
        [*TINY_LLAMA, "--fp16", "--initial-loss-scale", "1024"], ["dp2", "tp2", "pp2", "dp2"]
    ),
    "hybrid": Case([*HYBRID, "--bf16"], ["pp2", "tp2-sp", "dp2", "pp2-vpp2", "dp2-ep2", "cp2"]),
    "latent attention, shared experts, multi-token prediction": Case(
        [
            *(*LATENT, *_EXPERTS, "--moe-shared-expert-intermediate-size", "64"),
            *("--mtp-num-layers", "1", "--bf16"),
        ],
        ["dp2", "tp2-sp-etp1", "pp2", "tp2-sp-etp2", "dp2-ep2", "dp2-noopt", "dp2"],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("keep_source", ["always", "never"])
def test_switches_are_bit_equal_to_save_and_reshard(
    name: str, keep_source: str, tmp_path: Path
) -> None:
    case = CASES[name]
    overrides = [f"engine.keep_source={keep_source}"]
    pairs = oracle.run_tour(
        2,
        [*case.flags, *FLAGS, *case.optimizer],
        case.tour,
        tmp_path,
        overrides=overrides,
        inside=te_on_cpu.use,
    )
    tour = [str(ParallelLayout.parse(layout)) for layout in case.tour]
    assert pairs == list(pairwise(tour))


def test_losses_equal_the_run_that_never_switched(tmp_path: Path) -> None:
    tour = ["dp2", "tp2", "cp2", "tp2-sp", "pp2"]
    flags = [*TINY_LLAMA, *FLAGS, *DISTRIBUTED, "--train-iters", "10"]
    flags += ["--data-cache-path", str(tmp_path / "cache")]
    switches = [f"{{iteration: {2 * i}, layout: {to}}}" for i, to in enumerate(tour) if i]
    for name, own in (("static", []), ("switched", [f"schedule=[{', '.join(switches)}]"])):
        run_megatron(2, flags, own, tmp_path / name, inside=te_on_cpu.use)
    expected, got = around.steps(tmp_path / "static"), around.steps(tmp_path / "switched")
    assert [step["layout"] for step in got] == [layout for layout in tour for _ in range(2)]
    for a, b in zip(expected, got, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), (a, b)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), (a, b)
