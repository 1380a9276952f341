"""benchmarks/fault_matrix: its results are whole, as promised, and what the documentation shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fault_table
from benchmarks.fault_cases import Case, Keep, Outcome, cases, quick
from dynatrain_megatron.faults import Kind, Phase

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def content() -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / "fault_matrix.json").read_text())


def test_the_documentation_has_the_table_of_the_last_run(content: Any) -> None:
    page = (ROOT / "docs" / "verification.md").read_text()
    assert page == fault_table.put_into(page, content)
    report = (ROOT / "benchmarks" / "results" / "fault_matrix.md").read_text()
    assert report == fault_table.report(content)


def test_every_case_was_run_and_came_out_as_promised(content: Any) -> None:
    names = ("phase", "kind", "rank", "keep", "at")
    found = {tuple(row[name] for name in names): row for row in content["cases"]}
    for keep in Keep:
        for case in cases(keep):
            row = found.pop(tuple(getattr(case, name) for name in names), None)
            if row is None:  # not run yet
                assert keep is Keep.never and case.promised is Outcome.ends, case
                continue
            assert row["outcome"] == row["promised"] == case.promised and not row["problems"]
    assert not found


def test_the_quick_run_has_each_phase_and_each_kind() -> None:
    assert {case.phase for case in quick()} == set(Phase)
    assert {case.kind for case in quick()} == set(Kind)
    for keep in Keep:
        assert {(case.phase, case.rank) for case in cases(keep)} >= {
            (phase, rank) for phase in Phase for rank in (0, 1)
        }


def test_a_table_shows_what_is_other_than_promised() -> None:
    def row(case: Case, **found: Any) -> dict[str, Any]:
        names = ("phase", "kind", "rank", "keep", "at")
        told = {name: getattr(case, name) for name in names}
        given = {
            "outcome": case.promised,
            "seconds": 0.51,
            "ended": None,
            "problems": [],
            "commit": "1a",
        }
        return told | given | found

    hang = Case(Phase.wire, Kind.hang, 1, Keep.never, at=2)
    seen = {
        "environment": {"python": "3"},
        "limits": {"engine.timeout_s": 8.0},
        "cases": [
            row(Case(Phase.wire, Kind.oom, 0, Keep.always)),
            row(Case(Phase.wire, Kind.oom, 1, Keep.always), seconds=0.72),
            row(hang, seconds=12.0, ended=15.5),
            row(Case(Phase.vote, Kind.oom, 1, Keep.never), problems=["it goes on"]),
        ],
    }
    page = fault_table.put_into(f"a\n{fault_table.BEGIN}stale{fault_table.END}\nb\n", seen)
    assert "| wire | goes on |\n" in page and "| wire, later stage | ends |  |" in page
    assert "| vote |  | **other** |" in page and page.startswith("a\n") and "stale" not in page
    report = fault_table.report(seen)
    assert (
        "python 3, commit 1a\n" in report
        and "goes on 0.7 s" in report
        and "ends 12.0 s (15.5 s)" in report
    )
    assert "- never, vote, oom, rank 1: it goes on" in report
    assert hang.promised is Outcome.ends
