"""The support table: what was switched along which axes, as the tests themselves found it.

A test that compared switches calls the fixture ``support`` at its end. What it says must be what
``docs/support.json`` has, from which the table in docs/support.md is made; run the tests with
``--write-support`` to bring both up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from dynatrain_megatron.layout import ParallelLayout

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "docs" / "support.json"
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"

AXES = {
    "tp": "TP",
    "pp": "PP",
    "vpp": "VPP",
    "pipeline": "stages",
    "cp": "CP",
    "ep": "EP",
    "etp": "ETP",
    "dp": "DP",
    "sp": "SP",
    "dist_opt": "opt",
    "instances": "inst.",
    "order": "order",
    "mbs": "mbs",
}
"""Fields of a layout and the heads of their columns."""


class How(StrEnum):
    """How the switches of a row were tested."""

    TRAINED = "trained on CPU"
    MOVED = "state moved and compared, not trained"
    REFUSED = "GPU/TE only: refused by name"


Row = dict[str, Any]


def row(how: How, test: str, pairs: Iterable[tuple[str, str]] = ()) -> Row:
    """What a test found: how often each axis changed between the layouts of ``pairs``."""
    known = sorted(set(pairs))
    changed = dict.fromkeys(AXES, 0)
    for source, target in known:
        for axis in changed_axes(ParallelLayout.parse(source), ParallelLayout.parse(target)):
            changed[axis] += 1
    layouts = {layout for pair in known for layout in pair}
    axes = {axis: count for axis, count in changed.items() if count}
    return {
        "how": str(how),
        "test": test,
        "layouts": len(layouts),
        "pairs": len(known),
        "axes": axes,
    }


def changed_axes(source: ParallelLayout, target: ParallelLayout) -> list[str]:
    """Fields in which two layouts differ; etp only where experts are cut in another way."""
    axes = [axis for axis in AXES if getattr(source, axis) != getattr(target, axis)]
    if all(layout.ep == 1 and layout.etp == layout.tp for layout in (source, target)):
        axes = [axis for axis in axes if axis != "etp"]
    return axes


def load() -> dict[str, Row]:
    """The recorded rows."""
    rows: dict[str, Row] = json.loads(RECORDED.read_text())
    return rows


def write(found: Mapping[str, Row]) -> None:
    """Record ``found`` over what is recorded, and the table of all in the page."""
    rows = dict(sorted((load() | dict(found)).items()))
    RECORDED.write_text(json.dumps(rows, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{after}")


def table(rows: Mapping[str, Row]) -> str:
    """The rows as Markdown, by how they were tested; a dot where an axis changed in a pair."""
    used = [axis for axis in AXES if any(axis in row["axes"] for row in rows.values())]
    heads = ["", "layouts", "pairs", *(AXES[axis] for axis in used)]
    lines = []
    for how in How:
        chosen = {name: row for name, row in rows.items() if row["how"] == how}
        if not chosen:
            continue
        lines += [f"**{str(how)[0].upper()}{str(how)[1:]}**", ""]
        if how is How.REFUSED:
            lines += [*(f"- {name}" for name in chosen), ""]
            continue
        lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for name, row in chosen.items():
            dots = ["•" if axis in row["axes"] else "" for axis in used]
            cells = [name, str(row["layouts"]), str(row["pairs"]), *dots]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
