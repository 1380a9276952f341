"""With whom a job's store ends, and what may be announced because of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.config import Overlap, ScheduleStep
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.store import JobStore, StoreOwner, StoreServer, node_of_launch
from dynatrain_megatron.plugin.membership import Membership
from tests.plugin.announced import FOUR, Announced

RANK_0 = StoreOwner(("a",), "the store that the launch's rank 0 holds")
NODE_0 = StoreOwner(("a", "b"), "torchrun's store on the first node of the launch")


@pytest.mark.parametrize(
    ("nodes", "owners"),
    [
        (["", "", "", ""], ("a",)),
        (["0", "0", "1", "1"], ("a", "b")),
        (["0", "0", "0", "0"], FOUR),
        (["1", "0", "1", "0"], ("b", "d")),
        (["0", "", "1", "1"], ("a",)),  # some were started in another way
    ],
)
def test_owner_of_a_launch(nodes: list[str], owners: tuple[str, ...]) -> None:
    assert StoreOwner.of_launch(FOUR, nodes, parks=False).processes == owners


def test_node_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert node_of_launch() == ""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert node_of_launch() == "3"


@given(
    st.frozensets(st.sampled_from(FOUR)),
    st.frozensets(st.sampled_from(FOUR)),
    st.frozensets(st.sampled_from(FOUR)),
    st.booleans(),
)
def test_a_store_lives_while_one_of_its_owners_does(
    owners: frozenset[str], staying: frozenset[str], parking: frozenset[str], parks: bool
) -> None:
    living = staying | parking if parks else staying
    expected = not owners or any(uid in living for uid in owners)
    owner = StoreOwner(tuple(sorted(owners)), "it", parks)
    assert owner.lives_on(staying, parking=parking) == expected


def test_every_process_can_read_it() -> None:
    server = StoreServer("127.0.0.1")
    one, other = (Directory(JobStore(server.address, "job", timeout_s=5)) for _ in range(2))
    assert other.owner() == StoreOwner()
    one.own(NODE_0)
    assert other.owner() == NODE_0


def test_the_owner_stays_whoever_tells_it_to_leave(capsys: pytest.CaptureFixture[str]) -> None:
    job = Announced(RANK_0)
    assert job.after_notices("a", "c") == ("a", "b", "d")
    told = capsys.readouterr().out
    assert "a was told to leave and stays" in told
    assert "dynatrain store" in told


def test_one_of_several_owners_may_leave() -> None:
    assert Announced(NODE_0).after_notices("a") == ("b", "c", "d")
    assert Announced(NODE_0).after_notices("a", "b") == ("a", "c", "d")


def test_a_store_outside_needs_nobody() -> None:
    assert Announced(StoreOwner()).after_notices("a", "b") == ("c", "d")


def test_a_parked_owner_keeps_the_store() -> None:
    parking = StoreOwner(("a", "p"), "it", parks=True)
    assert Announced(parking, waiting=("p",)).after_notices("a") == ("b", "c", "d", "p")
    assert Announced(StoreOwner(("a",), "it", parks=True)).after_notices("a") is None


def test_a_request_that_would_end_the_store_is_refused() -> None:
    """The owner has come to lie behind the ranks that stay."""
    job = Announced(StoreOwner(("d",), "the store that the launch's rank 0 holds"))
    answer = job.asked_for(2)
    assert answer["state"] == "refused"
    assert "with it ends the store that the launch's rank 0 holds" in answer["reason"]
    assert "elastic.store=HOST:PORT of a `dynatrain store`" in answer["reason"]
    assert not job.posted
    assert Announced(RANK_0).asked_for(2)["state"] == "announced"


def test_so_is_a_step_of_the_schedule() -> None:
    job = Announced(StoreOwner(("d",), "it"))
    job.leader.post_step(ScheduleStep(2, {"world": 2}), 0)
    assert "with it ends it" in job.posted[-1].refused


def test_who_comes_takes_the_place_of_all_but_the_owner() -> None:
    assert Announced(RANK_0, waiting=("e",)).after_notices(*FOUR) == ("a", "e")


def test_who_was_taken_in_and_left_waits_no_more() -> None:
    """It has come once, and counts again when it comes again."""
    server = StoreServer("127.0.0.1")
    store = JobStore(server.address, "job", timeout_s=5)
    directory = Directory(store)
    job: Any = SimpleNamespace(processes=("a",), iteration=0)
    nothing: Any = None
    leading, later = (
        Membership(
            job, store, nothing, nothing, run_dir=Path("unused"), overlap=Overlap.off, timeout_s=5
        )
        for _ in range(2)
    )

    def waiting(membership: Membership) -> tuple[str, ...]:
        membership.arrivals += directory.arrivals(len(membership.arrivals))
        return membership.waiting()

    number = directory.arrive("j")
    assert waiting(leading) == ("j",)
    directory.withdraw_arrival(number)
    leading.taken(("j",))
    job.processes = ("a", "j")
    assert waiting(leading) == waiting(later) == ()
    job.processes = ("a",)
    assert waiting(leading) == waiting(later) == ()
    directory.arrive("j")
    assert waiting(leading) == waiting(later) == ("j",)
