"""The socket in a run directory: who may ask, what is answered, and who listens there."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.elastic import endpoint
from dynatrain_megatron.elastic.endpoint import SOCKET, Endpoint, asked
from dynatrain_megatron.errors import ConfigError, WorldError

Start = Callable[..., Endpoint]


def _echo(message: dict[str, Any]) -> dict[str, Any]:
    if "refuse" in message:
        raise ConfigError("not that")
    return {"heard": message}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start endpoints in a folder; they have begun to listen, and end with the test."""
    started = []

    def begin(run_dir: Path = tmp_path, reply: endpoint.Reply = _echo) -> Endpoint:
        begun = Endpoint(run_dir, lambda: True, reply)
        started.append(begun)
        _wait(lambda: asked(run_dir, {"up": 1}) is not None)
        return begun

    yield begin
    for each in started:
        each.stop()


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _send(run_dir: Path, data: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(run_dir / SOCKET))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        read: dict[str, Any] = json.loads(connection.makefile().read())
        return read


def test_a_question_is_answered_and_a_refusal_is_an_error(start: Start, tmp_path: Path) -> None:
    start()
    assert asked(tmp_path, {"ask": {"world": 4}}) == {"heard": {"ask": {"world": 4}}}
    with pytest.raises(ConfigError, match=r"^not that$"):
        asked(tmp_path, {"refuse": None})
    assert _send(tmp_path, b'{"a": 1}') == {"heard": {"a": 1}}  # a line's end may be missing


def test_only_its_owner_may_connect(start: Start, tmp_path: Path) -> None:
    start()
    found = (tmp_path / SOCKET).stat()
    assert stat.S_ISSOCK(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
    if os.geteuid():
        pytest.skip("only root can try as somebody else")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o011)
    said = [_as_nobody(tmp_path / SOCKET)]
    (tmp_path / SOCKET).chmod(0o777)  # as on a file system that heeds no modes
    said.append(_as_nobody(tmp_path / SOCKET))
    assert said == ["PermissionError", '{"error": "this job is user 0\'s; user 65534 may not ask"}']


def _as_nobody(path: Path) -> str:
    """What a process of user 65534 gets that asks at ``path``."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(b"{}\n")
                os.write(writer, connection.recv(1000).strip())
        except BaseException as error:
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as told:
        return told.read()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\n", "a message is a line of JSON"),
        (b"{", "a message is a line of JSON"),
        (b"\xff\xfe\n", "a message is a line of JSON"),
        (b"[" * 60000, "a message is a line of JSON"),
        (b"[1]\n", "a message is a JSON object"),
        (b" " * (1 << 16) + b"{}\n", "a line of at most 65536 bytes"),
    ],
    ids=["empty", "torn", "bytes", "deep", "list", "long"],
)
def test_what_is_no_question_is_refused_and_the_next_one_answered(
    start: Start, tmp_path: Path, data: bytes, told: str
) -> None:
    start()
    assert told in _send(tmp_path, data)["error"]
    assert asked(tmp_path, {}) == {"heard": {}}


def test_one_who_says_nothing_holds_up_others_no_longer_than_the_limit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_CLIENT_S", 0.5)
    start()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / SOCKET))
        assert asked(tmp_path, {}) == {"heard": {}}


def test_a_job_that_dies_while_it_is_asked_is_told_apart_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(tmp_path, {}) is None
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(tmp_path / SOCKET))
        dying.listen()
        thread = threading.Thread(target=lambda: dying.accept()[0].close())
        thread.start()
        with pytest.raises(WorldError, match="gave no answer"):
            asked(tmp_path, {})
        thread.join()
    assert asked(tmp_path, {}) is None  # what it left behind


def test_a_long_path_and_what_a_dead_job_left_are_no_hindrance(
    start: Start, tmp_path: Path
) -> None:
    deep = tmp_path / ("a" * 100) / ("b" * 100)
    deep.mkdir(parents=True)
    (deep / SOCKET).write_text("left")
    start(deep)
    assert asked(deep, {}) == {"heard": {}}
    assert [path.name for path in deep.iterdir()] == [SOCKET]


def test_who_takes_over_is_asked_from_then_on(tmp_path: Path) -> None:
    turns = {"first": True, "second": False}
    ends = [
        Endpoint(tmp_path, lambda name=name: turns[name], lambda _, name=name: {"by": name})  # type: ignore[misc]
        for name in turns
    ]
    _wait(lambda: asked(tmp_path, {}) == {"by": "first"})
    turns["second"] = True  # it takes the name before the first one lets go of it
    _wait(lambda: asked(tmp_path, {}) == {"by": "second"})
    turns["first"] = False
    time.sleep(3 * endpoint._TICK_S)
    assert asked(tmp_path, {}) == {"by": "second"}
    for each in ends:
        each.stop()
    assert asked(tmp_path, {}) is None
    assert list(tmp_path.iterdir()) == []


def test_where_there_can_be_no_socket_a_warning_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint, "_AGAIN_S", 0.02)
    (tmp_path / "file").write_text("")
    listening = Endpoint(tmp_path / "file" / "run", lambda: True, _echo)
    _wait(lambda: bool(caplog.records))
    time.sleep(0.2)
    (told,) = caplog.records
    assert "the job can be asked through its store" in told.getMessage()
    (tmp_path / "file").unlink()
    _wait(lambda: asked(tmp_path / "file" / "run", {}) is not None)
    listening.stop()
