"""Layouts beyond plain degrees on 4 ranks, each a run along a list of them, checked by the oracle.

See :mod:`tests.host.oracle`. Degrees themselves, in every pair, are in
:mod:`tests.host.test_oracle` and :mod:`tests.host.test_families`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.host import oracle
from tests.ranks import TINY_LLAMA
from tests.support import How

TIED = [flag for flag in TINY_LLAMA if flag != "--untie-embeddings-and-output-weights"]
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
PIPELINE_FIRST = "order:tp.cp.ep.pp.dp"


class Case(NamedTuple):
    """Flags, and the layouts a run goes through; the first is the launch's."""

    flags: list[str]
    tour: list[str]


CASES = {
    "stages by layout strings, of their own for embedding and loss": Case(
        [*TINY_LLAMA, *TP2],
        [
            *("tp2-dp2", "pp2-dp2-pipeline:Et|tttL", "pp2-dp2", "pp4-pipeline:E|tt|tt|L"),
            *("pp2-vpp2-dp2-pipeline:Et|t|t|tL", "pp2-vpp2-dp2-pipeline:Ett|t|t|L"),
            *("pp4", "tp2-pp2-pipeline:Ettt|tL", "tp2-dp2"),
        ],
    ),
    "a first stage of another size, tied embeddings": Case(
        [*TIED, *PP2, "--num-layers", "5", "--decoder-first-pipeline-num-layers", "2"],
        ["pp2-dp2", "dp4", "pp4", "tp2-pp2", "tp4", "pp4", "pp2-dp2"],
    ),
    "embedding and loss counted as layers, tied embeddings": Case(
        [
            *(*TIED, *PP2, "--num-layers", "6"),
            *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
        ],
        ["pp2-dp2", "dp4", "tp2-pp2", "pp2-vpp2-dp2", "pp4", "tp4"],
    ),
    "rank orders and micro-batch sizes": Case(
        [*TINY_LLAMA, *TP2],
        [
            *("tp2-dp2", f"pp2-dp2-{PIPELINE_FIRST}", "tp2-pp2", "pp2-dp2"),
            *(f"pp2-dp2-{PIPELINE_FIRST}", "tp2-dp2-mbs2", "dp4-mbs2", "pp4-mbs4", "tp2-dp2"),
        ],
    ),
    "optimizer instances, bf16": Case(
        [*TINY_LLAMA, "--bf16"],
        ["dp4", "dp4-instances2", "tp2-dp2-instances2", "pp2-dp2", "dp4-instances2", "dp4"],
    ),
}


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_bit_equal_to_save_and_reshard(name: str, tmp_path: Path, support: Any) -> None:
    case = CASES[name]
    flags = [*case.flags, "--use-distributed-optimizer"]
    # A stage with the embedding alone has five.
    pairs = oracle.run_tour(4, flags, case.tour, tmp_path, least=5)
    assert pairs == list(pairwise(case.tour))
    support(name, How.TRAINED, pairs)
