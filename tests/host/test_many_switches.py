"""Two hundred switches in one job: nothing that a process holds grows with their number.

The job goes round one closed walk among its layouts again and again. Some of them it comes back to
while their groups and objects are kept, others had to go meanwhile. At the start of each round it
holds the same as a round before.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.host import around, tours
from tests.ranks import TINY_LLAMA, run_megatron

# With room for two layouts beside the one in force.
WALK = [
    *("dp2", "tp2", "dp2", "pp2", "tp2-sp"),
    *("pp2", "pp2-vpp2", "cp2", "pp2-vpp2", "tp2"),
]
ROUNDS = 20
WARM_ROUNDS = 6
SWITCHES = ROUNDS * len(WALK)
FLAGS = [
    *(*TINY_LLAMA, "--use-distributed-optimizer", "--hidden-size", "32", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--global-batch-size", "2", "--num-workers", "1"),
    *("--vocab-size", "200", "--train-iters", str(SWITCHES + 2), "--log-interval", "50"),
]
# Keys are forgotten, and connections closed, beside training: a few may still be there.
ROOM = {"keys": 30, "files": 3}
BYTES_A_SWITCH = 50e3
NAMES_OF_A_WORLD = 48


def note_what_is_held(directory: Path) -> None:
    """At the start of each round a line of what this process holds goes to a file; on each rank."""
    from dynatrain_megatron.plugin import session

    real, switches = session.switch, iter(range(SWITCHES))

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
    """Memory of this process's own, in bytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["RssAnon"].split()[0])


@pytest.mark.host
@pytest.mark.slow
def test_two_hundred_switches_leave_nothing_behind(tmp_path: Path) -> None:
    walk = [WALK[i % len(WALK)] for i in range(SWITCHES + 1)]
    run_megatron(
        2,
        [*FLAGS, "--data-cache-path", str(tmp_path / "cache")],
        [tours.schedule(walk, first=1), "elastic.cache_worlds=2"],
        tmp_path,
        timeout_s=500,
        inside=lambda: note_what_is_held(tmp_path),
    )
    events = around.events(tmp_path)
    assert len(events) == SWITCHES and all(event["ok"] for event in events)
    made = [event["groups"]["created"] > 0 for event in events[-len(WALK) :]]
    assert 0 < sum(made) < len(made)
    for rank in range(2):
        lines = around.json_lines(tmp_path / f"held-{rank}.jsonl")
        assert len(lines) == ROUNDS
        warm = lines[WARM_ROUNDS:]
        for what in warm[0].keys() - {"bytes"}:
            values = [line[what] for line in warm]
            assert max(values) - min(values) <= ROOM.get(what, 0), f"rank {rank}: {what} {values}"
        values = [line["bytes"] for line in warm]
        grown = growth(values) / len(WALK)
        print(f"rank {rank} grew by {grown:.0f} bytes a switch: {values}")
        assert grown < BYTES_A_SWITCH, f"rank {rank}: {grown:.0f} bytes a switch, {values}"


def growth(values: list[int]) -> float:
    """By how much a value grows from one line to the next, by the medians of both halves."""
    half = len(values) // 2
    return (statistics.median(values[half:]) - statistics.median(values[:half])) / half
