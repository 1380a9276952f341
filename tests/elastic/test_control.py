"""Requests that lie in a run directory: who gets one, and whose are taken."""

import json
import os
import threading
from pathlib import Path

import pytest

from dynatrain_megatron.elastic.control import leave_answer, take_request
from dynatrain_megatron.errors import ConfigError


def _write(run_dir: Path, text: str = '{"world": 2}', mode: int = 0o600) -> None:
    path = run_dir / "request.json"
    path.write_text(text)
    path.chmod(mode)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o400])
def test_a_request_is_taken_once(tmp_path: Path, mode: int) -> None:
    _write(tmp_path, mode=mode)
    assert take_request(tmp_path) == '{"world": 2}'
    assert take_request(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_reach_for_it_one_gets_it(tmp_path: Path) -> None:
    _write(tmp_path)
    got: list[str | None] = []
    reach = threading.Barrier(8)

    def take() -> None:
        reach.wait()
        got.append(take_request(tmp_path))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text for text in got if text is not None] == ['{"world": 2}']


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_may_write_is_not_taken(tmp_path: Path, mode: int) -> None:
    _write(tmp_path, mode=mode)
    with pytest.raises(ConfigError, match=f"nobody else may write to it, .* mode {mode:04o}"):
        take_request(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_pipes_and_large_files_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"world": 2}')
    (tmp_path / "request.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        take_request(tmp_path)
    os.mkfifo(tmp_path / "request.json", 0o600)
    with pytest.raises(ConfigError, match="is no file of at most 65536 bytes"):
        take_request(tmp_path)
    _write(tmp_path, "x" * ((1 << 16) + 1))
    with pytest.raises(ConfigError, match="is no file of at most 65536 bytes"):
        take_request(tmp_path)


def test_the_last_answer_lies_there_whole(tmp_path: Path) -> None:
    for number in range(2):
        leave_answer(tmp_path, {"number": number, "state": "done"})
    assert [path.name for path in tmp_path.iterdir()] == ["answer.json"]
    assert json.loads((tmp_path / "answer.json").read_text()) == {"number": 1, "state": "done"}
