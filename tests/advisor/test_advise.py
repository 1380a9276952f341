"""Which layouts there are, in which order, and what decides it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.advisor import AXES, Machine, Workload, advise, feasible, judge
from dynatrain_megatron.advisor.cost import predict_step
from dynatrain_megatron.advisor.stages import pipeline_text, split_layers
from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes import MODELS
from tests.layout.every import layouts

GIB = 1 << 30
LLAMA = Workload(model=MODELS["7B"], global_batch_size=512)
MOE = Workload(model=MODELS["235B"], global_batch_size=1024)


def texts(found: object) -> set[str]:
    return {str(layout) for layout in found}  # type: ignore[attr-defined]


# ---------------------------------------------------------------- feasible


@pytest.mark.parametrize("world", [1, 8, 12, 16])
def test_every_layout_that_the_rules_allow_and_no_other(world: int) -> None:
    expected = set()
    for layout in layouts(world, ("tp", "pp", "cp", "dp")):
        if layout.tp > 8 or 8 % layout.tp or layout.pp > 32:
            continue
        spread = replace(layout, sp=layout.tp > 1)
        if 32 % layout.pp:
            spread = replace(spread, pipeline=pipeline_text(split_layers(32, layout.pp)))
        try:
            spread.check(LLAMA.shape)
        except LayoutError:
            continue
        expected.add(str(spread))
    found = list(feasible(LLAMA, world, gpus_per_node=8, axes=("tp", "pp", "cp")))
    assert len(found) == len(expected) > 0 and texts(found) == expected


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(1, 96),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([None, 96, 512]),
    st.sets(st.sampled_from(AXES)),
)
def test_what_is_feasible_is_valid_and_told_once(
    name: str, world: int, node: int, batch: int | None, axes: set[str]
) -> None:
    workload = Workload(model=MODELS[name], global_batch_size=batch)
    found = list(feasible(workload, world, gpus_per_node=node, axes=axes))
    assert len(set(found)) == len(found)
    for layout in found:
        layout.check(workload.shape)
        assert layout.world == world and node % layout.tp == 0 and node % layout.expert_tp == 0
        assert ParallelLayout.parse(str(layout)) == layout
        fixed = {axis for axis in ("tp", "pp", "cp", "ep") if axis not in axes}
        assert all(getattr(layout, axis) == 1 for axis in fixed)
        assert layout.vpp is None or (
            "vpp" in axes and workload.num_microbatches(layout) % layout.pp == 0
        )


def test_what_is_not_varied_is_the_bases() -> None:
    base = ParallelLayout.parse("tp2-pp2-vpp2-cp2-sp-mbs2-noopt")
    found = list(feasible(LLAMA, 16, gpus_per_node=8, base=base, axes=("tp",)))
    assert texts(found) == {
        "pp2-vpp2-cp2-dp4-noopt-mbs2",
        "tp2-pp2-vpp2-cp2-dp2-sp-noopt-mbs2",
        "tp4-pp2-vpp2-cp2-sp-noopt-mbs2",
    }
    # Two chunks a stage do not divide 32 layers on 32 stages: one has to do.
    found = list(
        feasible(LLAMA, 32, gpus_per_node=8, base=ParallelLayout(pp=2, vpp=2), axes=("pp",))
    )
    assert {layout.pp: layout.vpp for layout in found}[32] is None


def test_sequence_parallelism_is_as_launched_unless_experts_need_it() -> None:
    without = ParallelLayout(tp=2)
    dense = list(feasible(LLAMA, 8, gpus_per_node=8, base=without))
    assert not any(layout.sp for layout in dense)
    experts = feasible(MOE, 8, gpus_per_node=8, base=without)
    assert all(layout.sp == (layout.tp > 1) for layout in experts)


def test_no_axis_of_another_name() -> None:
    with pytest.raises(LayoutError, match=r"axis 'ttp' cannot be varied \(did you mean 'tp'\?\)"):
        list(feasible(LLAMA, 8, gpus_per_node=8, axes=("ttp",)))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts", "text"),
    [
        (6, 4, [1, 2, 2, 1], "Et|t*2|t*2|tL"),
        (7, 4, [2, 2, 2, 1], "Et*2|t*2|t*2|tL"),
        (61, 4, [15, 15, 16, 15], "Et*15|t*15|t*16|t*15L"),
        (3, 2, [2, 1], "Et*2|tL"),
        (5, 1, [5], "Et*5L"),
        (9, 8, [1, 1, 1, 1, 1, 1, 2, 1], "Et|(t|)*5t*2|tL"),
        (13, 8, [1, 1, 2, 2, 2, 2, 2, 1], "Et|t|(t*2|)*5tL"),
    ],
)
def test_layers_that_do_not_divide(
    num_layers: int, num_stages: int, counts: list[int], text: str
) -> None:
    found = split_layers(num_layers, num_stages)
    assert (found, sum(found)) == (counts, num_layers)
    assert pipeline_text(found) == text


@pytest.mark.host
def test_megatron_reads_the_pipelines() -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    for num_layers, pp, vpp in ((61, 4, 1), (94, 8, 1), (5, 5, 1), (14, 4, 2), (23, 2, 3)):
        counts = split_layers(num_layers, pp * vpp)
        read = PipelineParallelLayerLayout(pipeline_text(counts), pp)
        read.validate_layer_layout(num_layers, 0)
        assert counts == [
            read.layout[stage][chunk].count(LayerType.decoder)
            for chunk in range(vpp)
            for stage in range(pp)
        ]


def test_a_launch_that_places_layers_itself_is_overruled_in_words() -> None:
    workload = replace(LLAMA, uneven_pipeline=True)
    found = list(feasible(workload, 8, gpus_per_node=8))
    assert all((layout.pipeline is None) == (layout.pp == 1) for layout in found)


# ---------------------------------------------------------------- order


def test_what_fits_is_first_and_in_order() -> None:
    machine = Machine(memory_bytes=80 * GIB)
    found = advise(Workload(model=MODELS["70B"], global_batch_size=1024), 64, machine)
    assert machine.usable_bytes is not None
    assert all(one.memory.total <= machine.usable_bytes for one in found.fitting)
    assert all(one.memory.total > machine.usable_bytes for one in found.too_large)
    scores = [one.score for one in found.fitting]
    assert scores == sorted(scores) and len(scores) > 10
    sizes = [one.memory.total for one in found.too_large]
    assert sizes == sorted(sizes) and len(sizes) > 10
    every = advise(Workload(model=MODELS["70B"], global_batch_size=1024), 64, Machine())
    assert len(every.fitting) == len(scores) + len(sizes) and not every.too_large


def test_a_small_model_is_only_replicated_and_a_large_one_is_cut() -> None:
    machine = Machine(memory_bytes=80 * GIB)
    small = advise(Workload(model=MODELS["1B"], global_batch_size=512), 16, machine).fitting[0]
    assert str(small.layout) == "dp16"
    large = advise(Workload(model=MODELS["70B"], global_batch_size=1024), 64, machine).fitting[0]
    assert large.layout.tp * large.layout.pp >= 8 and large.layout.tp <= 8
    experts = advise(MOE, 128, machine).fitting[0].layout
    assert experts.ep > 1


def test_little_room_costs_at_most_a_tenth() -> None:
    layout = ParallelLayout(tp=8, dp=1, sp=True)
    free = judge(LLAMA, layout, Machine())
    scores = [
        judge(LLAMA, layout, Machine(memory_bytes=gib * GIB)).score / free.score
        for gib in (1, 20, 26, 200)
    ]
    assert scores[0] == pytest.approx(1.1) and scores[-1] == 1
    assert scores == sorted(scores, reverse=True)


def test_the_same_question_has_the_same_answer() -> None:
    one, other = (advise(MOE, 24, Machine(memory_bytes=141 * GIB)) for _ in range(2))
    assert one == other


# ---------------------------------------------------------------- time


def cost(
    layout: str, workload: Workload = LLAMA, latency_s: float = 0, **machine: float
) -> dict[str, float]:
    step = predict_step(
        workload, ParallelLayout.parse(layout), Machine(latency_s=latency_s, **machine)
    )  # type: ignore[arg-type]
    return {
        name: getattr(step, name) for name in ("compute", "bubble", "tp", "cp", "ep", "pp", "dp")
    }


def test_compute_is_six_operations_a_parameter_and_token() -> None:
    found = cost("dp8", tflops=100.0)
    tokens = 512 * 4096 / 8
    model = MODELS["7B"]
    matmuls = model.numel - model.vocab * model.hidden  # looking embeddings up costs nothing
    scores = 6 * model.num_layers * model.heads * model.head * 4096
    assert found["compute"] == pytest.approx(tokens * (6 * matmuls + scores) / 100e12, rel=1e-3)


def test_few_tokens_leave_a_gpu_waiting_for_its_memory() -> None:
    short = replace(LLAMA, seq_length=16)
    found = cost("dp8", short, tflops=1e6, memory_gb_s=1000.0)
    model = MODELS["7B"]
    moved = (model.numel - model.vocab * model.hidden) * (2 * 2 + 2 * 4)
    assert found["compute"] == pytest.approx(512 / 8 * moved / 1e12, rel=1e-3)


def test_the_bubble_is_that_of_the_schedule() -> None:
    plain, chunks = cost("pp4-dp2"), cost("pp4-vpp4-dp2")
    m = 512 / 2
    assert plain["bubble"] == pytest.approx(plain["compute"] * 3 / m)
    assert chunks["bubble"] == pytest.approx(plain["bubble"] / 4)
    assert chunks["pp"] == pytest.approx(4 * plain["pp"])
    assert cost("dp8")["bubble"] == cost("dp8")["pp"] == 0


def test_traffic_by_hand() -> None:
    hidden = 4096 * 4096 * 2  # bytes of a micro-batch's hidden states
    m, near, far = 512, 200e9, 25e9
    found = cost("tp8-sp")
    assert found["tp"] == pytest.approx(m * 32 * 4 * 2 * 7 / 8 * hidden / near)
    assert found["cp"] == found["ep"] == found["pp"] == found["dp"] == 0
    # One ring over two nodes of eight: its bytes leave a node by eight ways out.
    replicas = cost("dp16")
    volume = 15 / 16 * MODELS["7B"].numel * 6
    assert replicas["dp"] == pytest.approx(max(volume / near, volume / far / 8))
    assert cost("dp8")["dp"] < cost("tp2-dp8-sp")["dp"] * 2
    pieces = cost("cp8")
    assert pieces["cp"] == pytest.approx(m * 32 * 3 * 7 * (4096 / 8 * 2 * 4096 * 2) / near)


def test_every_exchange_takes_its_latency() -> None:
    without, slow = cost("tp2-pp2-cp2-sp"), cost("tp2-pp2-cp2-sp", latency_s=1.0)
    more = {name: slow[name] - without[name] for name in slow}
    m, layers = 512, 16
    assert more["tp"] == pytest.approx(m * layers * 4) and more["cp"] == pytest.approx(
        m * layers * 3
    )
    assert more["bubble"] == pytest.approx(layers * 7) and more["pp"] == pytest.approx(m * 2)
    assert more["dp"] == pytest.approx(1) and more["compute"] == more["ep"] == 0


def test_experts_far_apart_cost_more_than_near_ones() -> None:
    near, far = (cost(f"dp64-ep{ep}", MOE)["ep"] for ep in (8, 64))
    assert far > 3 * near > 0
    assert cost("dp64", MOE)["ep"] == 0
    assert cost("tp4-dp16-ep8-sp", MOE)["tp"] > cost("tp4-dp16-ep8-etp1-sp", MOE)["tp"]


def test_a_thousand_gpus_take_seconds_at_most() -> None:
    begin = time.perf_counter()
    found = advise(Workload(model=MODELS["671B"]), 2048, Machine(memory_bytes=80 * GIB))
    assert found.fitting and time.perf_counter() - begin < 30
