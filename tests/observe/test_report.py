"""`dynatrain report` as a user runs it: files, messages, exit codes, the page's text."""

import html.parser
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynatrain_megatron.cli import demo, main
from dynatrain_megatron.observe.report import ChartsUnavailable, read_run

from .runs import HOSTILE, RECORDED, RECORDED_STATIC, refused, switch, write_run

pytest.importorskip("matplotlib", reason="charts need matplotlib")


class _Page(html.parser.HTMLParser):
    """What is in a page: tags with attributes, and the text of each table's rows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.text = ""
        self._table = ""
        self._open = False
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "table":
            self._table = given.get("id") or ""
            self.rows[self._table] = []
        elif tag == "tr":
            self.rows[self._table].append([])
        elif tag in ("td", "th"):
            self.rows[self._table][-1].append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("table", "tr"):
            self._open = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open:
            self.rows[self._table][-1][-1] += data

    def table(self, name: str) -> list[dict[str, str]]:
        """The rows of a table by heading."""
        heading, *rows = self.rows[name]
        return [dict(zip(heading, map(str.strip, row), strict=True)) for row in rows]


@pytest.fixture
def quick_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that are not drawn, for tests that look at the page's text."""
    from dynatrain_megatron.observe.report import build

    monkeypatch.setattr(build, "draw", lambda *_: b"png")


def test_the_report_of_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report"
    code = main(["report", str(RECORDED), "--static", str(RECORDED_STATIC), "--out", str(out)])
    assert code == 0
    files = ["report.html", "loss.png", "time.png", "bytes.png"]
    assert capsys.readouterr().out.splitlines() == [
        f"{kind} {out / name}"
        for kind, name in zip(("Report:", "Chart: ", "Chart: ", "Chart: "), files, strict=True)
    ]
    assert sorted(path.name for path in out.iterdir()) == sorted(files)
    page = _Page(out / "report.html")
    rows = page.table("timeline")
    assert [(row["iteration"], row["from"], row["to"]) for row in rows] == [
        ("6", "tp2-dp2", "pp2-dp2"),
        ("12", "pp2-dp2", "tp4"),
        ("18", "tp4", "pp4"),
        ("24", "pp4", "dp4"),
    ]
    assert (rows[0]["event"], rows[0]["stall"], rows[0]["moved"]) == (
        "switch 1", "1.16 s", "10.04 MB"
    )  # fmt: skip
    transfer, memory = page.table("switches")[0], page.table("memory")[0]
    assert transfer["switch"] == "1 tp2-dp2 → pp2-dp2 at 6"
    assert transfer["÷ lower bound"] == "1.000"
    assert transfer["fingerprint"] == "880935e7630dc38f equal"
    assert memory["recorded"] == memory["planned"] == "10.04 MB"
    # This run is from before these were recorded.
    assert (rows[0]["time (UTC)"], rows[0]["ranks"], memory["bound"]) == ("–", "–", "–")
    assert [len(page.table(name)) for name in ("times", "loads", "groups")] == [4, 4, 4]
    assert "refused" not in page.rows and "links" not in page.rows
    assert "Notes" not in page.text


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    assert main(["report", str(RECORDED), "--out", str(tmp_path)]) == 0
    page = _Page(tmp_path / "report.html")
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "iframe", "object", "base", "form"})
    addresses = [
        value
        for _, attrs in page.tags
        for name, value in attrs.items()
        if name in ("src", "srcset", "href", "action", "data") and value is not None
    ]
    assert len(addresses) == 3 * 4 + 1
    assert all(address.startswith("data:") for address in addresses)
    assert not re.search(r"url\(|@import|https?:", page.source)
    policy = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


