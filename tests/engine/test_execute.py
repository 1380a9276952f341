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
from dynatrain_megatron.planner import Plan, PlanOptions
from dynatrain_megatron.vps import LogicalTensor, Region, Roster, State, StateKind
from tests.engine.test_transport import on_threads
from tests.planner.worlds import Case, irregular_cases, mixed_cases

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


def bind(roster: Roster, *, filled: bool) -> Fragments:
    """Memory for a roster: with the values of its regions, or with others."""
    builder = FragmentsBuilder()
    for slot in range(len(roster)):
        tensor, region = roster.tensors[int(roster.tensor[slot])], roster.region(slot)
        views = []
        for k in range(len(tensor.states)):
            full = values(tensor, k)
            views.append((full if filled else full + 1)[cut(region)].clone())
        builder.add(tensor, region, views)
    return builder.build()


def move(
    case: Case, *, staging: int = 1 << 20, window_ops: int = 256
) -> tuple[Plan, list[Fragments], list[Fragments]]:
    """Plan and run a transition on threads; the source and target fragments after it."""
    source = [bind(roster, filled=True) for roster in case.before]
    target = [bind(roster, filled=False) for roster in case.after]
    plan = case.plan(options=PlanOptions(staging_bytes=staging, window_ops=window_ops))

    def body(transport: Transport) -> int:
        report = execute(
            plan, source[transport.rank], target[transport.rank], transport, timeout_s=3
        )
        assert report.peak_staging_bytes <= plan.schedule.peak_staging_bytes(transport.rank)
        assert report.peak_staging_bytes <= max(staging, 2 * 16)  # one element in each window
        return report.sent_bytes

    sent = sum(on_threads(plan.num_ranks, body))
    assert sent == plan.moved_bytes == plan.lower_bound_bytes
    return plan, source, target


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(mixed_cases(TENSORS), mixed_cases(), irregular_cases()),
    st.sampled_from([16, 100, 1 << 20]),
    st.sampled_from([1, 3, 256]),
)
def test_every_element_arrives(case: Case, staging: int, window_ops: int) -> None:
    _, source, target = move(case, staging=staging, window_ops=window_ops)
    for fragments in (*source, *target):
        roster = fragments.roster
        for slot, views in enumerate(fragments.views):
            tensor, region = roster.tensors[int(roster.tensor[slot])], roster.region(slot)
            for k, view in enumerate(views):
                assert torch.equal(view, values(tensor, k)[cut(region)]), (tensor.name, region)


@settings(max_examples=25, deadline=None)
@given(mixed_cases(TENSORS), st.data())
def test_fingerprint_does_not_depend_on_the_layout_and_sees_any_flipped_bit(
    case: Case, data: st.DataObject
) -> None:
    plan, source, target = move(case)

    def marks(transport: Transport) -> tuple[str, str]:
        before, _ = fingerprint(case.source, source[transport.rank], transport, timeout_s=3)
        after, _ = fingerprint(case.target, target[transport.rank], transport, timeout_s=3)
        check_received(plan, source[transport.rank], target[transport.rank], transport, timeout_s=3)
        return before, after

    found = on_threads(plan.num_ranks, marks)
    assert len({mark for pair in found for mark in pair}) == 1

    rank = data.draw(st.sampled_from([r for r in range(plan.num_ranks) if target[r].views]))
    slot = data.draw(st.integers(0, len(target[rank].views) - 1))
    state = data.draw(st.integers(0, len(target[rank].views[slot]) - 1))
    view = target[rank].views[slot][state]
    position = data.draw(st.integers(0, view.numel() - 1))
    bit = data.draw(st.integers(0, 8 * view.element_size() - 1))
    flip(view, position, bit)
    name = target[rank].roster.tensors[int(target[rank].roster.tensor[slot])].name

    def check(transport: Transport) -> str:
        try:
            check_received(
                plan, source[transport.rank], target[transport.rank], transport, timeout_s=3
            )
        except TransitionError as error:
            return str(error)
        return "unnoticed"

    for message in on_threads(plan.num_ranks, check):
        assert f"rank {rank}: {name}" in message


def flip(view: torch.Tensor, position: int, bit: int) -> None:
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
