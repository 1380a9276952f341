"""`dynatrain switch` and `dynatrain status` against a store that answers as jobs do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.cli import main
from dynatrain_megatron.cli import switch as command
from dynatrain_megatron.elastic.control import JobFile, opened
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.endpoint import Endpoint, asked
from dynatrain_megatron.elastic.store import JobStore, StoreServer

SECRET = "s3cret"
STATUS: dict[str, Any] = {
    "iteration": 7, "layout": "tp2", "world": 2, "members": ["a", "b"], "waiting": ["c"],
    "leaving": [], "switch": None,
}  # fmt: skip
UNDER_WAY = {
    "number": 3, "layout": "tp4", "world": 4, "origin": "schedule", "request": None, "at": 9,
    "ready": False, "phase": None,
}  # fmt: skip


class Stub:
    """What rank 0 of a job does in its store, without a job."""

    def __init__(self, server: StoreServer, run_dir: Path) -> None:
        self.shown = threading.Semaphore(0)
        self.directory = Directory(JobStore(server.address, "job", timeout_s=10))
        JobFile(str(server.address), "job", SECRET).write(run_dir)

    def publish(self, **changes: Any) -> None:
        self.directory.publish(STATUS | changes)

    def answer_each(self, *answers: dict[str, Any]) -> Callable[[], Any]:
        """Give these answers to the next request, one after the other; returns the request."""
        read: list[Any] = []

        def listen() -> None:
            while not (messages := self.directory.requests(0)):
                time.sleep(0.01)
            read.append(json.loads(opened(messages[0], 0, SECRET) or "null"))
            for answer in answers:
                self.directory.answer(0, answer)
                assert self.shown.acquire(timeout=10)

        thread = threading.Thread(target=listen)
        thread.start()

        def request() -> Any:
            thread.join(10)
            return read[0]

        return request


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    server = StoreServer("127.0.0.1")
    stub = Stub(server, tmp_path)
    stub.publish()
    show = command._show

    def shown(*answer: Any) -> None:
        show(*answer)
        stub.shown.release()

    monkeypatch.setattr(command, "_show", shown)
    yield stub


def switch(tmp_path: Path, *argv: str) -> int:
    return main(["switch", "--run-dir", str(tmp_path), *argv])


def test_a_switch_is_followed_to_its_end(
    job: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = {"state": "done", "layout": "tp4", "iteration": 9, "stall_s": 0.4, "bytes_moved": 2000}
    request = job.answer_each(
        {"state": "waiting", "reason": "switch 3 to tp4 (schedule) comes first"},
        {"state": "announced", "layout": "tp4", "world": 4},
        done,
    )
    assert switch(tmp_path, "--target", "{tp: 4}", "--world", "4", "--wait") == 0
    assert capsys.readouterr() == (
        "waiting: switch 3 to tp4 (schedule) comes first\n"
        "announced: tp4 on 4 ranks\n"
        "done at iteration 9: the job is in tp4; no step ran for 400 ms, 2.00 kB were moved\n",
        "",
    )
    assert request() == {"layout": {"tp": 4}, "world": 4}


@pytest.mark.parametrize(
    ("state", "code"), [("refused", 1), ("called off", 1), ("possible", 0), ("waiting", 0)]
)
def test_without_wait_the_first_answer_is_the_end(
    job: Stub, tmp_path: Path, state: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"state": state, "reason": "because", "layout": "tp4", "world": 4}
    job.answer_each(answer)
    assert switch(tmp_path, "--world", "4", "--json") == code
    assert json.loads(capsys.readouterr().out) == answer


def test_a_job_that_has_ended_says_so(
    job: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.directory.end("training has ended")
    assert switch(tmp_path, "--world", "4") == 1
    assert capsys.readouterr().err == "dynatrain switch: the job has ended\n"
    assert job.directory.requests(0) == []
    assert main(["status", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("ended: iteration 7, tp2, 2 ranks")


def test_a_job_that_gives_no_sign_of_life_is_not_waited_for(
    job: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_SILENT_S", 0.3)
    begin = time.monotonic()
    assert switch(tmp_path, "--world", "4") == 1
    assert time.monotonic() - begin < 5
    assert "none of the job's 2 processes has given a sign of life" in capsys.readouterr().err


def test_when_time_is_up_it_is_told_what_the_job_is_at(
    job: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.publish(switch=UNDER_WAY)
    assert switch(tmp_path, "--world", "4", "--timeout", "0.3") == 1
    assert (
        "no answer after 0.3 s; the job answers at step boundaries, and is at: iteration 7: "
        "another switch first (schedule), to tp4 on 4 ranks, after iteration 9"
    ) in capsys.readouterr().err


def test_a_job_that_the_store_does_not_know(
    job: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynatrain_megatron.cli.job._SAYS_WITHIN_S", 0.2)
    monkeypatch.setenv("DYNATRAIN_JOB", "another")
    monkeypatch.setenv("DYNATRAIN_SECRET", SECRET)
    endpoint = JobFile.read(tmp_path).store
    assert main(["switch", "--endpoint", endpoint, "--world", "4"]) == 2
    assert "the store knows no such job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "iteration 7: tp4 on 4 ranks, after iteration 9"),
        ({"at": 0}, "iteration 7: tp4 on 4 ranks, being prepared"),
        ({"at": 0, "ready": True}, "iteration 7: tp4 on 4 ranks, about to begin"),
        ({"phase": ""}, "iteration 7: tp4 on 4 ranks, about to begin"),
        ({"phase": "build"}, "iteration 7: tp4 on 4 ranks, build"),
        (
            {"phase": "build", "request": 1},
            "iteration 7: another switch first (schedule), to tp4 on 4 ranks, build",
        ),
    ],
)
def test_progress_in_words(changes: dict[str, Any], told: str) -> None:
    under_way = UNDER_WAY | {"request": 5} | changes
    assert command.progress_of(STATUS | {"switch": under_way}, 5) == told


def test_on_a_terminal_a_line_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with command._live(Namespace(wait=True, json=False)) as line:
        assert isinstance(line, command._LiveLine)
        line.update("iteration 7: [tp4] being prepared")
        line.live.refresh()
        with line.hidden():
            print("announced")
    shown = capsys.readouterr()
    assert shown.out == "announced\n"
    assert "iteration 7: [tp4] being prepared" in shown.err
    for args in (Namespace(wait=False, json=False), Namespace(wait=True, json=True)):
        with command._live(args) as line:
            line.update("not shown")
    assert capsys.readouterr() == ("", "")


def test_status_tells_of_a_switch_under_way(
    job: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.publish(switch=UNDER_WAY | {"at": 0, "phase": "verify"})
    assert main(["status", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "runs: iteration 7, tp2, 2 ranks\nwaiting: c\n"
        "switch 3 to tp4 on 4 ranks is under way (schedule), in phase verify\n"
    )


def test_a_job_is_asked_through_its_socket_and_through_its_store_when_that_is_gone(
    job: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[dict[str, Any]] = []

    def reply(message: dict[str, Any]) -> dict[str, Any]:
        heard.append(message)
        match message:
            case {"ask": request}:
                return {"number": job.directory.ask(request, SECRET)}
            case {"answer": number}:
                return {"answer": job.directory.answer_of(number)}
        return {"status": STATUS}

    end = Endpoint(tmp_path, lambda: True, reply)
    deadline = time.monotonic() + 10
    while asked(tmp_path, {"status": None}) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    show = job.shown.release

    def leave() -> None:  # while the answer is shown
        end.stop()
        show()

    job.shown.release = leave  # type: ignore[method-assign]
    done = {"state": "done", "layout": "tp4", "iteration": 9}
    request = job.answer_each({"state": "announced", "layout": "tp4", "world": 4}, done)
    assert switch(tmp_path, "--world", "4", "--wait") == 0
    assert capsys.readouterr().out == (
        "announced: tp4 on 4 ranks\ndone at iteration 9: the job is in tp4\n"
    )
    assert request() == {"world": 4} and {"ask": {"world": 4}} in heard
    assert not (tmp_path / "control.sock").exists()


def test_the_socket_needs_neither_store_nor_torch(tmp_path: Path) -> None:
    end = Endpoint(tmp_path, lambda: True, lambda _: {"status": STATUS})
    script = (
        "import sys; from dynatrain_megatron.cli import main\n"
        f"code = main(['status', '--run-dir', {str(tmp_path)!r}])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    end.stop()
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "runs: iteration 7, tp2, 2 ranks\nwaiting: c\n"