@pytest.mark.usefixtures("quick_charts")
def test_json_tells_files_switches_and_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path, [switch(), switch(3, ok=False), refused()], torn="{")
    assert main(["report", str(run_dir), "--static", str(RECORDED_STATIC), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == str(run_dir / "report" / "report.html")
    assert told["pictures"] == [
        str(run_dir / "report" / name) for name in ("loss.png", "time.png", "bytes.png")
    ]
    assert all(Path(path).is_file() for path in [told["page"], *told["pictures"]])
    assert (told["steps"], told["first_iteration"], told["last_iteration"]) == (4, 1, 4)
    assert [(s["iteration"], s["ok"], s["bytes_ratio"]) for s in told["switches"]] == [
        (2, True, 1.5),
        (3, False, 1.5),
    ]
    assert told["switches"][0]["matrix"] == [[500, 1500], [1500, 500]]
    assert told["refused"][0]["reason"] == refused()["reason"]
    assert told["static"]["steps_compared"] == 4
    assert told["notes"] == [
        "steps.jsonl: the last line is torn and left out",
        "events.jsonl: the last line is torn and left out",
    ]


def test_texts_from_files_cannot_become_markup(tmp_path: Path) -> None:
    hostile = dict.fromkeys(("source", "target"), HOSTILE)
    events = [
        switch(**hostile, seconds={HOSTILE: 1.0}, fingerprint={"before": HOSTILE, "after": "b"},
               **dict.fromkeys(("time", "origin", "schedule", "verify", "keep_source"), HOSTILE)),
        switch(3, **hostile, ok=False, error=HOSTILE),
        refused(**hostile, reason=HOSTILE, next_step=HOSTILE),
        {"event": HOSTILE},
    ]  # fmt: skip
    run_dir = write_run(tmp_path / "<script>alert(1)<" / "b>&", events)
    assert main(["report", str(run_dir), "--out", str(tmp_path / "out")]) == 0
    page = _Page(tmp_path / "out" / "report.html")
    assert "<script" not in page.source
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 3
    assert not any("onerror" in attrs for _, attrs in page.tags)
    assert page.table("timeline")[0]["from"] == HOSTILE
    assert HOSTILE in page.table("timeline")[1]["event"]
    assert HOSTILE in page.table("switches")[0]["switch"]
    assert page.table("refused")[0] == {
        "event": "refused", "iteration": "3", "from": HOSTILE, "asked for": HOSTILE,
        "reason": HOSTILE, "then": HOSTILE
    }  # fmt: skip
    assert page.table("times")[0][HOSTILE] == "1.000"
    assert f"{HOSTILE} (1)" in page.text


@pytest.mark.usefixtures("quick_charts")
def test_what_a_switch_took_is_told_in_tables(tmp_path: Path) -> None:
    matrix = [[0, 1000, 4000], [0, 0, 0], [2000, 0, 7]]
    events = [
        refused(1, called_off=True),
        switch(2, bytes_matrix=matrix, nodes=[0, 0, 1]),
        refused(3),
    ]
    assert main(["report", str(write_run(tmp_path, events))]) == 0
    page = _Page(tmp_path / "report" / "report.html")
    assert page.table("timeline") == [
        {
            "event": "called off", "iteration": "1", "time (UTC)": "2026-11-30 10:21:05",
            "from": "tp2-dp2", "to": '{"tp": 3}', "asked by": "–", "ranks": "–", "stall": "–",
            "moved": "–",
        },
        {
            "event": "switch 1", "iteration": "2", "time (UTC)": "2026-11-30 10:20:05",
            "from": "tp2-dp2", "to": "pp2-dp2", "asked by": "request", "ranks": "2 +1 −2",
            "stall": "1.25 s", "moved": "3.00 kB",
        },
        {
            "event": "refused", "iteration": "3", "time (UTC)": "2026-11-30 10:21:05",
            "from": "tp2-dp2", "to": '{"tp": 3}', "asked by": "–", "ranks": "–", "stall": "–",
            "moved": "–",
        },
    ]  # fmt: skip
    which = {"switch": "1 tp2-dp2 → pp2-dp2 at 2"}
    assert page.table("loads") == [
        which | {
            "within nodes": "1.00 kB", "between nodes": "6.00 kB",
            "busiest sender": "rank 0: 5.00 kB", "busiest receiver": "rank 2: 4.00 kB",
            "busiest ÷ mean sent": "2.14",
        }
    ]  # fmt: skip
    assert page.table("links") == [
        which | {"link": "node 0 → node 1", "bytes": "4.00 kB", "": ""},
        which | {"link": "node 1 → node 0", "bytes": "2.00 kB", "": ""},
    ]
    assert page.table("memory") == [
        which | {
            "old state": "freed stage by stage", "stages": "3", "planned": "5.00 kB",
            "recorded": "4.00 kB", "bound": "8.00 kB", "recorded and planned": "",
        }
    ]  # fmt: skip
    assert page.table("groups") == [
        which | {
            "groups reused": "0", "made": "23", "destroyed": "22", "joined": "1", "left": "2",
            "placement": "moved 1.20 kB instead of 3.00 kB (−60%)",
        }
    ]  # fmt: skip
    assert page.table("switches")[0] == which | {
        "moved": "3.00 kB", "÷ lower bound": "1.500", "retained": "1.00 kB", "rebuilt": "0 B",
        "ops": "8", "rounds": "1", "schedule": "direct", "wire": "62 ms", "predicted": "50 ms",
        "checked by": "fingerprint", "fingerprint": "880935e7630dc38f equal",
    }  # fmt: skip
    assert [row["event"] for row in page.table("refused")] == ["called off", "refused"]
    assert "1 refused, 1 called off" in page.text
    # The bar is what was recorded, the mark what was planned, the whole width the bound.
    assert '<i style="width:50.00%"></i><b style="left:62.50%"></b>' in page.source


@pytest.mark.usefixtures("quick_charts")
def test_events_of_another_program_have_a_page(tmp_path: Path) -> None:
    bare: list[dict[str, object]] = [
        {"event": "switch", "iteration": 2},
        {"event": "switch"},
        {"event": "refused", "iteration": 3},
    ]
    assert main(["report", str(write_run(tmp_path, bare, losses=None))]) == 0
    page = _Page(tmp_path / "report" / "report.html")
    assert [row["event"] for row in page.table("timeline")] == ["switch 1", "refused"]
    assert "events.jsonl: 1 lines have no iteration and are left out" in page.text
    assert {"loads", "memory", "groups", "times"}.isdisjoint(page.rows)


@pytest.mark.usefixtures("quick_charts")
def test_a_run_without_switches_has_its_loss(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, None)
    assert main(["report", str(run_dir)]) == 0
    assert sorted(path.name for path in (run_dir / "report").iterdir()) == [
        "loss.png",
        "report.html",
    ]
    page = _Page(run_dir / "report" / "report.html")
    assert page.rows == {}
    assert "there is no events.jsonl" in page.text


@pytest.mark.usefixtures("quick_charts")
def test_a_run_without_steps_has_its_switches(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, [switch(bytes_matrix=None), refused()], losses=None)
    assert main(["report", str(run_dir)]) == 0
    assert sorted(path.name for path in (run_dir / "report").iterdir()) == [
        "report.html",
        "time.png",
    ]
    page = _Page(run_dir / "report" / "report.html")
    assert len(page.table("switches")) == len(page.table("refused")) == 1


def test_a_run_that_has_written_nothing_yet_has_a_page(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, [], losses=[])
    assert main(["report", str(run_dir)]) == 0
    assert [path.name for path in (run_dir / "report").iterdir()] == ["report.html"]


@pytest.mark.usefixtures("quick_charts")
def test_charts_of_an_earlier_report_go(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["report", str(write_run(tmp_path / "a", [switch()])), "--out", str(out)]) == 0
    (out / "mine.txt").write_text("stays")
    assert main(["report", str(write_run(tmp_path / "b", [])), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["loss.png", "mine.txt", "report.html"]


@pytest.mark.usefixtures("quick_charts")
def test_fingerprints_that_differ_and_switches_that_failed_stand_out(tmp_path: Path) -> None:
    events = [
        switch(fingerprint={"before": "aa", "after": "bb"}),
        switch(3, ok=False, error="rank 3 is gone", fingerprint=None),
    ]
    run_dir = write_run(tmp_path, events)
    assert main(["report", str(run_dir)]) == 0
    page = _Page(run_dir / "report" / "report.html")
    first, second = page.table("switches")
    assert first["fingerprint"] == "aa bb different"
    assert second["fingerprint"] == "not taken"
    assert second["switch"] == "2 tp2-dp2 → pp2-dp2 at 3 failed"
    assert page.table("timeline")[1]["event"] == "switch 2 failed rank 3 is gone"
    assert "1 failed" in page.text


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["nowhere"], 2, "nowhere is not a folder"),
        (["empty"], 2, "has neither steps.jsonl nor events.jsonl"),
        (["run", "--static", "empty"], 2, "has neither"),
        (["run", "--static", "events-only"], 2, "has no training steps to compare with"),
        (["run", "--out", "run/steps.jsonl"], 2, "steps.jsonl is not a folder"),
        (["run", "--out", "run/steps.jsonl/deeper"], 1, "Not a directory"),
        (["broken"], 1, "steps.jsonl line 1 is not JSON; mend or remove it"),
        (["folder"], 1, "steps.jsonl: Is a directory"),
    ],
)
@pytest.mark.usefixtures("quick_charts")
def test_wrong_usage_and_broken_content_are_one_line(
    tmp_path: Path,
    argv: list[str],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), [switch()])
    write_run(Path("events-only"), [switch()], losses=None)
    write_run(Path("folder"), [], losses=None)
    Path("folder/steps.jsonl").mkdir()
    Path("empty").mkdir()
    write_run(Path("broken"), None)
    Path("broken/steps.jsonl").write_text('{"iteration"\n{"iteration": 1}\n')
    assert main(["report", *argv]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("dynatrain report: ")
    assert shown.err.count("\n") == 1
    assert told in shown.err


def _without_matplotlib(*argv: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from dynatrain_megatron.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def test_without_matplotlib_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    run = _without_matplotlib("report", str(RECORDED), "--out", str(tmp_path / "out"))
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "dynatrain report: charts need matplotlib, which is not installed; "
        "pip install dynatrain-megatron[report]\n"
    )
    assert not (tmp_path / "out").exists()


def test_charts_are_drawn_where_there_is_no_display_and_a_foreign_matplotlibrc(
    tmp_path: Path,
) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: TkAgg\n")
    environment = {k: v for k, v in os.environ.items() if k != "DISPLAY"}
    run = subprocess.run(
        [sys.executable, "-m", "dynatrain_megatron.cli", "report", str(RECORDED), "--out",
         str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2],
        env={**environment, "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "out" / "loss.png").is_file()


def test_the_demo_goes_on_without_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    def unavailable(*_args: object) -> None:
        raise ChartsUnavailable("charts need matplotlib")

    monkeypatch.setattr(demo, "write_report", unavailable)
    shown = Console(record=True, file=io.StringIO())
    runs = read_run(RECORDED), read_run(RECORDED_STATIC)
    assert demo._write_report(*runs, tmp_path, shown) is None
    assert shown.export_text() == "No report: charts need matplotlib\n"


@pytest.mark.usefixtures("quick_charts")
def test_the_demo_writes_its_report_beside_its_runs(tmp_path: Path) -> None:
    from rich.console import Console

    runs = read_run(RECORDED), read_run(RECORDED_STATIC)
    page = demo._write_report(*runs, tmp_path / "report", Console(stderr=True))
    assert page == tmp_path / "report" / "report.html"
    assert "over 30 steps" in page.read_text()
