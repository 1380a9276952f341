"""Synthetic rosters are those that Megatron's own objects give, fragment by fragment."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner.cells import disjoint_cells
from dynatrain_megatron.shapes import MODELS, Model, make_rosters
from dynatrain_megatron.shapes.models import Experts, LatentAttention
from dynatrain_megatron.vps import RosterSet, StateKind
from dynatrain_megatron.vps.boxes import volumes
from tests.adapters.test_layouts import BUCKETS, LEARNED, LLAMA, MOE, SHARED, TIED
from tests.dry import DryJob
from tests.planner.worlds import region_of, roster_of
from tests.ranks import run_ranks

TINY = Model(num_layers=8, hidden=64, ffn=128, heads=8, groups=4, head=8, vocab=1024)
TINY_TIED = Model(
    num_layers=8, hidden=64, ffn=128, heads=8, groups=4, head=8, vocab=1024, tied=True
)
TINY_PLAIN = Model(
    num_layers=8, hidden=64, ffn=256, heads=8, groups=4, head=8, vocab=1024, gated=False
)
TINY_QK = Model(
    num_layers=8, hidden=64, ffn=128, heads=8, groups=4, head=8, vocab=1024, qk_norm=True
)  # fmt: skip
TINY_GPT = Model(
    num_layers=8, hidden=64, ffn=256, heads=8, groups=4, head=8, vocab=1024, tied=True,
    gated=False, biases=True, norm_biases=True, positions=64,
)  # fmt: skip
GPT = [
    *(flag for flag in [*TIED, *LEARNED] if flag not in ("--swiglu", "--disable-bias-linear")),
]
TINY_MOE = Model(
    num_layers=8, hidden=64, ffn=128, heads=8, groups=4, head=8, vocab=1024,
    experts=Experts(count=8, ffn=48),
)  # fmt: skip
TINY_SHARED = Model(
    num_layers=8, hidden=64, ffn=128, heads=8, groups=4, head=8, vocab=1024,
    experts=Experts(count=8, ffn=48, first_layer=2, shared_ffn=32, bias=True),
)  # fmt: skip
LATENT = [
    *(flag for flag in SHARED if flag != "--group-query-attention"),
    *("--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "12", "--qk-layernorm"),
    *("--qk-head-dim", "8", "--qk-pos-emb-head-dim", "4", "--v-head-dim", "6"),
]
TINY_LATENT = Model(
    num_layers=8, hidden=64, ffn=128, heads=8, groups=8, head=8, vocab=1024,
    latent=LatentAttention(q_rank=32, kv_rank=12, qk_head=8, rope_head=4, v_head=6),
    experts=Experts(count=8, ffn=48, first_layer=2, shared_ffn=32, bias=True),
)  # fmt: skip


class Case(NamedTuple):
    """Flags of a job, the same model by its sizes, and layouts of both."""

    flags: list[str]
    model: Model
    layouts: tuple[str, ...]
    bucket_numel: int | None = None


CASES = {
    "dense": Case(
        LLAMA,
        TINY,
        ("tp2-pp2-dp3", "tp4-cp2", "pp2-vpp2-dp2-tp2", "dp4-instances2", "tp2-dp2-noopt"),
    ),
    "other rank orders": Case(LLAMA, TINY, ("tp2-pp2-dp4-order:tp.cp.ep.pp.dp",)),
    "a plain activation": Case(
        [flag for flag in LLAMA if flag != "--swiglu"], TINY_PLAIN, ("tp2-pp2-dp2",)
    ),
    "tied": Case(TIED, TINY_TIED, ("pp4-dp2", "dp2", "tp2-pp2-noopt")),
    "buckets": Case([*LLAMA, *BUCKETS], TINY, ("dp4", "tp2-pp2-dp3"), 20_000),
    "experts": Case(
        MOE,
        TINY_MOE,
        (
            *("dp8-ep8", "tp4-dp2-ep2-etp1-sp", "tp2-pp2-dp2"),
            *("tp2-dp4-ep2-etp2-sp", "dp8-ep2-instances2"),
        ),
    ),
    "some layers with experts, shared ones": Case(
        SHARED, TINY_SHARED, ("pp2-dp4-ep4", "tp2-pp2-dp2-ep2-sp", "dp4-ep2-noopt")
    ),
    "biases, learned positions": Case(
        GPT, TINY_GPT, ("tp2-pp2-dp3", "pp4-vpp2-dp2", "dp4", "tp4-noopt")
    ),
    "norms of queries and keys": Case(
        [*LLAMA, "--qk-layernorm"], TINY_QK, ("tp2-pp2-dp2", "tp4-dp2")
    ),
    "latent attention": Case(LATENT, TINY_LATENT, ("dp2-ep2", "tp2-pp2-dp2-ep2-etp1-sp")),
}  # fmt: skip


Fragment = tuple[object, ...]


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_a_synthetic_roster_is_that_of_a_real_job(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]

    def worker(rank: int) -> list[list[Counter[Fragment]]]:
        job = DryJob(case.flags)
        return [
            [
                Counter(
                    (
                        (t := one.tensors[int(one.tensor[slot])]).name.removesuffix(" buffer"),
                        t.shape,
                        tuple(t.states),
                        region_of(one, slot),
                    )
                    for slot in range(len(one))
                )
                for one in (built.fragments.roster for built in job.world(layout))
            ]
            for layout in case.layouts
        ]

    (real,) = run_ranks(1, worker)
    if case.bucket_numel is not None:
        monkeypatch.setattr("dynatrain_megatron.shapes.rosters._BUCKET_NUMEL", case.bucket_numel)
        monkeypatch.setattr("dynatrain_megatron.shapes.rosters._BUCKET_NUMEL_A_RANK", 0)
    for text, ranks in zip(case.layouts, real, strict=True):
        layout = ParallelLayout.parse(text)
        made = make_rosters(case.model, layout, overlap=case.bucket_numel is not None)
        for rank, fragments in enumerate(ranks):
            assert fragments_of(made, rank) == fragments, (text, rank)


def fragments_of(rosters: RosterSet, rank: int) -> Counter[Fragment]:
    found: Counter[Fragment] = Counter()
    roster = roster_of(rosters, rank)
    for slot, number in enumerate(roster.tensor.tolist()):
        tensor = roster.tensors[number]
        found[tensor.name, tensor.shape, tensor.states, region_of(roster, slot)] += 1
    return found


@pytest.mark.parametrize(
    ("name", "billions"),
    [("1B", 1.2), ("7B", 6.7), ("13B", 13.0), ("70B", 69.0), ("235B", 235.1), ("671B", 671.0)],
)
def test_models_have_their_published_sizes(name: str, billions: float) -> None:
    assert round(MODELS[name].numel / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("1B", "tp4-pp4-dp3"),
        ("70B", "tp8-pp4-dp8"),
        ("235B", "tp4-pp2-dp8-ep16-etp1-sp"),
        ("671B", "pp8-dp32-ep32"),
    ],
)
@pytest.mark.parametrize("weights_only", [False, True])
def test_every_element_is_held_as_often_as_it_must_be(
    model: str, layout: str, weights_only: bool
) -> None:
    shape, parsed = MODELS[model], ParallelLayout.parse(layout)
    rosters = make_rosters(shape, parsed, weights_only=weights_only, num_ranks=parsed.world + 3)
    cells = disjoint_cells(rosters)
    held = np.zeros(len(rosters.tensors), dtype=np.int64)
    np.add.at(held, cells.tensor, volumes(cells.start, cells.stop))
    assert held.tolist() == [tensor.numel for tensor in rosters.tensors]
    assert len(rosters.num_rows) == rosters.num_ranks == parsed.world + 3
    assert rosters.num_rows[-3:].tolist() == [0, 0, 0] and (rosters.num_rows[:-3] > 0).all()
    members = np.bincount(rosters.kind_of_rank)
    times = np.bincount(
        np.repeat(np.arange(len(cells)), cells.num_kinds), weights=members[cells.kind]
    )
    expected = {  # by the rules of replication
        True: {parsed.dp * parsed.cp, parsed.expert_dp, parsed.world // parsed.pp},
        False: {1, parsed.tp, 2, parsed.world // parsed.pp},
    }[weights_only]
    if shape.tied:
        expected |= {2 * times for times in expected}
    assert set(times.astype(int).tolist()) <= expected
    kinds = {state.kind for tensor in rosters.tensors for state in tensor.states}
    assert (StateKind.PARAM in kinds) == weights_only
