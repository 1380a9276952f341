"""Modules that no CPU can run, described and moved by their real sharding; others refused by name.

See :mod:`tests.adapters.stand_ins` for the modules, :mod:`tests.truth` for what must come out.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.layout import ParallelLayout
from tests.adapters import stand_ins
from tests.dry import DryJob
from tests.ranks import TINY_LLAMA, run_ranks
from tests.support import How
from tests.truth import Rules, Truth, carried, swiglu_halves

FLAGS = [*TINY_LLAMA, "--bf16", "--use-distributed-optimizer"]
EXPERTS = [*FLAGS, "--num-experts", str(stand_ins.NUM_EXPERTS), "--moe-router-topk", "2"]


class Case(NamedTuple):
    """A stand-in, and two layouts between which its state moves both ways."""

    provider: Callable[..., Any]
    flags: list[str]
    one: str
    other: str
    segments: Callable[..., Any] = swiglu_halves


CASES = {
    "Mamba layers (stand-in)": Case(
        stand_ins.mamba, FLAGS, "dp4", "tp2-dp2", stand_ins.mamba_segments
    ),
    "Mamba layers (stand-in), plain optimizer": Case(
        stand_ins.mamba, FLAGS, "tp2-noopt", "dp4", stand_ins.mamba_segments
    ),
    "grouped experts (stand-in)": Case(
        stand_ins.grouped_experts, EXPERTS, "tp2-dp2-ep2-etp1-sp", "dp4-ep4"
    ),
    "grouped experts (stand-in), cut": Case(
        stand_ins.grouped_experts, EXPERTS, "tp2-dp2-ep2-sp", "dp4-ep2-noopt"
    ),
    "frozen parameters and buffers (stand-in)": Case(stand_ins.frozen, FLAGS, "dp2", "tp2-dp2"),
}


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_every_element_arrives_at_its_place(name: str, support: Any) -> None:
    case = CASES[name]

    def worker(rank: int) -> list[str]:
        job = DryJob(case.flags, case.provider)
        truth = Truth(Rules(num_layers=0, segments=case.segments))
        one, other = job.world(case.one), job.world(case.other)
        return [*carried(truth, one, other), *carried(truth, other, one)]

    (wrong,) = run_ranks(1, worker)
    assert wrong == []
    support(name, How.MOVED, [(case.one, case.other), (case.other, case.one)])


def pickled(value: Any) -> torch.Tensor:
    """A byte tensor, as Transformer Engine keeps what is no tensor."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


@pytest.mark.host
@pytest.mark.parametrize(
    ("provider", "message"),
    [
        (
            stand_ins.with_extra_state(pickled({"scale": 1.0})),
            r"layer\._extra_state .* is no tensor but a Tensor.*run without FP8",
        ),
        (stand_ins.with_extra_state({"scale": 1.0}), r"layer\._extra_state .* but a dict"),
        # Two keys for one fused matrix, as a fused MLA down-projection has them.
        (
            stand_ins.with_entries(lambda layer: {"q": layer.weight[:1], "kv": layer.weight[1:]}),
            r"layer\.weight has no entry .* that views its memory",
        ),
        # Experts in one parameter.
        (
            stand_ins.with_entries(lambda layer: dict(zip("abcd", layer.weight, strict=True))),
            r"layer\.weight has no entry",
        ),
        (stand_ins.with_entries(lambda layer: {}), r"layer\.weight has no entry"),
        (stand_ins.with_entries(lambda layer: {}, trained=False), r"layer\.weight has no entry"),
        (
            stand_ins.with_entries(lambda layer: {"weight": layer.weight}),
            r"layer\.count has no entry",
        ),
        (
            stand_ins.with_entries(
                lambda layer: {**layer.state_dict(keep_vars=True), "scale": torch.ones(3)}
            ),
            r"layer\.scale .* is no tensor of the model but one made for the checkpoint",
        ),
        (stand_ins.half_described, r"layer\.weight: .* covers 12 of 24 elements"),
    ],
    ids=["FP8", "object", "fused", "grouped", "left out", "frozen", "buffer", "copy", "half"],
)
def test_what_has_no_place_is_refused_by_name(provider: Callable[..., Any], message: str) -> None:
    def worker(rank: int) -> None:
        with pytest.raises(SwitchRefused, match=message):
            DryJob(FLAGS, provider).build(ParallelLayout(dp=2), 0)

    run_ranks(1, worker)


@pytest.mark.host
@pytest.mark.parametrize(
    "nothing",
    [None, torch.empty(0, dtype=torch.uint8), pickled({})],
    ids=["None", "no bytes", "empty dictionary"],
)
def test_an_empty_extra_state_is_in_nobodys_way(nothing: Any) -> None:
    def worker(rank: int) -> int:
        built = DryJob(FLAGS, stand_ins.with_extra_state(nothing)).build(ParallelLayout(dp=1), 0)
        return len(built.fragments.roster)

    assert run_ranks(1, worker) == [1]
