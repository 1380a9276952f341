"""What it costs a job that its processes come and go, on real Megatron jobs of CPU ranks.

    python benchmarks/elastic.py                    # all parts, about twenty minutes
    python benchmarks/elastic.py --quick            # small models, under two minutes
    python benchmarks/elastic.py --parts worlds hooks

Parts, each of which can be run by itself; results of parts that are left out stay in the file:

``worlds``    processes start, import, go through Megatron's prologue and connect to a job, once
              while it stands still (the job is stopped, ``elastic.overlap=off``: the cold cost),
              once while it trains (``elastic.overlap=thread``)::

                  hidden = 1 - stall due to worlds / cold cost

              Beside it the step time lost meanwhile: the sum over all steps since the processes
              were started of what they took beyond the median of the steps before. ``noise`` is
              the largest such sum, of either sign, over as many steps on end before, when nothing
              is built: what is lost is told from nothing only beyond it.
``periodic``  a job that shrinks and grows every so many steps, its processes parked meanwhile,
              beside the same job that never does: losses, and the stall of every switch
``kinds``     the stall of growing, shrinking and migrating beside switches in place
``hooks``     time in the plugin's hooks in a step without a switch, over the step's own

Where there are two cores or more, processes that start later have half of them and the job the
rest, as if they came with a machine of their own. ``gap`` is the time from the last step's end
before a switch to the first one's after it, less the median step there: what an onlooker sees of
``stall``. Writes ``elastic.json``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from elastic_job import Driver, Setting, events_of, losses_of, run, stages_of, steps_of
from elastic_report import draw, line_of, table
from machine import RESULTS, environment

from dynatrain_megatron import platform
from dynatrain_megatron.cli import demo_data

Result = dict[str, Any]
Steps = list[dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family."""

    layers: int
    hidden: int

    def flags(self, iterations: int) -> list[str]:
        """Megatron's flags for it, float32, eight samples a step."""
        return [
            *("--num-layers", str(self.layers), "--hidden-size", str(self.hidden)),
            *("--num-attention-heads", "8", "--group-query-attention", "--num-query-groups", "4"),
            *("--seq-length", "64", "--max-position-embeddings", "64"),
            *("--micro-batch-size", "1", "--global-batch-size", "8"),
            *("--train-iters", str(iterations), "--lr", "1e-3", "--min-lr", "1e-4"),
            *("--lr-decay-style", "cosine", "--lr-decay-iters", str(iterations)),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257"),
            *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
            *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
            *("--attention-dropout", "0", "--hidden-dropout", "0", "--use-distributed-optimizer"),
            *("--log-interval", "1", "--eval-iters", "0", "--eval-interval", "100000"),
            *("--num-workers", "0"),
        ]


class Growth(NamedTuple):
    """From a layout of ``start`` ranks, all data-parallel, to a larger one."""

    start: int
    target: str
    world: int


GROWTHS = [
    Growth(2, "dp4", 4),
    Growth(2, "tp2-dp2", 4),
    Growth(2, "tp2-pp2", 4),
    Growth(4, "dp8", 8),
    Growth(4, "tp2-pp2-dp2", 8),
    Growth(4, "tp2-pp2-cp2", 8),
]
QUICK_GROWTHS = [Growth(2, "tp2-dp2", 4)]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    growths: Sequence[Growth]
    small: Shape
    large: Shape
    steps_before: int  # those after which the processes that join are started
    period: int
    periods: int
    rounds: int


FULL = Size(GROWTHS, Shape(4, 128), Shape(8, 512), 120, 50, 4, 4)
QUICK = Size(QUICK_GROWTHS, Shape(4, 64), Shape(4, 256), 15, 8, 4, 2)
ENDLESS = 20_000


