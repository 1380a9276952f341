"""A process that joins enters the switch when the job stands still, and not before."""

from __future__ import annotations

import threading

import pytest

from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.store import JobStore, StoreServer
from dynatrain_megatron.errors import WorldError
from dynatrain_megatron.plugin.membership import Membership, Pending
from dynatrain_megatron.transition.attempt import Attempt
from dynatrain_megatron.transition.posted import Posted
from tests.plugin.members import OTHER, OWN, membership

CHANGE = Change(1, (OTHER,), (OTHER, OWN), bridge_id=1, world_id=2)


def test_it_waits_for_the_checkpoint_of_those_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "prepare", lambda self, pending: None)
    server = StoreServer("127.0.0.1")
    member = membership(JobStore(server.address, "a job", timeout_s=20), timeout_s=60)
    member.pending = pending = Pending(Posted(CHANGE, "tp2"))
    called: list[Pending] = []
    waiting = threading.Thread(target=lambda: called.append(member.wait_for_call()), daemon=True)
    waiting.start()
    member.board.stop(1, 7)
    waiting.join(0.5)
    assert not called  # the boundary is known, and they save there
    member.board.say_stopped(1)
    waiting.join(10)
    assert called == [pending]


def test_it_waits_no_longer_where_the_others_have_called_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up: list[Pending] = []

    def give_up(self: Membership, pending: Pending) -> None:
        given_up.append(pending)
        raise WorldError("the job has ended")  # so that nobody waits for the next

    monkeypatch.setattr(Membership, "prepare", lambda self, pending: None)
    monkeypatch.setattr(Membership, "give_up", give_up)
    server = StoreServer("127.0.0.1")
    store = JobStore(server.address, "a job", timeout_s=20)
    member = membership(store, timeout_s=60)
    member.pending = pending = Pending(Posted(CHANGE, "tp2"))
    member.board.stop(1, 7)
    Attempt(store, CHANGE, OTHER).abort("no memory")
    with pytest.raises(WorldError, match="has ended"):
        member.wait_for_call()
    assert given_up == [pending]
