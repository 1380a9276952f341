"""How a switch is decided: one outcome for all, and nobody goes back who may have committed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.store import JobStore, StoreServer
from dynatrain_megatron.errors import SwitchAborted, TransitionError, WorldError
from dynatrain_megatron.transition import attempt as module
from dynatrain_megatron.transition.attempt import Attempt, named
from dynatrain_megatron.whereabouts import Place, to_text

CHANGE = Change(1, ("a", "b"), ("b", "c"), bridge_id=1, world_id=2)


@pytest.fixture
def attempts() -> Iterator[dict[str, Attempt]]:
    """The attempt as each of its processes sees it."""
    server = StoreServer("127.0.0.1")
    store = JobStore(server.address, "job", timeout_s=5)
    yield {uid: Attempt(store, CHANGE, uid) for uid in CHANGE.processes}


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, in threads of their own: each has its own client."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def is_at(attempt: Attempt, uid: str, place: Place) -> None:
    """``uid`` has told so with its last sign of life."""
    Directory(attempt._store).beat(uid, to_text(1, place))


def vote(attempt: Attempt) -> Callable[[], None]:
    return lambda: attempt.vote(timeout_s=5)


def test_all_commit_when_all_have_voted(attempts: dict[str, Attempt]) -> None:
    assert at_once(*(vote(each) for each in attempts.values())) == [None] * 3
    assert not any(each.in_doubt or each.is_aborted for each in attempts.values())


def test_one_that_fails_keeps_all_from_committing(attempts: dict[str, Attempt]) -> None:
    a, b, c = attempts.values()
    found = at_once(vote(a), vote(b), lambda: c.abort("no  room\n here"))
    assert found[2] == "c: no room here"
    assert [(type(each), str(each)) for each in found[:2]] == [(SwitchAborted, found[2])] * 2
    assert b.abort("too late") == found[2]  # the first that is written stands
    assert a.is_aborted and not a.in_doubt


def test_who_waits_in_vain_calls_it_off(attempts: dict[str, Attempt]) -> None:
    is_at(attempts["a"], "a", Place("vote", "the others' votes"))
    is_at(attempts["a"], "b", Place("verify", "rank 1: all-gather"))
    is_at(attempts["a"], "c", Place("unpack", since=time.monotonic() - 9))
    told = r"^not come so far: c \(rank 2\), last heard of in phase unpack, at work for 9\.\d s; "
    with pytest.raises(SwitchAborted, match=f"{told}a waited 0.2 s for the others' votes"):
        attempts["a"].vote(timeout_s=0.2)
    with pytest.raises(SwitchAborted, match=told):  # the same for all
        attempts["b"].vote(timeout_s=5)


def test_an_outcome_that_cannot_be_read_is_nobody_s_to_guess(
    attempts: dict[str, Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> bool:
        raise WorldError("the store is gone")

    monkeypatch.setattr(attempts["a"], "_waited", lost)
    with pytest.raises(TransitionError, match="others may have committed"):
        attempts["a"].vote(timeout_s=5)
    assert attempts["a"].in_doubt


def test_the_roll_names_who_is_not_back(attempts: dict[str, Attempt]) -> None:
    is_at(attempts["a"], "b", Place("wire", since=time.monotonic() - 7))
    told = (
        r"called off these did not come back within 0\.\d s: b \(rank 1\), last heard of in phase "
    )
    told += r"wire, at work for 7\.\d s\. The job"
    with pytest.raises(TransitionError, match=told):
        attempts["a"].call_roll(timeout_s=0.2)
    thread = threading.Thread(target=lambda: attempts["b"].call_roll(timeout_s=5))
    thread.start()
    attempts["a"].call_roll(timeout_s=5)  # one that was to join is not waited for
    thread.join(5)
    assert not thread.is_alive()


def test_who_gives_no_sign_of_life_is_not_waited_for(
    attempts: dict[str, Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.1)
    begin = time.monotonic()
    with pytest.raises(TransitionError, match=r"b \(rank 1\)"):
        attempts["a"].call_roll(timeout_s=60)
    assert time.monotonic() - begin < 10


def test_one_that_leaves_is_not_waited_for_after_the_commit(attempts: dict[str, Attempt]) -> None:
    attempts["b"].say_done()
    attempts["c"].say_done()
    attempts["b"].wait_for_done(timeout_s=5)


def test_few_of_many_are_named() -> None:
    many = Change(1, tuple(f"p{n}" for n in range(9)), ("p0",), bridge_id=1, world_id=2)
    assert named(many, [1, 2]) == "p1 (rank 1), p2 (rank 2)"
    assert named(many, range(1, 9)).endswith("p5 (rank 5), and 3 more")


def test_the_most_stages_that_anybody_knows_of_are_finished(attempts: dict[str, Attempt]) -> None:
    """One process less sure than another must not leave it alone with what it has freed."""
    for uid, stages in zip("abc", (1, 2, 1), strict=True):
        attempts[uid].say_finished(stages)
    found = at_once(*(lambda each=each: each.finished(timeout_s=5) for each in attempts.values()))
    assert found == [2] * 3
    ids = at_once(*(lambda each=each: each.way_back(timeout_s=5) for each in attempts.values()))
    assert len(set(ids)) == 1 and type(ids[0]) is int


@pytest.mark.parametrize("stages", [0, 1])
def test_who_is_silent_is_missed_where_something_is_gone(
    stages: int, attempts: dict[str, Attempt]
) -> None:
    attempts["a"].say_finished(0)
    attempts["b"].say_finished(stages)
    if stages:
        with pytest.raises(TransitionError, match=r"0\.2 s, with parts .*: c \(rank 2\), last"):
            attempts["a"].finished(timeout_s=0.2)
    else:
        assert attempts["a"].finished(timeout_s=0.2) == 0