def other_cores() -> frozenset[int]:
    """The cores of processes that start later; none where there is one core only."""
    cores = sorted(os.sched_getaffinity(0))
    return frozenset(cores[len(cores) // 2 :] if len(cores) > 1 else [])


def gaps(steps: Steps) -> list[float]:
    """Seconds between the ends of steps."""
    return [after["at"] - before["at"] for before, after in pairwise(steps)]


def gap_s(steps: Steps, iteration: int) -> float:
    """What was seen of a switch after ``iteration``: time without steps, less an ordinary one."""
    before = [step for step in steps if step["iteration"] <= iteration]
    after = [step for step in steps if step["iteration"] > iteration]
    ordinary = statistics.median(gaps(after[:20])) if len(after) > 2 else 0.0
    return float(after[0]["at"] - before[-1]["at"] - ordinary)


def switch_of(event: dict[str, Any], steps: Steps) -> Result:
    """What is told of one switch."""
    names = ("iteration", "source", "target", "world", "joined", "left", "stall_s", "groups")
    return {
        **{name: event[name] for name in names},
        "seconds": event["seconds"],
        "moved_bytes": event["bytes"]["moved"],
        "gap_s": gap_s(steps, event["iteration"]),
    }


# --------------------------------------------------------------------------------- worlds


def run_worlds(size: Size, folder: Path) -> Iterator[Result]:
    """Each growth, cold and overlapped, in jobs of their own."""
    for number, growth in enumerate(size.growths):
        found = {}
        for overlap in ("off", "thread"):
            setting = Setting(
                [*size.small.flags(ENDLESS), "--mock-data"],
                [f"elastic.overlap={overlap}"],
                folder / f"worlds-{number}-{overlap}",
                growth.start,
                cores=other_cores(),
            )
            begin = cold if overlap == "off" else partial(overlapped, before=size.steps_before)
            found[overlap] = run(setting, lambda d, b=begin, g=growth: b(d, g))
        yield of_growth(growth, found["off"], found["thread"])


def cold(driver: Driver, growth: Growth) -> Result:
    """Processes join while the job stands still."""
    driver.wait_for_steps(5)
    job = range(growth.start)
    driver.signal(job, signal.SIGSTOP)
    try:
        start = started(driver, growth)
    finally:
        driver.signal(job, signal.SIGCONT)
    return {"start": start, "switch": grown(driver, growth)}


def overlapped(driver: Driver, growth: Growth, before: int) -> Result:
    """Processes join while the job trains, after so many steps."""
    driver.wait_for_steps(before)
    begun = time.time()
    start = started(driver, growth)
    event = grown(driver, growth)
    steps = steps_of(driver.setting.directory)
    quiet = gaps([step for step in steps if step["at"] < begun][1:])  # the first one is longer
    since = [step for step in steps if step["at"] >= begun]
    since = [step for step in since if step["iteration"] <= event["iteration"]]
    ordinary = statistics.median(quiet)
    extra = [seconds - ordinary for seconds in gaps(since)]
    return {
        "start": start,
        "switch": event,
        "step_s": ordinary,
        "steps": len(extra),
        "lost_s": sum(extra),
        "noise_s": noise_s([seconds - ordinary for seconds in quiet], len(extra)),
    }


def noise_s(extra: Sequence[float], count: int) -> float:
    """The largest sum, of either sign, of so many on end (of all, where there are fewer)."""
    window = np.ones(min(count, len(extra)))
    return float(np.abs(np.convolve(extra, window, mode="valid")).max())


def started(driver: Driver, growth: Growth) -> Result:
    """Start the processes that are to join; seconds until they wait, as the last of them is."""
    begin = time.time()
    driver.spawn(growth.world - growth.start)
    driver.wait_for_arrivals(growth.world - growth.start)
    end = time.time()
    pids = [process.pid for process in driver.spawned]
    parsed = max(s["parsed"] for s in stages_of(driver.setting.directory, pids))
    return {"import_s": parsed - begin, "prologue_s": end - parsed, "total_s": end - begin}


def grown(driver: Driver, growth: Growth) -> Result:
    """Take those that wait into the job; its switch."""
    event = driver.ask(layout=growth.target, world=growth.world)
    return switch_of(event, steps_of(driver.setting.directory))


def of_growth(growth: Growth, off: Result, thread: Result) -> Result:
    """One growth out of what both jobs found."""
    groups = off["switch"]["seconds"]["groups"]
    cold_s = off["start"]["total_s"] + groups
    stall = thread["switch"]["seconds"]["groups"]
    return {
        **growth._asdict(),
        "cold_s": cold_s,
        "cold": {**off["start"], "groups_s": groups},
        "cold_switch": off["switch"],
        "overlapped": thread,
        "worlds_stall_s": stall,
        "hidden": 1 - stall / cold_s,
        "num_groups": sum(thread["switch"]["groups"][name] for name in ("reused", "created")),
    }


# ------------------------------------------------------------------------------- periodic


def run_periodic(size: Size, folder: Path) -> Iterator[Result]:
    """The same training twice."""
    iterations = size.period * (size.periods + 1)
    data = demo_data.build(folder / "data")
    flags = [
        *size.small.flags(iterations),
        *("--data-path", str(data.prefix), "--split", "100,0,0"),
        *("--tensor-model-parallel-size", "2"),
        *("--null-tokenizer-eod-id", str(demo_data.END_OF_DOCUMENT)),
    ]
    schedule = ", ".join(
        f"{{iteration: {size.period * k}, layout: {{tp: 2, world: {2 if k % 2 else 4}}}}}"
        for k in range(1, size.periods + 1)
    )
    found = {}
    for name, own in (("static", []), ("switched", [f"schedule=[{schedule}]"])):
        setting = Setting(flags, ["elastic.on_leave=park", *own], folder / name, 4)
        run(setting, lambda driver: until(driver, iterations))
        found[name] = setting.directory
    steps = steps_of(found["switched"])
    losses = {name: losses_of(directory) for name, directory in found.items()}
    static, switched = ([step["loss"] for step in losses[name]] for name in found)
    apart = [abs(a - b) / abs(a) for a, b in zip(static, switched, strict=True)]
    yield {
        "period": size.period,
        "iterations": iterations,
        "switches": [switch_of(event, steps) for event in events_of(found["switched"])],
        "losses": {"static": static, "switched": switched},
        "most_apart": max(apart),
        "most_apart_in_20": max(apart[: size.period + 20]),
        "hooks": hooks_of(found["static"], 4),
    }


def until(driver: Driver, iteration: int) -> None:
    """Wait for the job to have trained so far."""
    directory = driver.setting.directory
    driver.wait_until(f"iteration {iteration}", lambda: len(losses_of(directory)) >= iteration)


# ------------------------------------------------------------------------ kinds and hooks


def run_kinds(size: Size, folder: Path) -> Iterator[Result]:
    """Switches in place, growing and shrinking in one job; migrations in another."""
    flags = [*size.large.flags(ENDLESS), "--mock-data"]
    park = Setting(flags, ["elastic.on_leave=park"], folder / "kinds", 2, 2)
    yield from run(park, lambda driver: in_turn(driver, size.rounds))
    leave = Setting(flags, [], folder / "migrate", 2, 2 * size.rounds)
    yield from run(leave, lambda driver: migrated(driver, size.rounds))


def in_turn(driver: Driver, rounds: int) -> list[Result]:
    """In place on two ranks and on four, and between the two."""
    driver.wait_for_steps(5)
    driver.let_start(2, 3)
    driver.wait_for_arrivals(2)
    turn = [
        ("in place, 2 ranks", "tp2", 2),
        ("grow", "tp2-dp2", 4),
        ("in place, 4 ranks", "dp4", 4),
        ("shrink", "dp2", 2),
    ]
    found = []
    for number in range(rounds):
        for kind, layout, world in turn:
            event = driver.ask(layout=layout, world=world)
            steps = steps_of(driver.setting.directory)
            found.append({"kind": kind, "round": number, **switch_of(event, steps)})
    return found


def migrated(driver: Driver, rounds: int) -> list[Result]:
    """Both processes are told to leave while two others wait; again with those."""
    found: list[Result] = []
    driver.wait_for_steps(5)
    for number in range(rounds):
        old, new = (range(2 * n, 2 * n + 2) for n in (number, number + 1))
        driver.let_start(*new)
        driver.wait_for_arrivals(2 * number + 2)
        driver.wait_for_steps(5)
        before = len(driver.events())
        driver.signal(old, signal.SIGTERM)
        driver.wait_until(
            "both have left",
            lambda n=before: sum(event["left"] for event in driver.events()[n:]) == 2,
        )
        driver.wait_for_steps(2)
        steps = steps_of(driver.setting.directory)
        found += [
            {"kind": f"migrate, {event['left']} of 2", "round": number, **switch_of(event, steps)}
            for event in driver.events()[before:]
        ]
    return found


def run_hooks(size: Size, folder: Path) -> Iterator[Result]:
    """Two ranks that only train, for the smaller and the larger model."""
    for name, shape, count in (("small", size.small, 100), ("large", size.large, 25)):
        flags = [*shape.flags(ENDLESS), "--mock-data"]
        setting = Setting(flags, [], folder / f"hooks-{name}", 2)
        run(setting, lambda driver, n=count: driver.wait_for_steps(n))
        yield {
            "model": f"{shape.layers} layers of {shape.hidden}",
            **hooks_of(setting.directory, 2),
        }


def hooks_of(directory: Path, world: int) -> Result:
    """Time in hooks, and of the plugin's thread, over step time; of the rank that has the most."""
    ranks = []
    for rank in range(world):
        steps = steps_of(directory, rank)[3:]
        step_s = statistics.median(gaps(steps))
        ranks.append(
            {
                "step_s": step_s,
                "hooks_s": statistics.mean(step["hooks_s"] for step in steps),
                "thread_s": (steps[-1]["thread_s"] - steps[0]["thread_s"]) / (len(steps) - 1),
            }
        )
    worst = max(ranks, key=lambda one: one["hooks_s"])
    return {**worst, "share": worst["hooks_s"] / worst["step_s"], "steps": len(steps)}


# -------------------------------------------------------------------------------- all parts


def rounded(value: Any) -> Any:
    """Floats to nine digits, in all of a tree."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


Part = Callable[[Size, Path], Iterator[Result]]
PARTS: dict[str, Part] = {
    "worlds": run_worlds,
    "periodic": run_periodic,
    "kinds": run_kinds,
    "hooks": run_hooks,
}


def main() -> int:
    """Measure the parts asked for and write them beside those of earlier runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small models, under two minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    platform.install("cpu")  # before Megatron is imported
    size = QUICK if args.quick else FULL
    where = environment("torch", "megatron-core", "numpy")
    where["cores of later processes"] = len(other_cores())
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / ("elastic_quick" if args.quick else "elastic")
    file = stem.with_suffix(".json")
    content = json.loads(file.read_text()) if file.exists() else {}
    for part in args.parts:
        results: list[Result] = []
        content[part] = {"environment": where, "results": results}
        with tempfile.TemporaryDirectory() as folder:
            for result in PARTS[part](size, Path(folder)):
                results.append(rounded(result))
                print(line_of(part, result), flush=True)
                file.write_text(json.dumps(content, indent=1) + "\n")
        stem.with_suffix(".md").write_text(table(content))
    with contextlib.suppress(ImportError):
        draw(content, stem.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for what tests have, too
    sys.exit(main())
