"""What Prometheus is told of a job, in its text format, in a file and over HTTP."""

import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe import metrics
from dynatrain_megatron.observe.metrics import Exporter, Figures

SAMPLE = re.compile(r'dynatrain_[a-z_]+\{run="[^"\n]*(?:\\"[^"\n]*)*"(?:,[a-z]+="[^"]*")*\} \S+')


def _text(figures: Figures) -> str:
    layout = ParallelLayout.parse("tp2-pp2-dp2")
    return figures.text(iteration=12, layout=layout, waiting=1, leaving=0, switching=False)


def _values(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in lines), text
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_figures_add_up() -> None:
    figures = Figures("a")
    figures.switched({"wire": 0.5, "plan": 0.1}, 1000, 4000, 0.75)
    figures.switched({"wire": 0.25}, 500, 3000, 0.5)
    figures.refused()
    values = _values(_text(figures))
    assert values['dynatrain_iteration{run="a"}'] == 12
    assert values['dynatrain_layout_info{run="a",layout="tp2-pp2-dp2"}'] == 1
    assert values['dynatrain_layout{run="a",axis="world"}'] == 8
    assert values['dynatrain_switches_total{run="a"}'] == 2
    assert values['dynatrain_switches_refused_total{run="a"}'] == 1
    assert values['dynatrain_stall_seconds_total{run="a"}'] == 1.25
    assert values['dynatrain_moved_bytes_total{run="a"}'] == 1500
    assert values['dynatrain_last_phase_seconds{run="a",phase="wire"}'] == 0.25
    assert 'dynatrain_last_phase_seconds{run="a",phase="plan"}' not in values


def test_the_text_has_each_metric_once_with_its_type() -> None:
    figures = Figures('my "run"\n\\')
    figures.switched({"wire": 0.5}, 1, 2, 0.75)
    lines = _text(figures).splitlines()
    assert 'dynatrain_iteration{run="my \\"run\\"\\n\\\\"} 12' in lines
    types = [line.split()[2:] for line in lines if line.startswith("# TYPE")]
    assert len({name for name, _ in types}) == len(types)
    assert all((kind == "counter") == name.endswith("_total") for name, kind in types)


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_one_text_goes_to_file_and_port_while_this_process_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "EVERY_S", 0.02)
    told: list[str | None] = ["one 1\n"]
    file, port = tmp_path / "deep" / "job.prom", _free_port()
    exporter = Exporter(lambda: told[-1], file, "127.0.0.1", port)

    def fetched(path: str = "/metrics") -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return str(answer.read().decode())

    try:
        _until(file.exists)
        assert (fetched(), file.read_text()) == ("one 1\n", "one 1\n")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetched("/job.json")
        told.append("two 2\n")
        _until(lambda: file.read_text() == fetched() == "two 2\n")
        told.append(None)  # another process has rank 0 now
        _until(lambda: not file.exists())
        with pytest.raises(urllib.error.URLError):
            fetched()
        told.append("three 3\n")
        _until(file.exists)
        assert fetched() == "three 3\n"
    finally:
        exporter.stop()
    assert list(file.parent.iterdir()) == []


def test_a_port_that_is_taken_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "EVERY_S", 0.02)
    port, file = _free_port(), tmp_path / "job.prom"
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        exporter = Exporter(lambda: "one 1\n", file, "127.0.0.1", port)
        _until(file.exists)  # which does not wait for the port
        time.sleep(0.1)
    try:
        url = f"http://127.0.0.1:{port}/metrics"

        def is_served() -> bool:
            try:
                return bool(urllib.request.urlopen(url, timeout=5).read() == b"one 1\n")
            except urllib.error.URLError:
                return False

        _until(is_served)
    finally:
        exporter.stop()
    assert [record.getMessage() for record in caplog.records if "metrics_port" in record.message]
    assert len(caplog.records) == 1
