"""What a switch did, in time, bytes and memory, and the lines it prints meanwhile."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dynatrain_megatron import whereabouts
from dynatrain_megatron.observe import progress
from dynatrain_megatron.planner.staged import StagedPlan
from dynatrain_megatron.planner.stages import Peak
from dynatrain_megatron.transition.move import Move

MOST_TENSORS_IN_EVENT = 1000
MOST_RANKS_IN_MATRIX = 64  # a number for each pair of ranks is more than a line of a log should be


@dataclass
class SwitchReport:
    """What a switch did, as the event log tells it; equal on every rank but for local bytes.

    ``schedule`` is what placed the messages, never ``auto``, ``predicted_s`` what it says beside
    the measured ``seconds["wire"]``. ``bytes_matrix`` is from rank to rank of the bridge,
    ``nodes`` has the node of each as the plan saw it; both are None with more than 64 ranks.
    ``state_fingerprints`` are those after the switch by state, of up to 1,000 logical tensors.
    """

    iteration: int
    source: str
    target: str
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    ops: int = 0
    rounds: int = 0
    schedule: str = ""
    predicted_s: float = 0.0
    stages: int = 1
    keep_source: str = ""
    verify: str = ""
    peak_extra_bytes: int = 0
    planned_peak_extra_bytes: int = 0
    bound_peak_extra_bytes: int = 0
    fingerprint: dict[str, str] | None = None
    state_fingerprints: dict[str, str] | None = None
    bytes_matrix: list[list[int]] | None = None
    nodes: list[int] | None = None
    placement: dict[str, Any] | None = None
    origin: str = "schedule"
    world: int = 0
    joined: int = 0
    left: int = 0


class Phases:
    """Times the phases of a switch and prints a line for each on rank 0.

    ``place`` is the process's rank in the bridge, by which faults on purpose go.
    """

    def __init__(self, report: SwitchReport, rank: int, place: int) -> None:
        self._report = report
        self._rank = rank
        self._place = place

    @contextlib.contextmanager
    def __call__(self, name: str, doing: str) -> Iterator[None]:
        begin = time.perf_counter()
        whereabouts.begin(name, self._place)
        yield
        self.add(name, time.perf_counter() - begin, doing)

    def add(self, name: str, seconds: float, doing: str) -> None:
        """Count a phase that was timed elsewhere, or a part of one."""
        self._report.seconds[name] = self._report.seconds.get(name, 0.0) + seconds
        progress(self._rank, f"{name:8s} {seconds:7.3f} s  {doing}")

    def add_move(self, move: Move) -> None:
        """Count the parts of a move that has ended; they overlap each other."""
        for name, seconds in {**move.seconds, **transfer_seconds(move)}.items():
            self.add(name, seconds, _MOVE_DOING[name])


_MOVE_DOING = {
    "plan": "plan bound to memory",
    "memory": "taken for what comes, given back of what has gone",
    "pack": "what leaves put together",
    "wire": "messages on their way",
    "unpack": "what came and what stays put in its place",
    "verify": "what came held against what left",
}


_BEFORE_ALL_ARE_THERE = ("groups", "quiesce")


def transfer_seconds(move: Move) -> dict[str, float]:
    """This rank's seconds of packing, sending and unpacking, in all stages."""
    return {
        "pack": sum(executed.pack_s for executed in move.reports),
        "wire": sum(executed.wire_s for executed in move.reports),
        "unpack": sum(executed.unpack_s + executed.retain_s for executed in move.reports),
    }


def fill_in(
    report: SwitchReport,
    plan: StagedPlan,
    move: Move,
    peak: Peak,
    rebuilt: int,
    size: int,
    knows: bool,
    gather: Callable[[bytes], list[bytes]],
) -> None:
    """Add the figures of all ranks: seconds are the slowest rank's, bytes those really carried.

    ``gather`` gives everyone's figures for this rank's, ``size`` is how many there are. How long
    the first phases took is said by who ``knows``: a process that joins waits in them for the last
    step of the others, and one that leaves for groups to connect that are none of its own.
    """
    first = {phase: report.seconds[phase] if knows else 0.0 for phase in _BEFORE_ALL_ARE_THERE}
    own: dict[str, Any] = {
        **transfer_seconds(move),
        **first,
        "sent": sum(executed.sent_bytes for executed in move.reports),
        "lower_bound": plan.lower_bound_bytes,
        "rebuilt": rebuilt,
        "peak": report.peak_extra_bytes,
        "planned": peak.extra,
        "bound": peak.ends_with + peak.staging,
        "largest": peak.largest,
    }
    rows = [json.loads(row) for row in gather(json.dumps(own).encode())]
    for name in ("pack", "wire", "unpack", *first):
        report.seconds[name] = max(row[name] for row in rows)
    report.bytes = {
        "moved": sum(row["sent"] for row in rows),
        "lower_bound": sum(row["lower_bound"] for row in rows),
        "retained": plan.retained_bytes,
        "rebuilt": sum(row["rebuilt"] for row in rows),
        "max_send": plan.max_send_bytes,
        "max_recv": plan.max_recv_bytes,
    }
    report.peak_extra_bytes = max(row["peak"] for row in rows)
    report.planned_peak_extra_bytes = max(row["planned"] for row in rows)
    report.bound_peak_extra_bytes = max(row["bound"] for row in rows) + max(
        row["largest"] for row in rows
    )
    report.ops = plan.num_operations
    report.rounds = plan.num_windows
    report.schedule = ", ".join(plan.windows_by)
    report.predicted_s = plan.predicted_s
    if size <= MOST_RANKS_IN_MATRIX:
        report.bytes_matrix = plan.bytes_matrix.tolist()
