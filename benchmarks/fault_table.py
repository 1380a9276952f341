"""Tables of ``fault_matrix.py``, out of its results as they are in its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

BEGIN, END = "<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"
_KEEP = {
    "always": "With `engine.keep_source=always`, where the old state stays until all is done:",
    "never": (
        "With `engine.keep_source=never`, where it goes stage by stage. *Later stage* is with parts"
        " of it gone, and so are `rebuild` and `vote`:"
    ),
}

Row = dict[str, Any]


def for_docs(content: dict[str, Any]) -> str:
    """What the documentation has between its two marks: outcomes, without times."""
    lines: list[str] = []
    for keep, told in _KEEP.items():
        rows = _of(content, keep)
        if rows:
            lines += [told, "", *_grid(rows, lambda cell: _outcome(cell, seconds=False)), ""]
            lines += _not_run(content, rows)
    return "\n".join(lines)


def put_into(page: str, content: dict[str, Any]) -> str:
    """The ``page`` of the documentation with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{for_docs(content)}{END}{after}"


def report(content: dict[str, Any]) -> str:
    """The whole result: how it was made, outcomes with seconds, what was other than promised."""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in content["cases"]))
    made_by = ", ".join(f"{key} {value}" for key, value in content["environment"].items())
    limits = ", ".join(f"{key} {value:g} s" for key, value in content["limits"].items())
    lines = ["# What becomes of a job when a switch fails", "", f"{made_by}, commit {commits}", ""]
    lines += [
        f"Two ranks, both stay. Time limits: {limits}. Seconds are the longest of both ranks'",
        "cases, from the fault until the last rank had its outcome; in brackets, until the rank",
        "that hangs had ended by itself.",
        "",
    ]
    for keep, told in _KEEP.items():
        rows = _of(content, keep)
        if rows:
            good = sum(not row["problems"] for row in rows)
            lines += [told, "", *_grid(rows, lambda cell: _outcome(cell, seconds=True)), ""]
            lines += [f"{good} of {len(rows)} cases as promised.", ""]
    wrong = [row for row in content["cases"] if row["problems"]]
    lines += ["## Other than promised", ""] if wrong else []
    for row in wrong:
        at = f" ({row['at']})" if row["at"] > 1 else ""
        what = f"{row['keep']}, {row['phase']}{at}, {row['kind']}, rank {row['rank']}"
        lines += [f"- {what}: {'; '.join(row['problems'])}"]
    return "\n".join(lines).rstrip() + "\n"


def _not_run(content: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    kinds = dict.fromkeys(row["kind"] for row in content["cases"])
    missing = [kind for kind in kinds if kind not in {row["kind"] for row in rows}]
    return [f"Not run so far: {', '.join(missing)}.", ""] if missing else []


def _of(content: dict[str, Any], keep: str) -> list[Row]:
    return [row for row in content["cases"] if row["keep"] == keep]


def _grid(rows: Sequence[Row], show: Any) -> Iterator[str]:
    """Phases down, kinds across."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    phases = list(dict.fromkeys((row["phase"], row["at"]) for row in rows))
    yield f"| phase | {' | '.join(kinds)} |"
    yield "|---" * (len(kinds) + 1) + "|"
    for phase, at in phases:
        cells = [
            [row for row in rows if (row["phase"], row["at"], row["kind"]) == (phase, at, kind)]
            for kind in kinds
        ]
        name = f"{phase}, later stage" if at > 1 else phase
        yield f"| {name} | {' | '.join(map(show, cells))} |"


def _outcome(cell: Sequence[Row], *, seconds: bool) -> str:
    if not cell:
        return ""
    found = [row["outcome"] if not row["problems"] else "**other**" for row in cell]
    text = ", ".join(dict.fromkeys(str(each) for each in found))
    if not seconds:
        return text
    times = [row["seconds"] for row in cell if row["seconds"] is not None]
    ended = [row["ended"] for row in cell if row["ended"] is not None]
    text += f" {max(times):.1f} s" if times else ""
    return text + (f" ({max(ended):.1f} s)" if ended else "")
