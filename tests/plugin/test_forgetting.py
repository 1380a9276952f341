"""Keys of earlier switches go from the job's store once nobody reads them any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynatrain_megatron.config import EngineTransport, Overlap
from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.store import JobStore, StoreServer
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.plugin.membership import Membership, Pending
from dynatrain_megatron.transition.posted import Posted
from dynatrain_megatron.transition.prepare import Wire

OWN, OTHER, JOINER = process_uid(), "other", "joiner"


@pytest.fixture
def store() -> Iterator[JobStore]:
    server = StoreServer("127.0.0.1")
    yield JobStore(server.address, "a job", timeout_s=20)
    del server


def membership(store: JobStore, *, timeout_s: float) -> Membership:
    """That of rank 0 in a job of two processes, without its thread."""
    job: Any = SimpleNamespace(
        processes=(OWN, OTHER), built=object(), num_changes=0, iteration=1, layout="dp2", secret=""
    )
    wire = Wire(EngineTransport.torch, 1 << 20, 20.0)
    return Membership(
        job,
        store,
        _no_check,
        wire,
        run_dir=Path("unused"),
        overlap=Overlap.off,
        timeout_s=timeout_s,
    )


def _no_check(posted: Posted) -> Any:
    raise AssertionError(posted)


def made(member: Membership, number: int, source: list[str], target: list[str]) -> Change:
    """A switch that was announced, gone through, and concluded."""
    change = Change(number, tuple(source), tuple(target), 2 * number, 2 * number + 1)
    member.board.post(Posted(change, "tp2"))
    member.board.ready(change)
    member.board.hold(change, 7)
    member.board.stop(number, 7)
    member.conclude(Pending(Posted(change, "tp2")))
    return change


def numbers_in(store: JobStore) -> set[int]:
    keys = [key.split("/") for key in store.here().list_keys()]
    return {int(parts[1]) for parts in keys if parts[0] == "switch" and parts[1].isdecimal()}


def test_all_of_a_switch_goes_once_all_its_processes_made_a_later_one(store: JobStore) -> None:
    member = membership(store, timeout_s=60)
    both = [OWN, OTHER]
    for number in (1, 2, 3):
        change = made(member, number, both, both)
    member.forget_before(change)
    assert numbers_in(store) == {1, 2, 3}  # what is due is done by the thread
    member._tick()
    assert numbers_in(store) == {3}
    assert member.board.latest() == 3


def test_who_missed_the_later_switch_has_time_to_read_the_earlier(store: JobStore) -> None:
    both = [OWN, OTHER]
    patient, hasty = (membership(store, timeout_s=timeout_s) for timeout_s in (60, 0))
    for member, left in ((patient, {1, 2}), (hasty, {2})):
        made(member, 1, both, [*both, JOINER])
        member.forget_before(made(member, 2, both, both))
        member._tick()
        assert numbers_in(store) == left


def test_it_is_the_first_process_that_stays_which_forgets(store: JobStore) -> None:
    member = membership(store, timeout_s=60)
    both = [OTHER, OWN]
    made(member, 1, both, both)
    member.forget_before(made(member, 2, both, both))
    member._tick()
    assert numbers_in(store) == {1, 2}
    made(member, 3, both, both)
    member.forget_before(made(member, 4, both, [OWN]))
    member._tick()
    assert numbers_in(store) == {1, 4}  # the first one was the other's to forget
