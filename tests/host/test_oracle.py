"""Every ordered pair of layouts on 4 ranks, checked bit for bit against Megatron's save and load.

Each case is one Megatron run that switches at every iteration; see :mod:`tests.host.oracle`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.host import oracle, tours
from tests.ranks import TINY_LLAMA
from tests.support import How

SIX = ["tp2-dp2", "pp2-dp2", "tp4", "pp4", "dp4", "tp2-pp2"]
FOUR = [*SIX[:3], "dp4"]
WITH_SEQUENCE_PARALLEL = [*SIX, "tp2-dp2-sp", "tp4-sp"]

TIED = [flag for flag in TINY_LLAMA if flag != "--untie-embeddings-and-output-weights"]
LEARNED_POSITIONS = [
    "--position-embedding-type",
    "learned_absolute",
    "--normalization",
    "LayerNorm",
]
DISTRIBUTED = ["--use-distributed-optimizer"]


class Case(NamedTuple):
    """A model and optimizer, and the layouts between which it is switched."""

    flags: list[str]
    layouts: list[str]


CASES = {
    "Llama, bf16, distributed optimizer, untied": Case(
        [*TINY_LLAMA, "--bf16", *DISTRIBUTED], WITH_SEQUENCE_PARALLEL
    ),
    "GPT-2, float32, distributed optimizer, tied, learned positions": Case(
        [*TIED, *LEARNED_POSITIONS, *DISTRIBUTED], WITH_SEQUENCE_PARALLEL
    ),
    "Llama, bf16, plain optimizer, tied": Case([*TIED, "--bf16"], FOUR),
    "Llama, float32, plain optimizer, untied": Case(TINY_LLAMA, FOUR),
}


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_every_ordered_pair_of_layouts_is_bit_equal_to_save_and_reshard(
    name: str, tmp_path: Path, support: Any
) -> None:
    """TP4 cuts the two KV groups of the model in half: GQA with fewer groups than TP."""
    case = CASES[name]
    flags = [*case.flags, "--tensor-model-parallel-size", "2"]
    pairs = oracle.run_tour(4, flags, tours.every_pair(case.layouts), tmp_path)
    assert len(set(pairs)) == len(case.layouts) * (len(case.layouts) - 1)
    support(name, How.TRAINED, pairs)
