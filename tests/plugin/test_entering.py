"""A process that joins enters the switch when the job stands still, and not before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, TimeoutError

import pytest

from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.store import JobStore, StoreServer
from dynatrain_megatron.plugin.membership import Membership, Pending
from dynatrain_megatron.transition.posted import Posted
from tests.plugin.members import OTHER, OWN, membership

CHANGE = Change(1, (OTHER,), (OTHER, OWN), bridge_id=1, world_id=2)


def test_it_waits_for_the_checkpoint_of_those_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "prepare", lambda self, pending: None)
    server = StoreServer("127.0.0.1")
    member = membership(JobStore(server.address, "a job", timeout_s=20), timeout_s=60)
    member.pending = pending = Pending(Posted(CHANGE, "tp2"))
    with ThreadPoolExecutor(1) as threads:
        called = threads.submit(member.wait_for_call)
        member.board.stop(1, 7)
        with pytest.raises(TimeoutError):  # the boundary is known, and they save there
            called.result(0.5)
        member.board.say_stopped(1)
        assert called.result(10) is pending
