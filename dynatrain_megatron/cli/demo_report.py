"""What the demo found: the two runs compared, as a table for people and as JSON for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dynatrain_megatron.cli.demo_runs import Step, parse_step
from dynatrain_megatron.errors import DynaTrainError
from dynatrain_megatron.observe.report import relative_difference
from dynatrain_megatron.observe.units import duration, size

TOLERANCE = 1e-6
"""How far a loss may be from the never-switched run's, relative to it."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch as events.jsonl tells it, and how the steps after it compare.

    `max_loss_difference` is relative to the static run, the largest over the steps in the target
    layout; NaN where a loss is not a number.
    """

    iteration: int
    source: str
    target: str
    stall_s: float
    bytes_moved: int
    bytes_lower_bound: int
    max_loss_difference: float

    @property
    def bytes_ratio(self) -> float:
        """Bytes moved by the lower bound; 1 where nothing had to move and nothing did."""
        if self.bytes_lower_bound == 0:
            return 1.0 if self.bytes_moved == 0 else math.inf
        return self.bytes_moved / self.bytes_lower_bound


@dataclass(frozen=True, slots=True)
class Comparison:
    """The switched run beside the static one."""

    iterations: int
    switches: tuple[Switch, ...]
    first_loss: float
    last_loss: float
    max_loss_difference: float

    @property
    def agrees(self) -> bool:
        """Whether every loss is within TOLERANCE; a NaN never is."""
        return self.max_loss_difference <= TOLERANCE


def compare(static_dir: Path, switched_dir: Path, *, iterations: int, switches: int) -> Comparison:
    """Read both run folders and compare them.

    Raises DynaTrainError where a run lacks steps, or a switch that was asked for did not happen.
    """
    static = _read_losses(static_dir, iterations)
    switched = _read_losses(switched_dir, iterations)
    difference = {
        iteration: relative_difference(switched[iteration], loss)
        for iteration, loss in static.items()
    }
    events = _read_switch_events(switched_dir, switches)
    # A switch at N is made after step N; its layout ends with the step of the next switch.
    ends = [int(event["iteration"]) for event in events[1:]] + [iterations]
    rows = []
    for event, end in zip(events, ends, strict=True):
        start = int(event["iteration"])
        rows.append(
            Switch(
                iteration=start,
                source=event["source"],
                target=event["target"],
                stall_s=float(event["stall_s"]),
                bytes_moved=int(event["bytes"]["moved"]),
                bytes_lower_bound=int(event["bytes"]["lower_bound"]),
                max_loss_difference=_largest(difference[i] for i in range(start + 1, end + 1)),
            )
        )
    return Comparison(
        iterations=iterations,
        switches=tuple(rows),
        first_loss=static[1],
        last_loss=static[iterations],
        max_loss_difference=_largest(difference.values()),
    )


def as_json(result: Comparison, runs: Mapping[str, Path], seconds: float) -> dict[str, Any]:
    """The comparison as plain data; what is not a finite number becomes null."""
    return {
        "agrees": result.agrees,
        "tolerance": TOLERANCE,
        "iterations": result.iterations,
        "max_loss_difference": _finite(result.max_loss_difference),
        "first_loss": _finite(result.first_loss),
        "last_loss": _finite(result.last_loss),
        "seconds": round(seconds, 1),
        "runs": {name: str(path) for name, path in runs.items()},
        "switches": [
            {
                "iteration": switch.iteration,
                "source": switch.source,
                "target": switch.target,
                "stall_s": switch.stall_s,
                "bytes_moved": switch.bytes_moved,
                "bytes_lower_bound": switch.bytes_lower_bound,
                "bytes_ratio": _finite(switch.bytes_ratio),
                "max_loss_difference": _finite(switch.max_loss_difference),
            }
            for switch in result.switches
        ],
    }


def print_table(console: Console, result: Comparison) -> None:
    """One row for each switch, then one line that says whether the losses agree."""
    framed = console.is_terminal
    table = Table(box=box.ROUNDED if framed else None, pad_edge=framed)
    for name in ("iteration", "from", "to"):
        table.add_column(name, no_wrap=True, justify="right" if name == "iteration" else "left")
    for name in ("stall", "bytes moved", "÷ lower bound", "largest loss difference"):
        table.add_column(name, no_wrap=True, justify="right")
    for switch in result.switches:
        table.add_row(
            str(switch.iteration),
            switch.source,
            switch.target,
            duration(switch.stall_s),
            size(switch.bytes_moved),
            f"{switch.bytes_ratio:.3f}",
            f"{switch.max_loss_difference:.1e}",
        )
    console.print(table)
    verdict = "[green]agree[/]" if result.agrees else "[bold red]DIFFER[/]"
    console.print(
        f"Losses {verdict}: the largest relative difference from the run that never switched is "
        f"{result.max_loss_difference:.1e} (limit {TOLERANCE:.0e}).",
        soft_wrap=True,
        highlight=False,
    )


def _read_losses(directory: Path, iterations: int) -> dict[int, float]:
    """Loss by iteration, for every iteration from 1 on."""
    steps: list[Step] = [parse_step(record) for record in _read_lines(directory / "steps.jsonl")]
    found = [step.iteration for step in steps]
    if found != list(range(1, iterations + 1)):
        raise DynaTrainError(
            f"{directory / 'steps.jsonl'} should have one line for each of the steps 1 to "
            f"{iterations}, but has {_abbreviate(found)}"
        )
    return {step.iteration: step.loss for step in steps}


def _read_switch_events(directory: Path, expected: int) -> list[dict[str, Any]]:
    """The switches of a run; raises DynaTrainError unless all that were expected were made."""
    events = _read_lines(directory / "events.jsonl")
    made = [event for event in events if event["event"] == "switch" and event["ok"]]
    if len(made) != expected:
        told = "".join(f"\n    {_why_not(e)}" for e in events if not e.get("ok", True))
        raise DynaTrainError(
            f"{len(made)} of {expected} switches were made; see {directory / 'events.jsonl'}{told}"
        )
    return made


def _why_not(event: Mapping[str, Any]) -> str:
    """One line on a switch that was refused or failed."""
    if event["event"] != "refused":
        return json.dumps(event)
    return f"iteration {event['iteration']}: {event['reason']}; {event['next_step']}"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DynaTrainError(f"the run ended without writing {path}")
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _largest(values: Any) -> float:
    """max(), but NaN as soon as one value is NaN."""
    listed: Sequence[float] = list(values)
    return math.nan if any(map(math.isnan, listed)) else max(listed, default=0.0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _abbreviate(numbers: Sequence[int]) -> str:
    return f"{len(numbers)} lines ({', '.join(map(str, numbers[:8]))}{', …' * (len(numbers) > 8)})"
