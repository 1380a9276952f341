"""Moves what a plan says: window by window, pack → exchange → unpack.

A message is the concatenation of its pieces' states, wider dtypes first, so that every part is
aligned without padding and the bytes on the wire are exactly the plan's. Both ends derive that
order from the plan; nothing describes it on the wire.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.transport import Message, Transport
from dynatrain_megatron.planner.plan import Plan
from dynatrain_megatron.planner.routes import Routes
from dynatrain_megatron.planner.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """What one rank did; bytes are those really handed to or taken from the transport."""

    pack_s: float
    wire_s: float
    unpack_s: float
    sent_bytes: int
    received_bytes: int
    num_messages: int
    peak_staging_bytes: int


class _Clock:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds = {"pack": 0.0, "wire": 0.0, "unpack": 0.0}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self._since
        self._since = now


def execute(
    plan: Plan, source: Fragments, target: Fragments, transport: Transport, *, timeout_s: float
) -> ExecutionReport:
    """Fill this rank's ``target`` fragments; runs on every rank of the plan.

    ``source`` is only read. Raises :class:`TransitionError` where a transfer fails; the target is
    then undefined and the source intact.
    """
    schedule = plan.schedule
    clock = _Clock()
    _copy_retained(schedule.retained, transport.rank, source, target)
    clock.lap("unpack")
    sent = received = messages = peak = 0
    for sends, receives in _windows(schedule, transport.rank):
        outgoing: list[Message] = []
        for m in sends:
            staging = _staging(schedule, m, transport.device)
            for part, view in _parts(plan, m, source, staging, sending=True):
                part.copy_(view)
            outgoing.append((int(schedule.dst[m]), staging))
        incoming = [
            (int(schedule.src[m]), _staging(schedule, m, transport.device)) for m in receives
        ]
        clock.lap("pack")
        transport.exchange(outgoing, incoming, timeout_s=timeout_s)
        clock.lap("wire")
        for m, (_, staging) in zip(receives, incoming, strict=True):
            for part, view in _parts(plan, m, target, staging, sending=False):
                view.copy_(part)
        clock.lap("unpack")
        window_sent = sum(staging.numel() for _, staging in outgoing)
        window_received = sum(staging.numel() for _, staging in incoming)
        sent += window_sent
        received += window_received
        messages += len(outgoing) + len(incoming)
        peak = max(peak, window_sent + window_received)
    return ExecutionReport(
        clock.seconds["pack"],
        clock.seconds["wire"],
        clock.seconds["unpack"],
        sent,
        received,
        messages,
        peak,
    )


def _copy_retained(retained: Routes, rank: int, source: Fragments, target: Fragments) -> None:
    for i in np.nonzero(retained.dst == rank)[0]:
        region = retained.start[i], retained.stop[i]
        kept = source.piece(int(retained.src_slot[i]), *region)
        for view, old in zip(target.piece(int(retained.dst_slot[i]), *region), kept, strict=True):
            view.copy_(old)


def _windows(schedule: Schedule, rank: int) -> Iterator[tuple[list[int], list[int]]]:
    """Message ids this rank sends and receives, window by window, in ascending order."""
    own = np.nonzero((schedule.src == rank) | (schedule.dst == rank))[0]
    for window in np.unique(schedule.window[own]):
        members = own[schedule.window[own] == window]
        yield (
            [int(m) for m in members if schedule.src[m] == rank],
            [int(m) for m in members if schedule.dst[m] == rank],
        )


def _staging(schedule: Schedule, message: int, device: torch.device) -> torch.Tensor:
    return torch.empty(int(schedule.nbytes[message]), dtype=torch.uint8, device=device)


def _parts(
    plan: Plan, message: int, fragments: Fragments, staging: torch.Tensor, *, sending: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of (part of the staging buffer, view of the state it carries), same shape and dtype."""
    pieces = plan.schedule.pieces
    slots = pieces.src_slot if sending else pieces.dst_slot
    views = [
        view
        for i in plan.schedule.pieces_of(message)
        for view in fragments.piece(int(slots[i]), pieces.start[i], pieces.stop[i])
    ]
    views.sort(key=lambda view: -view.element_size())  # stable: the same order at both ends
    offset = 0
    for view in views:
        stop = offset + view.numel() * view.element_size()
        yield staging[offset:stop].view(view.dtype).view(view.shape), view
        offset = stop
