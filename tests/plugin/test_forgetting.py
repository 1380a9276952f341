"""Keys of earlier switches go from the job's store once nobody reads them any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.store import JobStore, StoreServer
from dynatrain_megatron.plugin.membership import Membership, Pending
from dynatrain_megatron.transition.posted import Posted
from tests.plugin.members import JOINER, OTHER, OWN, membership


@pytest.fixture
def store() -> Iterator[JobStore]:
    server = StoreServer("127.0.0.1")
    yield JobStore(server.address, "a job", timeout_s=20)
    del server


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
