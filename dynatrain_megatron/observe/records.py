"""JSON-lines records in the run directory, and the progress line on rank 0."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"
STEPS = "steps.jsonl"


class RunLog:
    """Appends one JSON object a line to files of one run directory, made on first use.

    Local: the caller decides which rank writes what (events: rank 0; steps: the last rank).
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)

    def event(self, name: str, **fields: Any) -> None:
        """Append ``{"event": name, "time": now, ...}`` to events.jsonl; ISO 8601, UTC."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._append(EVENTS, {"event": name, "time": now, **fields})

    def step(self, **fields: Any) -> None:
        """Append one training step to steps.jsonl."""
        self._append(STEPS, fields)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def progress(rank: int, message: str) -> None:
    """Print one line on rank 0, as Megatron's own progress lines are."""
    if rank == 0:
        print(f"[dynatrain] {message}", flush=True)
