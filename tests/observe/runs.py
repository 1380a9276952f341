"""Run folders for the tests of reports: a recorded one, and ones written in the same format."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# A demo's switched run with four switches on four ranks, and the static run beside it.
RECORDED = Path(__file__).parent / "data"
RECORDED_STATIC = RECORDED / "static"

HOSTILE = '<img src="x" onerror="alert(1)">&amp;</td></table>$\\frac{1}$'


def switch(iteration: int = 2, **changes: Any) -> dict[str, Any]:
    """A switch as a run writes it."""
    event = {
        "event": "switch",
        "time": "2026-11-30T10:20:05.123+00:00",
        "iteration": iteration,
        "source": "tp2-dp2",
        "target": "pp2-dp2",
        "seconds": {"quiesce": 0.5, "verify": 0.25, "pack": 0.125, "wire": 0.0625},
        "bytes": {"moved": 3000, "lower_bound": 2000, "retained": 1000, "rebuilt": 0},
        "groups": {"reused": 0, "created": 23, "destroyed": 22},
        "ops": 8,
        "rounds": 1,
        "schedule": "direct",
        "predicted_s": 0.05,
        "stages": 3,
        "keep_source": "never",
        "verify": "fingerprint",
        "peak_extra_bytes": 4000,
        "planned_peak_extra_bytes": 5000,
        "bound_peak_extra_bytes": 8000,
        "placement": {"bytes": {"best": 1200, "identity": 3000}},
        "origin": "request",
        "world": 2,
        "joined": 1,
        "left": 2,
        "fingerprint": {"before": "880935e7630dc38f", "after": "880935e7630dc38f"},
        "bytes_matrix": [[500, 1500], [1500, 500]],
        "nodes": [0, 1],
        "ok": True,
        "stall_s": 1.25,
    }
    return event | changes


def refused(iteration: int = 3, **changes: Any) -> dict[str, Any]:
    """A refused request as a run writes it."""
    event = {
        "event": "refused",
        "time": "2026-11-30T10:21:05.123+00:00",
        "iteration": iteration,
        "source": "tp2-dp2",
        "target": '{"tp": 3}',
        "ok": False,
        "called_off": False,
        "reason": "tp*pp*cp=3*1*1=3 must divide world=4 (4 mod 3 = 1)",
        "next_step": "the job stays in layout tp2-dp2",
    }
    return event | changes


def steps(losses: Iterable[float | None], first: int = 1) -> list[dict[str, Any]]:
    """Training steps with these losses."""
    return [
        {"iteration": i, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, "layout": "tp2-dp2"}
        for i, loss in enumerate(losses, start=first)
    ]


def write_lines(path: Path, records: Iterable[Mapping[str, Any]], torn: str = "") -> None:
    """A JSON-lines file, with ``torn`` as a last line without its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + torn)


def write_run(
    directory: Path,
    events: Iterable[Mapping[str, Any]] | None,
    losses: Iterable[float | None] | None = (4.0, 3.0, 2.0, 1.0),
    torn: str = "",
) -> Path:
    """A run folder; None leaves a file out. ``torn`` goes to the end of both files."""
    if events is not None:
        write_lines(directory / "events.jsonl", events, torn)
    if losses is not None:
        write_lines(directory / "steps.jsonl", steps(losses), torn)
    return directory
