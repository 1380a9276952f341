"""Train a small Llama-shaped model on 4 CPU ranks twice, and compare.

The first run keeps its layout; the second changes it four times while it trains, in memory:
TP2·DP2 → PP2·DP2 → TP4 → PP4 → DP4. The text is Python's own standard library. Shown are, for
each switch, how long training stood still, the bytes moved against the least possible, and how
far the losses are from the run that never switched. Takes one to two minutes on two cores.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dynatrain_megatron import __version__
from dynatrain_megatron.cli import demo_data, demo_report, demo_runs
from dynatrain_megatron.errors import ConfigError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe.report import ChartsUnavailable, Run, Step, read_run, write_report

SUMMARY = "train twice on CPU ranks, once with four layout switches, and compare"

WORLD = 4
LAYOUTS = tuple(ParallelLayout.parse(text) for text in ("tp2-dp2", "pp2-dp2", "tp4", "pp4", "dp4"))
RUNS = ("static", "switched")
REPORT = "report"
MARKER = "demo.json"
"""Kept in the output folder: says that the folder is the demo's, and holds the last result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain demo`."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("dynatrain-demo"),
        metavar="DIR",
        help="folder for data, runs and logs; an earlier demo's runs in it are replaced"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--iterations",
        type=_iterations,
        default=30,
        metavar="N",
        help=f"training steps of each run, at least {len(LAYOUTS)} (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 where all losses agree, 1 where they do not."""
    started = time.monotonic()
    progress = Console(stderr=True)
    out: Path = args.out.absolute()
    claim_folder(out)
    schedule = plan_schedule(args.iterations)
    with progress.status("Writing the training text …"):
        dataset = demo_data.build(out / "data")
    progress.print(
        f"Training text: {dataset.documents} modules of Python's standard library, "
        f"{dataset.tokens:,} byte tokens",
        highlight=False,
    )
    runs = {name: out / name for name in RUNS}
    for name, directory in runs.items():
        job = demo_runs.make_job(
            name,
            directory,
            dataset=dataset,
            layout=LAYOUTS[0],
            iterations=args.iterations,
            schedule=schedule if name == "switched" else (),
        )
        with _shown(progress, job.name, args.iterations) as reporter:
            demo_runs.run_job(job, reporter.step)
    static, switched = (read_run(runs[name]) for name in RUNS)
    result = demo_report.compare(
        static, switched, iterations=args.iterations, switches=len(schedule)
    )
    report = _write_report(switched, static, out / REPORT, progress)
    told = demo_report.as_json(result, runs, time.monotonic() - started)
    told["report"] = None if report is None else str(report)
    (out / MARKER).write_text(json.dumps({"dynatrain": __version__, "result": told}, indent=2))
    if args.json:
        print(json.dumps(told, indent=2))
    else:
        _print_result(result, runs, told["seconds"])
        if report is not None:
            print(f"Report, with charts: {report}")
    return 0 if result.agrees else 1


def plan_schedule(iterations: int) -> list[tuple[int, ParallelLayout]]:
    """When to switch to which layout, so that every layout has about as many steps."""
    return [
        (position * iterations // len(LAYOUTS), layout)
        for position, layout in enumerate(LAYOUTS)
        if position > 0
    ]


def claim_folder(out: Path) -> None:
    """Make `out`, or take over an earlier demo's: its runs go, its data stay.

    Raises ConfigError for a folder with other things in it, which the demo must not touch.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is not a folder; name a new or an empty one")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise ConfigError(
            f"--out {out} is not empty and was not made by this demo; name a new or an empty one"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text(json.dumps({"dynatrain": __version__}))
    for name in (*RUNS, REPORT):
        shutil.rmtree(out / name, ignore_errors=True)


def _iterations(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    if int(text) < len(LAYOUTS):
        raise argparse.ArgumentTypeError(
            f"{text} is too few: {len(LAYOUTS)} layouts need a step each"
        )
    return int(text)


def _write_report(switched: Run, static: Run, out: Path, progress: Console) -> Path | None:
    """The page of the switched run beside the static one; None, and why, without matplotlib."""
    try:
        with progress.status("Drawing the report …"):
            return write_report(switched, static, out).page
    except ChartsUnavailable as error:
        progress.print(f"No report: {error}", highlight=False, soft_wrap=True)
        return None


def _print_result(result: demo_report.Comparison, runs: dict[str, Path], seconds: float) -> None:
    # Where nobody looks at a terminal, its width is a guess: leave the lines whole.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    demo_report.print_table(console, result)
    console.print(
        f"Loss {result.first_loss:.3f} → {result.last_loss:.3f}; {seconds:.0f} s in all. "
        f"Events, steps and logs: {runs['static']} and {runs['switched']}",
        soft_wrap=True,
        highlight=False,
    )


# ---------------------------------------------------------------- progress


class _Bar:
    """A progress bar on a terminal."""

    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress = progress
        self._name = name
        self._task = progress.add_task(f"{name}: starting {WORLD} ranks", total=total)

    def step(self, step: Step) -> None:
        """Move the bar on and show the layout in force."""
        self._progress.update(
            self._task,
            completed=step.iteration,
            description=f"{self._name}: {step.layout}, loss {step.loss:.3f}",
        )


class _Lines:
    """A line now and then, where the output is not a terminal."""

    INTERVAL_S = 10.0

    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console = console
        self._name = name
        self._total = total
        self._layout = ""
        self._last = 0.0
        self._say(f"starting {WORLD} ranks")

    def step(self, step: Step) -> None:
        """Tell of the first step in a layout, of the last step, and of one in a while."""
        overdue = time.monotonic() - self._last > self.INTERVAL_S
        if overdue or step.layout != self._layout or step.iteration == self._total:
            self._layout = step.layout
            self._say(
                f"step {step.iteration}/{self._total}, layout {step.layout}, loss {step.loss:.3f}"
            )

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(f"{self._name}: {text}", highlight=False, soft_wrap=True)


@contextmanager
def _shown(console: Console, name: str, total: int) -> Iterator[_Bar | _Lines]:
    """Progress of one run, in the form that fits where it is shown."""
    if not console.is_terminal:
        yield _Lines(console, name, total)
        return
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, name, total)
