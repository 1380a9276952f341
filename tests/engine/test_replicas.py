"""Replicas: equal ones pass whatever the layout, and any flipped bit is named."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from dynatrain_megatron.engine import Fragments, Transport
from dynatrain_megatron.engine.replicas import check_replicas
from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.planner.routes import replicas
from dynatrain_megatron.vps import LogicalTensor, Region, RosterBuilder, RosterSet, State, StateKind
from tests.engine.test_execute import bind, flip
from tests.engine.test_transport import on_threads
from tests.planner.worlds import Case, held, irregular_cases, mixed_cases
from tests.vps.strategies import elements


def found(rosters: RosterSet, fragments: list[Fragments]) -> str:
    """What every rank is told; the same on all of them."""

    def check(transport: Transport) -> str:
        try:
            check_replicas(rosters, fragments[transport.rank], transport, timeout_s=3)
        except SwitchRefused as error:
            return error.reason
        return ""

    (told,) = set(on_threads(rosters.num_ranks, check))
    return told


def bound(case: Case) -> tuple[RosterSet, list[Fragments]]:
    return case.source, [bind(roster, filled=True) for roster in case.before]


@settings(max_examples=40, deadline=None)
@given(st.one_of(irregular_cases(), mixed_cases()), st.data())
def test_equal_replicas_pass_and_a_flipped_bit_of_one_is_named(
    case: Case, data: st.DataObject
) -> None:
    rosters, fragments = bound(case)
    assert found(rosters, fragments) == ""

    shared = list(replicas(rosters))
    assume(shared)
    replica = data.draw(st.sampled_from(shared))
    rank = data.draw(st.sampled_from(sorted(replica.holders)))
    tensor = rosters.tensors[replica.tensor]
    state = data.draw(st.integers(0, len(tensor.states) - 1))
    view = fragments[rank].piece(replica.holders[rank], replica.start, replica.stop)[state]
    flip(view, data.draw(st.integers(0, view.numel() - 1)), data.draw(st.integers(0, 7)))
    told = found(rosters, fragments)
    assert told.startswith(f"replicas have diverged: {tensor.name} {tensor.states[state].kind}: ")
    if len(replica.holders) == 2:  # nobody knows which of two is right
        first, second = sorted(replica.holders)
        assert told.endswith(f": rank {second} differs from rank {first}")
    else:
        others = ", ".join(str(r) for r in sorted(replica.holders) if r != rank)
        assert told.endswith(f": rank {rank} differs from rank {others}")


@settings(max_examples=100, deadline=None)
@given(st.one_of(irregular_cases(), mixed_cases()))
def test_replicas_are_all_that_several_ranks_hold(case: Case) -> None:
    rosters = case.source
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for replica in replicas(rosters):
        ndim = len(rosters.tensors[replica.tensor].shape)
        start, stop = (tuple(map(int, end[:ndim])) for end in (replica.start, replica.stop))
        for at in elements(Region(start, stop)):
            assert (replica.tensor, at) not in seen
            seen.add((replica.tensor, at))
            holders = {
                rank for rank in range(rosters.num_ranks) if held(rosters, rank, replica.tensor)[at]
            }
            assert holders == set(replica.holders)
    for tensor, logical in enumerate(rosters.tensors):
        count = sum(held(rosters, rank, tensor).astype(int) for rank in range(rosters.num_ranks))
        wanted = {at for at in elements(Region.whole(logical.shape)) if count[at] > 1}
        assert wanted == {at for t, at in seen if t == tensor}


def test_the_first_few_of_many_are_named() -> None:
    tensors = [
        LogicalTensor(name, (2,), (State(StateKind.MAIN_PARAM, "float32"),)) for name in "abcde"
    ]
    builder = RosterBuilder()
    for tensor in tensors:
        builder.add(tensor, Region((0,), (2,)))
    case = Case((builder.build(),) * 3, ())
    rosters, fragments = bound(case)
    for view in fragments[2].views:
        view[0].add_(1)
    told = found(rosters, fragments)
    assert told == (
        "replicas have diverged: a main_param: rank 2 differs from rank 0, 1; "
        "b main_param: rank 2 differs from rank 0, 1; c main_param: rank 2 differs from rank 0, 1; "
        "and 2 more"
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_nothing_held_twice_is_nothing_to_compare(num_ranks: int) -> None:
    tensor = LogicalTensor("a", (3,), (State(StateKind.BUFFER, "uint8"),))
    builders = [RosterBuilder() for _ in range(num_ranks)]
    for rank, builder in enumerate(builders):
        builder.add(tensor, Region((rank,), (rank + 1,)))
    assert found(*bound(Case(tuple(b.build() for b in builders), ()))) == ""
