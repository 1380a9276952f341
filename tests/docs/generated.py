"""What is in docs/ because something else says so: tables of options and results, a picture.

``pytest tests/docs --write-docs`` brings the files up to date.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dynatrain_megatron.adapters.support import OPTIONS, Fate
from tests.docs import pictures
from tests.docs.pages import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "switch_time.json"
PHASES = ROOT / "docs" / "rlhf-phases.md"
OPTIONS_PAGE = ROOT / "docs" / "options.md"
PICTURE = ROOT / "docs" / "images" / "vps.svg"


def generated() -> dict[Path, str]:
    """Each such file as it should be."""
    return {
        PICTURE: pictures.vps(),
        PHASES: _with_part(PHASES.read_text(), "measured", _measured()),
        OPTIONS_PAGE: _with_part(OPTIONS_PAGE.read_text(), "options", _options()),
    }


def _with_part(text: str, name: str, part: str) -> str:
    """``text`` with ``part`` between the marks of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"no {begin.strip()} and {end} in the page"
    return f"{before}{begin}{part}{end}{after}"


def _options() -> str:
    """By what a switch does to them."""
    rows = [row for fate in Fate for row in OPTIONS if row.fate is fate]
    head = "| option | flag | a switch | how, or why |\n|---|---|---|---|\n"
    return head + "".join(
        f"| {row.what} | `{row.flag}` | {row.fate} | {row.how} |\n" for row in rows
    )


def _measured() -> str:
    content = json.loads(RESULTS.read_text())
    head = ["model", "layouts", "moved", "first", "again", "back again", "least", "most"]
    names = {
        "least": "verifying, of *again*",
        "most": "save + load of a checkpoint in memory ÷ *again*",
    }
    lines = [
        "| " + " | ".join(names.get(name, name) for name in head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in (*_rows(content["sizes"]), *_rows(content["peers"])):
        lines.append(f"| {' | '.join(row)} |")
    made_by = content["peers"]["environment"]
    told = (
        f"\n{made_by['cores']} cores, no GPU, torch {made_by['torch']}, megatron-core "
        f"{made_by['megatron-core']}, commit {made_by['commit']}; four ranks share the cores. "
        "Medians of repeated switches, seconds.\n"
    )
    return "\n".join(lines) + "\n" + told


def _rows(part: dict[str, Any]) -> Iterator[list[str]]:
    for result in part["results"]:
        there, back = (result["switches"]["ours"][way] for way in ("there", "back"))
        checkpoint = result.get("checkpoint")
        saved = (
            sum(checkpoint["memory"][name] for name in ("save_s", "load_s")) if checkpoint else 0
        )
        yield [
            f"{result['family']} {result['model']}",
            f"{result['source']} ↔ {result['target']}",
            f"{statistics.mean((there['bytes']['moved'], back['bytes']['moved'])) / 1e6:,.0f} MB",
            f"{there['first_s']:.2f}",
            f"{there['repeated_s']:.2f}",
            f"{back['repeated_s']:.2f}",
            f"{there['seconds']['verify'] / there['repeated_s']:.0%}",
            f"{saved / there['repeated_s']:.1f}" if saved else "",
        ]
