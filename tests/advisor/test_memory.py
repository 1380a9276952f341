"""What a rank needs: parameters and optimizer as rosters have them, activations as published."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.advisor import (
    ElementBytes,
    MemoryEstimate,
    Recompute,
    Workload,
    estimate_memory,
    feasible,
    stage_memory,
)
from dynatrain_megatron.advisor.memory import chunks_in_flight
from dynatrain_megatron.advisor.stages import pipeline_text, split_layers
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes import MODELS, Model, make_rosters
from dynatrain_megatron.shapes.models import Experts
from dynatrain_megatron.vps import RosterSet, StateKind
from dynatrain_megatron.vps.boxes import volumes

TINY = Model(num_layers=8, hidden=64, ffn=128, heads=8, groups=4, head=8, vocab=1024)


def bytes_of_ranks(rosters: RosterSet, *, buffers: bool) -> np.ndarray:
    """Bytes that each rank holds, with or without what has no optimizer. shape=[num_ranks]"""
    counted = np.array(
        [
            tensor.element_bytes if buffers or tensor.states[0].kind is not StateKind.BUFFER else 0
            for tensor in rosters.tensors
        ]
    )
    rows = rosters.rows
    kinds = int(rosters.kind_of_rank.max()) + 1
    nbytes = np.zeros(kinds, dtype=np.int64)
    np.add.at(nbytes, rows.kind, counted[rows.tensor] * volumes(rows.start, rows.stop))
    return nbytes[rosters.kind_of_rank]


def roster_bytes(model: Model, layout: ParallelLayout) -> list[tuple[int, int]]:
    """(weights, optimizer) of each stage's fullest rank."""
    stage = np.array([layout.coordinate(rank)["pp"] for rank in range(layout.world)])
    weights = bytes_of_ranks(make_rosters(model, layout, weights_only=True), buffers=True)
    optimizer = bytes_of_ranks(make_rosters(model, layout), buffers=False)
    return [
        (int(weights[stage == pp].max()), int(optimizer[stage == pp].max()))
        for pp in range(layout.pp)
    ]


def estimated_bytes(model: Model, layout: ParallelLayout) -> list[tuple[int, int]]:
    stages = (stage_memory(Workload(model=model), layout, pp) for pp in range(layout.pp))
    return [(stage.weights, stage.optimizer) for stage in stages]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("1B", "tp4-pp4-dp3"),
        ("1B", "pp2-vpp4-dp2"),
        ("1B", "pp4-vpp2-cp2-dp3-noopt"),
        ("1B", "tp2-dp6"),
        ("7B", "tp2-pp2-cp2-dp4-instances2"),
        ("70B", "tp8-pp4-dp8"),
        ("70B", "tp2-pp4-vpp5-dp3"),
        ("235B", "tp4-pp2-dp8-ep16-etp1-sp"),
        ("235B", "tp4-pp2-dp4-sp"),
        ("235B", "dp16-ep8-instances2"),
        ("671B", "dp32-ep32"),
        ("671B", "tp4-dp8-ep16-etp2-sp"),
        ("671B", "tp2-dp4-ep8-sp-etp1-noopt"),
    ],
)
def test_parameters_and_optimizer_are_those_of_the_rosters(model: str, layout: str) -> None:
    parsed = ParallelLayout.parse(layout)
    assert estimated_bytes(MODELS[model], parsed) == roster_bytes(MODELS[model], parsed)


@st.composite
def small_models(draw: st.DrawFn, step: int) -> Model:
    """Models whose sizes are multiples of ``step``."""
    heads = draw(st.sampled_from([4, 8]))
    experts = st.builds(
        Experts,
        count=st.sampled_from([4, 6]),
        ffn=st.sampled_from([step, 2 * step]),
        shared_ffn=st.sampled_from([0, step]),
        bias=st.booleans(),
    )
    return Model(
        num_layers=draw(st.sampled_from([4, 6])),
        hidden=draw(st.sampled_from([step, 3 * step])),
        ffn=draw(st.sampled_from([step, 2 * step])),
        heads=heads,
        groups=heads // 2,
        head=step,
        vocab=draw(st.sampled_from([64, 80])) * step,
        tied=draw(st.booleans()),
        gated=draw(st.booleans()),
        experts=draw(st.none() | experts),
    )


def even_layouts(model: Model, world: int) -> list[ParallelLayout]:
    """Feasible layouts of which rosters can be made."""
    found = feasible(Workload(model=model), world, gpus_per_node=world)
    return [layout for layout in found if layout.pipeline is None]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_model_of_round_sizes_is_exact(data: st.DataObject) -> None:
    model = data.draw(small_models(64))
    layouts = even_layouts(model, data.draw(st.sampled_from([4, 6, 8, 12])))
    layout = data.draw(st.sampled_from(layouts))
    layout = replace(layout, dist_opt=data.draw(st.booleans()))
    assert estimated_bytes(model, layout) == roster_bytes(model, layout)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_padding_between_parameters_is_the_most_that_is_missed(data: st.DataObject) -> None:
    model = data.draw(small_models(10))
    layout = data.draw(st.sampled_from(even_layouts(model, data.draw(st.sampled_from([4, 6, 8])))))
    num_parameters = sum(1 for _ in model.parameters()) + 1
    for (weights, optimizer), (real, sharded) in zip(
        estimated_bytes(model, layout), roster_bytes(model, layout), strict=True
    ):
        assert weights == real
        assert sharded <= optimizer <= sharded + 12 * 64 * num_parameters


