"""State moved in stages on threads: all arrives, sources are gone, the ledger is the plan."""

from __future__ import annotations

import threading
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dynatrain_megatron.config import KeepSource, Verify
from dynatrain_megatron.engine import Fragments, FragmentsBuilder, Transport
from dynatrain_megatron.engine.memory import Ledger, free, storage_sizes
from dynatrain_megatron.errors import SwitchRefused, TransitionError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions, Topology
from dynatrain_megatron.planner.staged import make_staged_plan
from dynatrain_megatron.planner.stages import (
    Room,
    Stages,
    choose_stages,
    one_stage,
    planned_peak,
)
from dynatrain_megatron.transition import move as moving
from dynatrain_megatron.transition.keep import Free, decide
from dynatrain_megatron.transition.move import Move
from dynatrain_megatron.vps import Roster
from tests.engine.test_execute import TENSORS, assert_holds_its_values, bind
from tests.engine.test_transport import on_threads
from tests.planner.worlds import Case, Model, layout_case, mixed_cases, region_of
from tests.transition.sides import Side


def flat(roster: Roster, *, filled: bool) -> Fragments:
    """First states in one flat buffer with padding, as float32 parameters are; the others apart."""
    apart = bind(roster, filled=filled)
    firsts = [views[0].nbytes + -views[0].nbytes % 8 for views in apart.views]
    buffer = torch.zeros(sum(firsts) + 64, dtype=torch.uint8)
    builder, offset = FragmentsBuilder(), 0
    for slot, (views, nbytes) in enumerate(zip(apart.views, firsts, strict=True)):
        place = buffer[offset:][: views[0].nbytes].view(views[0].dtype).view(views[0].shape)
        offset += nbytes
        first = place.copy_(views[0])
        tensor = roster.tensors[int(roster.tensor[slot])]
        builder.add(tensor, region_of(roster, slot), [first, *views[1:]])
    return builder.build()


class Job(NamedTuple):
    """One rank's part in a switch."""

    old: Side
    new: Side
    move: Move


def jobs(case: Case, found: Stages, staging: int, *, frees: bool, shared: bool) -> list[Job]:
    topology = Topology.single_node(case.source.num_ranks)
    plan = make_staged_plan(
        case.source, case.target, found, topology, PlanOptions(staging_bytes=staging)
    )
    make, made = flat if shared else bind, []
    for before, after in zip(case.before, case.after, strict=True):
        old = Side.of(make(before, filled=True), there=True)
        new = Side.of(make(after, filled=False), there=False)
        ledger = Ledger([*old.tensors, *new.tensors])
        move = Move(plan, old.holdings, new.holdings, ledger, frees, lambda: None)
        made.append(Job(old, new, move))
    return made


