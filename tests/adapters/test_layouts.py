"""The state of large and unusual layouts, described, planned and moved in one process.

Megatron builds every rank of both layouts (:mod:`tests.dry`); the old world's state is filled with
bits that are worked out by hand, one value for each element of the unsharded model
(:mod:`tests.truth`), the plan is carried out, and the new world must hold exactly the values of its
own regions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.dry import DryJob, move
from tests.ranks import TINY_LLAMA, RankFailure, run_ranks
from tests.support import How
from tests.truth import Rules, Truth, carried

LLAMA = [
    *TINY_LLAMA,
    *("--bf16", "--use-distributed-optimizer", "--global-batch-size", "48"),
    *("--num-layers", "8", "--num-attention-heads", "8", "--num-query-groups", "4"),
]
FLOAT32 = [flag for flag in LLAMA if flag != "--bf16"]
TIED = [flag for flag in LLAMA if flag != "--untie-embeddings-and-output-weights"]
LEARNED = ["--position-embedding-type", "learned_absolute", "--normalization", "LayerNorm"]
BUCKETS = ["--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
MOE = [
    *LLAMA,
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48"),
    *("--moe-token-dispatcher-type", "alltoall"),
]
SHARED = [
    *MOE,
    *("--moe-layer-freq", "([0]*2+[1]*6)", "--moe-shared-expert-intermediate-size", "32"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
]
MTP = ["--mtp-num-layers", "1"]


class Case(NamedTuple):
    """A model, and two layouts between which its state moves both ways."""

    flags: list[str]
    one: str
    other: str
    rules: Rules = Rules(8)


CASES = {
    "context parallel degrees that fold into the optimizer": Case(LLAMA, "tp4-pp2-cp2", "tp2-cp4"),
    "32 ranks": Case(MOE, "tp4-pp2-cp2-dp2-ep4-etp2-sp", "tp2-pp4-dp4-ep8-etp1-sp"),
    "16 ranks to 6": Case(LLAMA, "tp2-pp2-dp4", "pp2-dp3"),
    "virtual pipeline": Case(LLAMA, "pp2-vpp2-tp2-dp2", "pp4-vpp2-dp2"),
    "virtual pipeline off": Case(FLOAT32, "tp2-pp4-vpp2", "pp8"),
    "stages of unlike size": Case(
        LLAMA, "pp4-dp2-pipeline:Et|tt|ttt|ttL", "tp2-dp4", Rules(8, stages=(1, 2, 3, 2))
    ),
    "unlike virtual stages": Case(
        TIED, "pp2-vpp2-dp2-pipeline:E|ttt|tttt|tL", "pp4-tp2", Rules(8, True, stages=(0, 3, 4, 1))
    ),
    "another rank order": Case(LLAMA, "tp2-pp2-dp4", "tp2-pp2-dp4-order:tp.cp.ep.pp.dp"),
    "optimizer instances": Case(LLAMA, "dp8-instances2", "tp2-pp2-dp2"),
    "optimizer instances, grown": Case(LLAMA, "tp2-dp4-instances2", "tp2-dp8-instances4"),
    "distributed optimizer off": Case(TIED, "tp2-pp2-dp2", "pp4-dp2-noopt", Rules(8, True)),
    "distributed optimizer off, float32": Case(FLOAT32, "tp4-dp2-noopt", "pp2-dp4"),
    "tied, learned positions": Case([*TIED, *LEARNED], "pp4-dp2", "tp4-dp2", Rules(8, True)),
    "buckets of unlike parameters": Case([*LLAMA, *BUCKETS], "dp16", "tp2-pp2-dp3"),
    "sequence parallel": Case(LLAMA, "tp4-pp2-sp", "tp2-dp4-sp"),
    "experts on one rank and on eight": Case(MOE, "dp8", "dp8-ep8"),
    "experts cut unlike the rest": Case(MOE, "tp4-dp2-ep2-etp1-sp", "tp2-dp4-ep2-etp2-sp"),
    "experts cut more than the rest": Case(MOE, "pp2-dp4-etp2", "tp2-dp4-ep8-etp1-sp"),
    "all degrees": Case(MOE, "tp2-pp2-cp2-dp2-ep4-etp1-sp", "tp4-cp2-ep4-etp2-sp"),
    "some layers with experts, shared ones": Case(SHARED, "pp2-dp4-ep4", "tp2-pp2-dp2-ep2-sp"),
    "shared experts, multi-token prediction": Case(
        [*SHARED, *MTP], "pp2-dp2-ep2", "tp2-dp4-ep4-sp"
    ),
    "experts in the other optimizer, off": Case(MOE, "dp8-ep4-noopt", "tp2-dp4-sp"),
    "experts in optimizer instances": Case(MOE, "dp8-ep2-instances2", "pp2-dp4-ep4"),
    "experts in buckets": Case([*MOE, *BUCKETS], "dp6-ep2", "pp2-dp3-noopt"),
}


def found_wrong(case: Case) -> list[str]:
    """What is not as it should be, there and back; in a process of its own."""

    def worker(rank: int) -> list[str]:
        job, truth = DryJob(case.flags), Truth(case.rules)
        one, other = job.world(case.one), job.world(case.other)
        return [*carried(truth, one, other), *carried(truth, other, one)]

    (wrong,) = run_ranks(1, worker)
    return list(wrong)


@pytest.fixture(scope="module")
def wrong_by_case(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The cases asked for, two at a time: each is one thread's work."""
    asked = [item.name for item in request.session.items if item.path == request.path]
    names = [name for name in CASES if any(f"[{name}]" in item for item in asked)]

    def half(rank: int) -> dict[str, list[str]]:
        found = {}
        for name in names[rank::2]:
            try:
                found[name] = found_wrong(CASES[name])
            except RankFailure as failure:
                found[name] = [str(failure)]
        return found

    return {
        name: wrong for each in run_ranks(2, half, timeout_s=580) for name, wrong in each.items()
    }


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_every_element_arrives_at_its_place(
    name: str, wrong_by_case: dict[str, list[str]], support: Any
) -> None:
    case = CASES[name]
    assert wrong_by_case[name] == []
    support(name, How.MOVED, [(case.one, case.other), (case.other, case.one)])


@pytest.mark.host
def test_weights_alone_arrive_at_their_places() -> None:
    """In float32 without a distributed optimizer a parameter is its own main parameter."""
    flags = [flag for flag in FLOAT32 if flag != "--use-distributed-optimizer"]

    def worker(rank: int) -> list[str]:
        job, truth = DryJob(flags), Truth(Rules(8))
        one, other = job.world("tp2-noopt"), job.world("pp2-noopt")
        truth.write(one)
        truth.wipe(other)
        move(*([replace(rank, fragments=rank.state.weights()) for rank in w] for w in (one, other)))
        return truth.differences(other)

    (wrong,) = run_ranks(1, worker)
    assert wrong, "moments do not go along"
    assert all(" exp_avg" in name for name in wrong)