def test_uneven_stages_hold_the_whole_model_once() -> None:
    model = MODELS["671B"]
    layout = ParallelLayout(pp=8, pipeline=pipeline_text(split_layers(61, 8)))
    stages = [stage_memory(Workload(model=model), layout, pp) for pp in range(8)]
    buffers = 4 * sum(p.numel for p in model.parameters() if p.buffer)
    assert sum(stage.weights for stage in stages) == 2 * model.numel + buffers
    assert sum(stage.optimizer for stage in stages) == 12 * model.numel


def test_what_an_element_takes_follows_from_the_precision() -> None:
    layout = ParallelLayout(dp=4)
    numel = TINY.numel
    single = ElementBytes(param=4, grad=4, optimizer=8)
    found = estimate_memory(Workload(model=TINY, element_bytes=single), layout)
    assert (found.weights, found.grads) == (4 * numel, 4 * numel)
    assert found.optimizer == 8 * (-(-numel // 128) * 128 // 4)  # the buffer is padded to 128


# ---------------------------------------------------------------- activations


def activations(layout: str, **changes: object) -> int:
    workload = replace(Workload(model=TINY, seq_length=128, global_batch_size=16), **changes)  # type: ignore[arg-type]
    parsed = ParallelLayout.parse(layout)
    return max(stage_memory(workload, parsed, pp).activations for pp in range(parsed.pp))


LAYER = 4 * 64 + (2 * 8 + 2 * 4) * 8 + 3 * 128  # elements a token: norms, attention, MLP
LOGITS = 1024 * (2 + 4)


def test_activations_by_hand() -> None:
    assert activations("dp1") == 128 * (2 * 8 * LAYER + LOGITS)
    assert activations("dp4-mbs2") == 2 * activations("dp1")
    assert activations("cp2") == activations("dp1") // 2
    assert activations("tp2-sp") == activations("dp1") // 2
    norms = 4 * 64
    assert activations("tp2") == 128 * (2 * 8 * (norms + (LAYER - norms) // 2) + LOGITS // 2)
    inputs = 8 * 64
    assert activations("dp1", recompute=Recompute.full) == 128 * (2 * (inputs + LAYER) + LOGITS)


def test_plain_layers_keep_what_the_literature_says() -> None:
    # 34 s·b·h bytes a layer (Korthikanti et al., 2022), of which 2 are masks of dropout, and
    # 5 a·s²·b for the scores.
    model = Model(
        num_layers=1, hidden=512, ffn=2048, heads=8, groups=8, head=64, vocab=64, gated=False
    )
    seq = 256
    workload = Workload(model=model, seq_length=seq)
    one = ParallelLayout()
    logits = seq * 64 * 6
    fused = estimate_memory(workload, one).activations - logits
    assert fused == 32 * seq * 512
    unfused = replace(workload, keeps_scores=True)
    assert estimate_memory(unfused, one).activations - logits == fused + 5 * 8 * seq * seq
    again = replace(unfused, recompute=Recompute.selective)
    assert estimate_memory(again, one).activations - logits == fused


def test_experts_keep_what_is_routed_to_them() -> None:
    model = replace(TINY, experts=Experts(count=8, ffn=48, topk=2, shared_ffn=32))
    layer = LAYER - 3 * 128 + 2 * (2 * 64 + 3 * 48) + 3 * 32
    assert activations("dp8-ep8", model=model) == 128 * (2 * 8 * layer + LOGITS)
    # Ranks that share an expert each see the tokens of all of them.
    layer += 2 * 2 * 64
    assert activations("dp8-ep2-etp2", model=model) == 128 * (2 * 8 * layer + LOGITS)


@pytest.mark.parametrize(
    ("layout", "num_microbatches", "expected"),
    [
        ("pp4", 16, [4, 3, 2, 1]),
        ("pp4", 2, [2, 2, 2, 1]),
        ("pp4-vpp2", 16, [11, 9, 7, 5]),
        ("pp4-vpp2", 4, [8, 8, 7, 5]),
        ("dp4", 16, [1]),
    ],
)
def test_micro_batches_in_flight(layout: str, num_microbatches: int, expected: list[int]) -> None:
    parsed = ParallelLayout.parse(layout)
    assert [chunks_in_flight(parsed, pp, num_microbatches) for pp in range(parsed.pp)] == expected


def test_the_fullest_stage_is_told() -> None:
    workload = Workload(model=TINY, seq_length=128, global_batch_size=64)
    found = estimate_memory(workload, ParallelLayout(pp=4))
    stages = [stage_memory(workload, ParallelLayout(pp=4), pp) for pp in range(4)]
    assert found == stages[0] and found.total == max(stage.total for stage in stages)
    assert isinstance(found, MemoryEstimate) and stages[0].activations > stages[2].activations