@settings(max_examples=40, deadline=None)
@given(
    mixed_cases(TENSORS),
    *[st.booleans()] * 2,
    st.sampled_from([Verify.off, Verify.messages, Verify.fingerprint]),
    st.sampled_from([16, 100, 1 << 20]),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_all_arrives_and_the_ledger_is_the_plan(
    case: Case, frees: bool, shared: bool, verify: Verify, staging: int, hosts: list[int]
) -> None:
    rosters, size = (case.source, case.target), case.source.num_ranks
    found = choose_stages(*rosters, Room.none(size)) if frees else one_stage(*rosters)
    made = jobs(case, found, staging, frees=frees, shared=shared)

    def body(transport: Transport) -> None:
        old, new, move = made[transport.rank]
        free([old.gradients])
        largest = max(new.missing.nbytes(storage) for storage in new.missing.storages)
        move.ledger.mark(largest)
        move.run(rosters, transport, verify=verify, timeout_s=5)
        move.rebuild_begins()
        kept = [*old.holdings.storages, *old.holdings.rebuilt]
        assert all(bool(storage.nbytes()) != frees for storage in kept)
        free(kept)
        new.missing.restore_one(new.gradients, zeros=True)
        move.ledger.mark()

    on_threads(size, body, hosts)
    for rank, (old, new, move) in enumerate(made):
        assert_holds_its_values(new.holdings.fragments)
        assert sum(storage_sizes(new.tensors).values()) == new.missing.bytes
        plan = move.planned(rosters, rank)
        taken = np.array([report.peak_staging_bytes for report in move.reports])
        stages = move.plan.stages
        exact = planned_peak(
            old.holdings.memory(
                old.holdings.stages(stages.source[rosters[0].rows_of(rank)], last=True)
            ),
            new.holdings.memory(
                new.holdings.stages(stages.target[rosters[1].rows_of(rank)], last=False)
            ),
            taken,
            frees=frees,
        )
        assert move.ledger.peak_extra_bytes == exact.extra <= plan.extra


def test_nothing_is_freed_where_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank finds a difference in the second stage: the first is gone, the others stay."""
    case = layout_case(ParallelLayout(pp=2), ParallelLayout(tp=2), Model(layers=4))
    found = choose_stages(case.source, case.target, Room.none(2))
    assert found.count > 2
    made = jobs(case, found, 1 << 20, frees=True, shared=False)
    real, lock, calls = moving.check_received, threading.Lock(), []

    def check(*args: object, **kwargs: float) -> None:
        with lock:
            calls.append(1)
            failing = len(calls) > 2
        if failing:
            raise TransitionError("made to fail")
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(moving, "check_received", check)

    def body(transport: Transport) -> str:
        try:
            made[transport.rank].move.run(
                (case.source, case.target), transport, verify=Verify.fingerprint, timeout_s=5
            )
        except TransitionError as error:
            return str(error)
        return ""

    assert on_threads(2, body) == ["made to fail"] * 2
    for rank, (old, _, _) in enumerate(made):
        for slot, stage in enumerate(found.source[case.source.rows_of(rank)].tolist()):
            for view in old.holdings.fragments.views[slot]:
                assert bool(view.untyped_storage().nbytes()) == (stage > 0)


# ---------------------------------------------------------------------- the decision

KIB = 1 << 10


def decided(
    wanted: KeepSource, has: list[int], pools: list[str] | None = None
) -> list[tuple[KeepSource, int] | str]:
    """What each rank of a job comes to, given the bytes that each finds free."""
    case = layout_case(ParallelLayout(pp=2), ParallelLayout(tp=2), Model(layers=4))
    made = jobs(case, one_stage(case.source, case.target), 64, frees=False, shared=False)

    def body(transport: Transport) -> tuple[KeepSource, int] | str:
        rank = transport.rank
        try:
            kept, stages = decide(
                wanted,
                (case.source, case.target),
                made[rank].old.holdings,
                made[rank].new.holdings,
                Free("here" if pools is None else pools[rank], has[rank]),
                transport,
                staging_bytes=64,
                timeout_s=5,
            )
        except SwitchRefused as refusal:
            return str(refusal)
        return kept, stages.count

    return on_threads(2, body)


def test_the_old_state_is_kept_where_every_rank_has_the_memory() -> None:
    slack = 16 << 20
    needs = 100 * KIB
    assert decided(KeepSource.always, [0, 0]) == [(KeepSource.always, 1)] * 2
    assert all(
        isinstance(found, tuple) and found[0] is KeepSource.never and found[1] > 1
        for found in decided(KeepSource.never, [1 << 40] * 2)
    )
    enough = 2 * (slack + needs)
    assert decided(KeepSource.auto, [enough] * 2) == [(KeepSource.always, 1)] * 2
    # One rank that is short decides for all; ranks of one pool share what is there.
    found = decided(KeepSource.auto, [enough, 2 * slack + KIB])
    assert found[0] == found[1] and found[0][0] is KeepSource.never
    alone = decided(KeepSource.auto, [slack + needs] * 2, ["one GPU", "another"])
    assert alone == [(KeepSource.always, 1)] * 2


def test_a_switch_for_which_there_is_no_memory_at_all_is_refused_on_all_ranks() -> None:
    refusals = decided(KeepSource.auto, [1 << 40, 100], ["one GPU", "another"])
    for refusal in refusals:
        assert "engine.keep_source=auto: ranks [1] take" in str(refusal)
        assert "another has 0 MiB free" in str(refusal)
    assert refusals[0] == refusals[1]
