"""Two hundred switches in one job: nothing that a process holds grows with their number.

The job goes round one closed walk among its layouts again and again. Some of them it comes back to
while their groups and objects are kept, others had to go meanwhile. At the start of each round it
holds the same as a round before. Workers that load data are forked anew in each layout, which takes
longer than all else, so the longest run has none.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron import platform
from tests.host import around, tours
from tests.ranks import TINY_LLAMA, run_megatron

# With room for two layouts beside the one in force.
WALK = [
    *("dp2", "tp2", "dp2", "pp2", "tp2-sp"),
    *("pp2", "pp2-vpp2", "cp2", "pp2-vpp2", "tp2"),
]
FLAGS = [
    *(*TINY_LLAMA, "--use-distributed-optimizer", "--hidden-size", "32", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--global-batch-size", "2"),
    *("--vocab-size", "200", "--log-interval", "50"),
]
# Keys are forgotten, and connections closed, beside training: a few may still be there.
ROOM = {"keys": 30, "files": 3}
BYTES_A_SWITCH = 50e3
NAMES_OF_A_WORLD = 48


def note_what_is_held(directory: Path) -> None:
    """At the start of each round a line of what this process holds goes to a file; on each rank."""
    from dynatrain_megatron.plugin import session

    real, switches = session.switch, itertools.count()

    def noted(job: Any, *args: Any) -> Any:
        if next(switches) % len(WALK) == 0:
            gc.collect()
            with (directory / f"held-{job.args.rank}.jsonl").open("a") as file:
                file.write(json.dumps(held(job)) + "\n")
        return real(job, *args)

    session.switch = noted


def held(job: Any) -> dict[str, int]:
    """What the system, torch and the job's store have of this process."""
    from dynatrain_megatron.elastic import records

    store = job.store.address.connect(timeout_s=30)
    worlds = store.add("dynatrain/worlds", 0)
    keys = store.list_keys()
    if job.args.rank == 0:
        print(f"{worlds} worlds so far, {len(keys)} keys: {sorted(keys)}")
    return {
        "groups": len(records.in_force().pg_map),
        "names": sum(map(is_registered, names_of(worlds))),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "processes": num_children(),
        "excepthooks": depth_of(sys.excepthook),
        "keys": len(keys),
        "bytes": resident_bytes(),
    }


def names_of(worlds: int) -> list[str]:
    """What torch called the groups of so many worlds."""
    from dynatrain_megatron.elastic.world import _NAMES_PER_WORLD

    firsts = [world * _NAMES_PER_WORLD for world in range(worlds + 1)]
    return [str(first + n) for first in firsts for n in range(NAMES_OF_A_WORLD)]


def is_registered(name: str) -> bool:
    """Whether C++ knows a group of this name."""
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name) is not None
    except RuntimeError:
        return False


def num_children() -> int:
    """Processes that this one has started, and that have not ended."""
    tasks = Path("/proc/self/task").glob("*/children")
    return sum(len(path.read_text().split()) for path in tasks)


def depth_of(hook: Any) -> int:
    """How many functions are wrapped around each other."""
    cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return 1 + max((depth_of(cell) for cell in cells if callable(cell)), default=0)


def resident_bytes() -> int:
    """Memory of this process's own, in bytes, without what the allocator can give back."""
    platform.current().empty_cache()
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["RssAnon"].split()[0])


@pytest.mark.host
@pytest.mark.slow
def test_two_hundred_switches_leave_nothing_behind(tmp_path: Path) -> None:
    for rank, lines in enumerate(rounds_of(20, tmp_path)):
        values = [line["bytes"] for line in lines[6:]]
        grown = growth(values) / len(WALK)
        print(f"rank {rank} grew by {grown:.0f} bytes a switch: {values}")
        check_counts(rank, lines[6:])
        assert grown < BYTES_A_SWITCH, f"rank {rank}: {grown:.0f} bytes a switch, {values}"


@pytest.mark.host
@pytest.mark.slow
def test_workers_that_load_data_end_with_their_layout(tmp_path: Path) -> None:
    for rank, lines in enumerate(rounds_of(3, tmp_path, "--num-workers", "1")):
        assert lines[-1]["processes"] > 0
        check_counts(rank, lines[1:], but={"threads", "files"})


def rounds_of(rounds: int, directory: Path, *flags: str) -> list[list[dict[str, int]]]:
    """Run a job of so many rounds; what each rank held at the start of each of them."""
    num_switches = rounds * len(WALK)
    walk = [WALK[i % len(WALK)] for i in range(num_switches + 1)]
    run_megatron(
        2,
        [
            *(*FLAGS, *flags, "--train-iters", str(num_switches + 2)),
            *("--data-cache-path", str(directory / "cache")),
        ],
        [tours.schedule(walk, first=1), "elastic.cache_worlds=2"],
        directory,
        timeout_s=500,
        inside=lambda: note_what_is_held(directory),
    )
    events = around.events(directory)
    assert len(events) == num_switches and all(event["ok"] for event in events)
    made = [event["groups"]["created"] > 0 for event in events[-len(WALK) :]]
    assert 0 < sum(made) < len(made)
    found = [around.json_lines(directory / f"held-{rank}.jsonl") for rank in range(2)]
    assert all(len(lines) == rounds for lines in found)
    return found


def check_counts(
    rank: int, lines: list[dict[str, int]], but: Collection[str] = frozenset()
) -> None:
    """All is level but for memory; threads and files once every group has been used."""
    for what in lines[0].keys() - {"bytes", *but}:
        values = [line[what] for line in lines]
        assert max(values) - min(values) <= ROOM.get(what, 0), f"rank {rank}: {what} {values}"


def growth(values: list[int]) -> float:
    """By how much a value grows from one line to the next, by the medians of both halves."""
    half = len(values) // 2
    return (statistics.median(values[half:]) - statistics.median(values[:half])) / half
