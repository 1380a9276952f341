"""Every state an optimizer or model keeps, over every ordered pair of three layouts on 2 ranks.

Each case is one Megatron run with six switches, compared bit for bit with the oracle; see
:mod:`tests.host.oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.host import oracle, tours
from tests.ranks import TINY_LLAMA
from tests.support import How

LAYOUTS = ["dp2", "tp2", "pp2"]
DISTRIBUTED = ["--use-distributed-optimizer"]
SGD = ["--optimizer", "sgd", "--sgd-momentum", "0.9", "--lr", "1e-2"]
# A scale that overflows at first, and then grows again: scale and both counters change.
FP16 = [
    *("--fp16", "--initial-loss-scale", "8388608"),
    *("--hysteresis", "2", "--loss-scale-window", "3"),
]


class Case(NamedTuple):
    """Flags, the layouts between which the run goes, and what is changed on each rank before."""

    flags: list[str]
    layouts: list[str] = LAYOUTS
    inside: Callable[[], None] | None = None
    first: int = 2


def after_init(cls: Any, do: Callable[[Any], None]) -> None:
    """Call ``do`` with each new object of ``cls``; in a rank."""
    real = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        do(self)

    cls.__init__ = init


def freeze_what_a_key_names() -> None:
    """The word embeddings and the second matrix of each MLP are not trained.

    Layers share a key in a checkpoint; Megatron cannot save one of which some layers are frozen.
    """
    from megatron.core.models.gpt import GPTModel

    def freeze(model: Any) -> None:
        for name, param in model.named_parameters():
            if "linear_fc2" in name or "word_embeddings" in name:
                param.requires_grad = False

    after_init(GPTModel, freeze)


CASES = {
    "fp16 with a loss scaler": Case([*FP16, *DISTRIBUTED], first=6),
    "fp16 with a loss scaler, plain optimizer": Case(FP16, first=6),
    "SGD with momentum, bf16": Case([*SGD, "--bf16"]),
    "SGD with momentum, float32": Case(SGD),
    "learning rate of the embedding by itself": Case(
        [*DISTRIBUTED, "--decoupled-lr", "5e-3", "--decoupled-min-lr", "1e-3", "--bf16"]
    ),
    "frozen parameters": Case([*DISTRIBUTED, "--bf16"], inside=freeze_what_a_key_names),
    "frozen parameters, plain optimizer": Case([], inside=freeze_what_a_key_names),
    "distributed optimizer on and off": Case(
        [*DISTRIBUTED, "--bf16", "--overlap-grad-reduce", "--overlap-param-gather"],
        ["dp2", "dp2-noopt", "tp2"],
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_a_state_is_bit_equal_in_every_layout(name: str, tmp_path: Path, support: Any) -> None:
    case = CASES[name]
    pairs = oracle.run_tour(
        2,
        [*TINY_LLAMA, *case.flags, "--global-batch-size", "4"],
        tours.every_pair(case.layouts),
        tmp_path,
        first=case.first,
        inside=case.inside,
    )
    assert len(set(pairs)) == 6
    support(name, How.TRAINED, pairs)
