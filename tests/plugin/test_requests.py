"""What is asked of a job from outside, as the process of rank 0 hears and answers it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynatrain_megatron.config import Overlap
from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.store import JobStore, StoreServer
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.errors import ConfigError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.plugin.membership import Membership, Pending
from dynatrain_megatron.transition.posted import Posted


@pytest.fixture
def store() -> Iterator[JobStore]:
    server = StoreServer("127.0.0.1")
    yield JobStore(server.address, "job", timeout_s=5)


def _rank_0(store: JobStore, run_dir: Path, processes: tuple[str, ...] = ()) -> Membership:
    job: Any = SimpleNamespace(
        processes=processes or (process_uid(),), iteration=4, secret="s3cret", phase="",
        layout=ParallelLayout.parse("tp2"),
    )  # fmt: skip
    nothing: Any = None
    return Membership(
        job, store, nothing, nothing, run_dir=run_dir, overlap=Overlap.off, timeout_s=5
    )


def _answer(run_dir: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run_dir / "answer.json").read_text())
    return read


def test_who_asks_while_others_come_first_is_told_so(store: JobStore, tmp_path: Path) -> None:
    directory, leader = Directory(store), _rank_0(store, tmp_path)
    for world in (2, 3):
        directory.ask({"world": world}, "s3cret")
    leader._listen()
    assert directory.answer_of(0) is None
    assert directory.answer_of(1) == {
        "state": "waiting", "reason": "1 other requests come first"
    }  # fmt: skip
    assert leader.requests == [(0, '{"world": 2}'), (1, '{"world": 3}')]
    leader._listen()
    assert len(leader.requests) == 2


def test_a_new_rank_0_takes_up_what_waits_and_nothing_twice(
    store: JobStore, tmp_path: Path
) -> None:
    directory, before = Directory(store), _rank_0(store, tmp_path)
    for world in (2, 3):
        directory.ask({"world": world}, "s3cret")
    before._listen()
    before.answer(0, {"state": "refused", "reason": "no"})
    assert _answer(tmp_path) == {"number": 0, "state": "refused", "reason": "no"}
    after = _rank_0(store, tmp_path)
    after._listen()
    assert after.requests == [(1, '{"world": 3}')]
    assert (after.is_answered(0), after.is_answered(1)) == (True, False)


def test_a_request_in_the_run_directory_is_asked_like_any_other(
    store: JobStore, tmp_path: Path
) -> None:
    leader = _rank_0(store, tmp_path)
    path = tmp_path / "request.json"
    path.write_text('{"layout": "tp1", "world": 2}')
    path.chmod(0o600)
    leader.read_request()
    assert not path.exists()
    leader.read_request()  # of another signal, for the same
    leader._listen()
    assert leader.requests == [(0, '{"layout": "tp1", "world": 2}')]
    assert leader.directory.answer_of(0) is None


def test_one_that_cannot_be_taken_is_refused_at_once(
    store: JobStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text("{}")
    path.chmod(0o666)
    leader = _rank_0(store, tmp_path)
    leader.read_request()
    assert _answer(tmp_path)["state"] == "refused"
    assert "nobody else may write to it" in _answer(tmp_path)["reason"]
    assert "request refused: " in capsys.readouterr().out
    leader._listen()
    assert leader.requests == []


def test_who_waits_to_join_asks_nothing(store: JobStore, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    waiting = _rank_0(store, tmp_path)
    waiting._job.processes = ()  # type: ignore[misc]
    waiting.read_request()
    assert (tmp_path / "request.json").exists()


def test_what_is_asked_through_the_socket_is_a_request_like_any_other(
    store: JobStore, tmp_path: Path
) -> None:
    leader = _rank_0(store, tmp_path)
    assert leader.reply({"ask": {"world": 2}}) == {"number": 0}
    leader._listen()
    assert leader.requests == [(0, '{"world": 2}')]
    assert leader.reply({"answer": 0}) == {"answer": None}
    leader.answer(0, {"state": "refused", "reason": "no"})
    assert leader.reply({"answer": 0}) == {"answer": {"state": "refused", "reason": "no"}}
    status = leader.reply({"status": None})["status"]
    assert (status["iteration"], status["layout"], status["world"]) == (4, "tp2", 1)


@pytest.mark.parametrize(
    "question", [{}, {"ask": 1}, {"answer": "0"}, {"status": 1}, {"end": None}, {"ask": None}]
)
def test_other_questions_are_refused(
    store: JobStore, tmp_path: Path, question: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="a question is"):
        _rank_0(store, tmp_path).reply(question)


def test_a_step_that_was_called_off_is_given_up_where_it_is_due_and_not_before(
    store: JobStore, tmp_path: Path
) -> None:
    """Else this process would look for the same step under the next number, and alone."""
    leader = _rank_0(store, tmp_path)
    uid = (leader.uid,)
    for step in (0, None):
        leader.pending = Pending(Posted(Change(1, uid, uid, 1, 2), "tp1", step=step))
        leader.pending.called_off = "rank 1 cannot"
        assert leader.at_boundary(10) is None
        assert (leader.pending is None) == (step is None)
