"""Each family of models over every ordered pair of six layouts on 4 ranks.

A family is one float32 run that switches at every iteration, compared bit for bit with the oracle
(see :mod:`tests.host.oracle`), and its losses with those of a run that never switches. Dense models
in the manner of Llama and GPT-2 are in :mod:`tests.host.test_oracle`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.host import around, oracle, tours
from tests.host.test_attention import LATENT
from tests.ranks import TINY_LLAMA, run_megatron
from tests.support import How

MOE = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-router-dtype", "fp32"),
]
DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
# Evaluation right before a switch and, with one at each iteration, right after another.
EVALUATION = ["--eval-interval", "5", "--eval-iters", "2"]


# Attention whose weights are as small as Megatron has them looks at all tokens alike here.
WIDE = ["--init-method-std", "0.2"]
DEEPSEEK = [
    *("--moe-layer-freq", "([0]*1+[1]*3)", "--moe-shared-expert-intermediate-size", "32"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "1e-3"),
]


class Family(NamedTuple):
    """Flags of a model and its launch layout, which is the first of the ``layouts``."""

    flags: list[str]
    launch: list[str]
    layouts: list[str]


def without(flags: list[str], name: str, count: int) -> list[str]:
    """``flags`` less ``count`` words from ``name`` on."""
    at = flags.index(name)
    return flags[:at] + flags[at + count :]


FAMILIES = {
    "Mixtral": Family(
        [
            *(*TINY_LLAMA, *MOE, *EVALUATION),
            *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
        ],
        ["--expert-model-parallel-size", "4"],
        # One optimizer for all parameters where ep is 1 and etp is tp, else two.
        [
            *("dp4-ep4", "dp4", "tp2-dp2-ep2-etp1-sp", "pp2-vpp2-dp2", "tp4-sp"),
            "tp2-pp2-ep2-etp1-sp",
        ],
    ),
    "multi-token prediction": Family(
        [
            *TINY_LLAMA,
            *OVERLAP,
            "--mtp-num-layers",
            "1",
            "--mtp-loss-scaling-factor",
            "0.1",
            *EVALUATION,
        ],
        [
            *("--pipeline-model-parallel-size", "2"),
            *("--num-virtual-stages-per-pipeline-rank", "2"),
        ],
        ["pp2-vpp2-dp2", "tp2-dp2", "pp2-dp2", "dp4", "pp4", "tp2-pp2"],
    ),
    "DeepSeek: latent attention, shared experts, expert bias, one dense layer": Family(
        [*LATENT, *WIDE, *MOE, *DEEPSEEK],
        ["--expert-model-parallel-size", "4"],
        [
            *("dp4-ep4", "dp4", "tp2-dp2-ep2-etp1-sp", "pp2-dp2-ep2", "cp2-dp2-ep2"),
            "tp2-pp2-ep2-etp1-sp",
        ],
    ),
    "Hybrid: attention, MLP and expert layers, prediction": Family(
        [
            *without(TINY_LLAMA, "--num-layers", 2),  # the pattern has their number
            *("--hybrid-layer-pattern", "*-*-|*E*E/*-", *MOE),
        ],
        ["--pipeline-model-parallel-size", "2"],
        ["pp2-dp2", "tp2-dp2-sp", "dp4-ep2", "pp2-vpp2-dp2", "tp2-pp2-sp", "pp4"],
    ),
}


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_keeps_its_state_and_its_losses(name: str, tmp_path: Path, support: Any) -> None:
    family = FAMILIES[name]
    flags = [*family.flags, *family.launch, *DISTRIBUTED]
    switched, static = tmp_path / "switched", tmp_path / "static"
    pairs = oracle.run_tour(4, flags, tours.every_pair(family.layouts), switched)
    assert len(set(pairs)) == len(family.layouts) * (len(family.layouts) - 1)

    # Over 20 steps from the first switch; later, rounding alone drives two runs apart.
    length = ["--train-iters", str(len(pairs) + 3), "--exit-interval", "22"]
    cache = ["--data-cache-path", str(switched / "cache")]
    run_megatron(4, [*flags, *length, *cache], [], static)
    expected, got = around.steps(static), around.steps(switched)
    assert [step["iteration"] for step in expected] == list(range(1, 23))
    for a, b in zip(expected, got, strict=False):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6), (a, b)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), (a, b)
        assert (b["lr"], b["consumed_samples"]) == (a["lr"], a["consumed_samples"])
    assert len({step["loss"] for step in expected}) == len(expected)  # it did train
    support(name, How.TRAINED, pairs)
