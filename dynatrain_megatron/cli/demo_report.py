"""What the demo found: the two runs compared, as a table for people and as JSON for programs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dynatrain_megatron.errors import DynaTrainError
from dynatrain_megatron.observe.records import EVENTS, STEPS
from dynatrain_megatron.observe.report import Refusal, Run, Switch, finite, relative_difference
from dynatrain_megatron.observe.units import duration, size

TOLERANCE = 1e-6
"""How far a loss may be from the never-switched run's, relative to it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The switched run beside the static one.

    Differences of losses are relative to the static run, NaN where a loss is not a number. Each
    switch has with it the largest over the steps in its target layout.
    """

    iterations: int
    switches: tuple[tuple[Switch, float], ...]
    first_loss: float
    last_loss: float
    max_loss_difference: float

    @property
    def agrees(self) -> bool:
        """Whether every loss is within TOLERANCE; a NaN never is."""
        return self.max_loss_difference <= TOLERANCE


def compare(static: Run, switched: Run, *, iterations: int, switches: int) -> Comparison:
    """Compare two runs of so many steps, of which one made so many switches.

    Raises DynaTrainError where a run lacks steps, or a switch that was asked for did not happen.
    """
    losses, own = _losses(static, iterations), _losses(switched, iterations)
    difference = {at: relative_difference(own[at], loss) for at, loss in losses.items()}
    made = _made(switched, switches)
    # A switch at N is made after step N; its layout ends with the step of the next switch.
    ends = [*(switch.iteration for switch in made[1:]), iterations]
    return Comparison(
        iterations=iterations,
        switches=tuple(
            (switch, _largest(difference[at] for at in range(switch.iteration + 1, end + 1)))
            for switch, end in zip(made, ends, strict=True)
        ),
        first_loss=losses[1],
        last_loss=losses[iterations],
        max_loss_difference=_largest(difference.values()),
    )


def as_json(result: Comparison, runs: Mapping[str, Path], seconds: float) -> dict[str, Any]:
    """The comparison as plain data; what is not a finite number becomes null."""
    return {
        "agrees": result.agrees,
        "tolerance": TOLERANCE,
        "iterations": result.iterations,
        "max_loss_difference": finite(result.max_loss_difference),
        "first_loss": finite(result.first_loss),
        "last_loss": finite(result.last_loss),
        "seconds": round(seconds, 1),
        "runs": {name: str(path) for name, path in runs.items()},
        "switches": [
            {
                "iteration": switch.iteration,
                "source": switch.source,
                "target": switch.target,
                "stall_s": switch.stall_s,
                "bytes_moved": switch.moved,
                "bytes_lower_bound": switch.lower_bound,
                "bytes_ratio": finite(switch.bytes_ratio),
                "max_loss_difference": finite(difference),
            }
            for switch, difference in result.switches
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
    for switch, difference in result.switches:
        table.add_row(
            str(switch.iteration),
            switch.source,
            switch.target,
            _told(switch.stall_s, duration),
            _told(switch.moved, size),
            _told(switch.bytes_ratio, "{:.3f}".format),
            f"{difference:.1e}",
        )
    console.print(table)
    verdict = "[green]agree[/]" if result.agrees else "[bold red]DIFFER[/]"
    console.print(
        f"Losses {verdict}: the largest relative difference from the run that never switched is "
        f"{result.max_loss_difference:.1e} (limit {TOLERANCE:.0e}).",
        soft_wrap=True,
        highlight=False,
    )


def _losses(run: Run, iterations: int) -> dict[int, float]:
    """Loss by iteration, for every iteration from 1 on."""
    found = {step.iteration: step.loss for step in run.steps}
    if list(found) != list(range(1, iterations + 1)):
        raise DynaTrainError(
            f"{run.directory / STEPS} should have the steps 1 to {iterations}, but has "
            f"{_abbreviate(list(found))}"
        )
    return found


def _made(run: Run, expected: int) -> list[Switch]:
    """The switches of a run; raises DynaTrainError unless all that were expected were made."""
    made = [switch for switch in run.switches if switch.ok]
    if len(made) != expected:
        others = (event for event in run.events if event not in made)
        told = "".join(f"\n    iteration {each.iteration}: {_why_not(each)}" for each in others)
        raise DynaTrainError(
            f"{len(made)} of {expected} switches were made; see {run.directory / EVENTS}{told}"
        )
    return made


def _why_not(event: Switch | Refusal) -> str:
    return event.error if isinstance(event, Switch) else f"{event.reason}; {event.next_step}"


def _largest(values: Iterable[float]) -> float:
    """max(), but NaN as soon as one value is NaN."""
    listed = list(values)
    return math.nan if any(map(math.isnan, listed)) else max(listed, default=0.0)


def _told[T](value: T | None, how: Callable[[T], str]) -> str:
    return "–" if value is None else how(value)


def _abbreviate(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"{len(numbers)} ({', '.join(map(str, numbers[:8]))}{', …' * (len(numbers) > 8)})"
