"""Plans carried out on made-up states: every element must arrive, whatever the layouts."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dynatrain_megatron.engine import Fragments, FragmentsBuilder, Transport, execute
from dynatrain_megatron.engine.fingerprint import check_received, fingerprint
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner import Plan, PlanOptions, Topology, make_plan
from dynatrain_megatron.vps import (
    LogicalTensor,
    Region,
    RosterSet,
    State,
    StateKind,
    flat_range_regions,
)
from tests.engine.test_transport import on_threads

ADAM = (
    State(StateKind.MAIN_PARAM, "float32"),
    State(StateKind.EXP_AVG, "float32"),
    State(StateKind.EXP_AVG_SQ, "bfloat16"),  # another width, so that packing is not uniform
)
TENSORS = (
    LogicalTensor("embedding", (16, 6), ADAM),
    LogicalTensor("norm", (12,), ADAM),
    LogicalTensor("stack", (3, 4, 5), ADAM),
    LogicalTensor("counter", (), (State(StateKind.BUFFER, "int64"),)),
)


def values(tensor: LogicalTensor, state: int) -> torch.Tensor:
    """Distinct numbers, so that a wrong element names itself; exact in every dtype used."""
    dtype = getattr(torch, tensor.states[state].dtype)
    numbers = torch.arange(tensor.numel, dtype=torch.float32).reshape(tensor.shape)
    return (numbers % 256 if dtype == torch.bfloat16 else numbers + 1000 * state).to(dtype)


def cut(region: Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int) -> list[list[tuple[LogicalTensor, Region]]]:
    """Who holds what: flat shards, slices of a dim or replicas, drawn for each tensor."""
    held: list[list[tuple[LogicalTensor, Region]]] = [[] for _ in range(num_ranks)]
    for tensor in TENSORS:
        kind = draw(st.sampled_from(["flat", "slice", "replica", "one"]))
        if kind == "flat":
            cuts = sorted(
                draw(st.lists(st.integers(0, tensor.numel), min_size=num_ranks - 1,
                              max_size=num_ranks - 1))
            )  # fmt: skip
            bounds = [0, *cuts, tensor.numel]
            for rank in range(num_ranks):
                for region in flat_range_regions(tensor.shape, bounds[rank], bounds[rank + 1]):
                    held[rank].append((tensor, region))
        elif kind == "slice" and tensor.shape and tensor.shape[-1] >= num_ranks:
            size = tensor.shape[-1]
            for rank in range(num_ranks):
                first, last = rank * size // num_ranks, (rank + 1) * size // num_ranks
                lead = tensor.shape[:-1]
                held[rank].append(
                    (tensor, Region((*(0 for _ in lead), first), (*lead, last)))
                )  # fmt: skip
        elif kind == "one":
            held[draw(st.integers(0, num_ranks - 1))].append((tensor, Region.whole(tensor.shape)))
        else:
            for rank in range(num_ranks):
                held[rank].append((tensor, Region.whole(tensor.shape)))
    return held


def bind(held: list[tuple[LogicalTensor, Region]], *, filled: bool) -> Fragments:
    builder = FragmentsBuilder()
    for tensor, region in held:
        views = []
        for k in range(len(tensor.states)):
            full = values(tensor, k)
            views.append((full if filled else torch.full_like(full, -1))[cut(region)])
        builder.add(tensor, region, views)
    return builder.build()


def move(
    source: list[Fragments], target: list[Fragments], *, staging: int, window_ops: int
) -> tuple[Plan, RosterSet, RosterSet, int]:
    """Plan and run a transition on threads; returns the bytes really sent as well."""
    n = len(source)
    old = RosterSet.merge([f.roster for f in source], TENSORS)
    new = RosterSet.merge([f.roster for f in target], TENSORS)
    plan = make_plan(
        old, new, Topology.single_node(n), PlanOptions(staging_bytes=staging, window_ops=window_ops)
    )

    def body(transport: Transport) -> int:
        report = execute(
            plan, source[transport.rank], target[transport.rank], transport, timeout_s=3
        )
        assert report.peak_staging_bytes <= max(staging, 12)  # one element with all its states
        return report.sent_bytes

    return plan, old, new, sum(on_threads(n, body))


@settings(max_examples=60, deadline=None)
@given(
    st.data(), st.integers(2, 4), st.sampled_from([16, 100, 1 << 20]), st.sampled_from([1, 3, 256])
)
def test_every_element_arrives(
    data: st.DataObject, num_ranks: int, staging: int, window_ops: int
) -> None:
    source = [bind(held, filled=True) for held in data.draw(layouts(num_ranks))]
    wanted = data.draw(layouts(num_ranks))
    target = [bind(held, filled=False) for held in wanted]
    plan, _, _, sent = move(source, target, staging=staging, window_ops=window_ops)
    for held, fragments in zip(wanted, target, strict=True):
        for (tensor, region), views in zip(held, fragments.views, strict=True):
            for k, view in enumerate(views):
                assert torch.equal(view, values(tensor, k)[cut(region)]), (tensor.name, region)
    assert sent == plan.moved_bytes == plan.lower_bound_bytes


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_fingerprint_does_not_depend_on_the_layout_and_sees_any_flipped_bit(
    data: st.DataObject,
) -> None:
    source = [bind(held, filled=True) for held in data.draw(layouts(3))]
    target = [bind(held, filled=False) for held in data.draw(layouts(3))]
    plan, old, new, _ = move(source, target, staging=1 << 20, window_ops=256)

    def marks(transport: Transport) -> tuple[str, str]:
        before, _ = fingerprint(old, source[transport.rank], transport, timeout_s=3)
        after, _ = fingerprint(new, target[transport.rank], transport, timeout_s=3)
        check_received(plan, source[transport.rank], target[transport.rank], transport, timeout_s=3)
        return before, after

    found = on_threads(3, marks)
    assert len({mark for pair in found for mark in pair}) == 1

    rank = data.draw(st.sampled_from([r for r in range(3) if target[r].views]))
    slot = data.draw(st.integers(0, len(target[rank].views) - 1))
    state = data.draw(st.integers(0, len(target[rank].views[slot]) - 1))
    view = target[rank].views[slot][state]
    position = data.draw(st.integers(0, view.numel() - 1))
    bit = data.draw(st.integers(0, 8 * view.element_size() - 1))
    _flip(view, position, bit)
    name = target[rank].roster.tensors[int(target[rank].roster.tensor[slot])].name

    def check(transport: Transport) -> str:
        try:
            check_received(
                plan, source[transport.rank], target[transport.rank], transport, timeout_s=3
            )
        except TransitionError as error:
            return str(error)
        return "unnoticed"

    for message in on_threads(3, check):
        assert f"rank {rank}: {name}" in message


def _flip(view: torch.Tensor, position: int, bit: int) -> None:
    """Flip one bit of one element of a possibly strided view."""
    where = np.unravel_index(position, tuple(view.shape)) if view.dim() else ()
    element = view[tuple(int(i) for i in where)].reshape(1).clone()
    raw = element.view(torch.uint8)
    raw[bit // 8] ^= 1 << (bit % 8)
    view[tuple(int(i) for i in where)] = element[0]


def test_fragments_refuse_views_of_another_shape_or_dtype() -> None:
    builder = FragmentsBuilder()
    norm = TENSORS[1]
    good = [values(norm, k) for k in range(3)]
    with pytest.raises(ValueError, match="exp_avg: expected"):
        builder.add(norm, Region((0,), (12,)), [good[0], good[1][:5], good[2]])
    with pytest.raises(ValueError, match="main_param: expected"):
        builder.add(norm, Region((0,), (12,)), [good[0].half(), good[1], good[2]])
