"""Finished stages run backwards: every bit is where it was, and the target's memory is gone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dynatrain_megatron.config import Verify
from dynatrain_megatron.engine import Transport
from dynatrain_megatron.engine.memory import free
from dynatrain_megatron.planner import PlanOptions, Topology
from dynatrain_megatron.planner.stages import Room, choose_stages
from dynatrain_megatron.transition.undo import move_back
from tests.engine.test_execute import assert_holds_its_values
from tests.engine.test_transport import on_threads
from tests.transition.test_move import TENSORS, Case, jobs, mixed_cases


@settings(max_examples=20, deadline=None)
@given(
    mixed_cases(TENSORS),
    st.booleans(),
    st.sampled_from([Verify.off, Verify.messages, Verify.fingerprint]),
    st.sampled_from([16, 100, 1 << 20]),
    st.data(),
)
def test_what_was_freed_is_back(
    case: Case, shared: bool, verify: Verify, staging: int, data: st.DataObject
) -> None:
    """``shared`` storages have fragments of several stages, of which only some are finished."""
    rosters, size = (case.source, case.target), case.source.num_ranks
    stages = choose_stages(*rosters, Room.none(size))
    assume(stages.count > 1)
    finished = data.draw(st.integers(1, stages.count))
    made = jobs(case, stages, staging, frees=True, shared=shared)

    def body(transport: Transport) -> None:
        move = made[transport.rank].move
        move.plan = replace(move.plan, plans=move.plan.plans[:finished])
        move.run(rosters, transport, verify=verify, timeout_s=5)
        assert move.finished == finished
        if finished == stages.count:
            assert not any(storage.nbytes() for storage in move.old.storages)
        topology, options = Topology.single_node(size), PlanOptions(staging_bytes=staging)
        move_back(move, rosters, finished, transport, topology, options, verify=verify, timeout_s=5)

    on_threads(size, body)
    for old, new, _ in made:
        assert_holds_its_values(old.holdings.fragments)
        free(new.holdings.storages)  # of stages that never were
