"""Moves what a plan says: pass by pass, window by window, pack → exchange → unpack.

Two windows of a pass are under way at a time.

::

    window 0   pack  |--- on the wire ---|  unpack
    window 1               pack  |--- on the wire ---|  unpack
    window 2                                     pack  |--- on the wire ---|  unpack

State that lies so that the transport can carry it is neither packed nor unpacked; see
:mod:`.parcels`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.parcels import Parcel, by_window, make_parcels
from dynatrain_megatron.engine.transport import Message, Transfer, Transport
from dynatrain_megatron.planner.plan import Plan
from dynatrain_megatron.planner.routes import Routes, Side


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """What one rank did; bytes are those really handed to or taken from the transport.

    ``wire_s`` is the time this rank spent in the transport, ``retain_s`` that for copying what it
    keeps. ``num_operations`` counts sends and receives. ``peak_staging_bytes`` has what the
    transport holds in it.
    """

    pack_s: float
    wire_s: float
    unpack_s: float
    retain_s: float
    sent_bytes: int
    received_bytes: int
    num_operations: int
    peak_staging_bytes: int


class _Clock:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("pack", "wire", "unpack", "retain"), 0.0)
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self._since
        self._since = now


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """What one rank copies from where to where, pass by pass, every view of the state made.

    Good for any number of executions between the same fragments: views stay right when memory is
    given back and taken again.
    """

    parcels: tuple[list[Parcel], ...]
    kept: tuple[_Copies, ...]


def bind_plan(
    plan: Plan, source: Fragments, target: Fragments, transport: Transport, *, timeout_s: float
) -> BoundPlan:
    """This rank's part of ``plan`` bound to memory; collective over ranks that exchange any."""
    parcels, kept = [], []
    for each in plan.passes:
        given = source if each.takes_from is Side.SOURCE else target
        parcels.append(make_parcels(each.schedule, given, target, transport, timeout_s=timeout_s))
        kept.append(_retained(each.schedule.retained, transport.rank, given, target))
    return BoundPlan(tuple(parcels), tuple(kept))


def execute(
    plan: Plan,
    source: Fragments,
    target: Fragments,
    transport: Transport,
    *,
    timeout_s: float,
    bound: BoundPlan | None = None,
) -> ExecutionReport:
    """Fill this rank's ``target`` fragments; runs on every rank of the plan.

    ``source`` is only read. ``bound`` is what :func:`bind_plan` gave for the same arguments, on
    every rank or on none. Raises :class:`TransitionError` where a transfer fails; the target is
    then undefined and the source intact.
    """
    run = _Run(transport, _Staging(plan, transport), timeout_s)
    if bound is None:
        bound = bind_plan(plan, source, target, transport, timeout_s=timeout_s)
    for parcels, kept in zip(bound.parcels, bound.kept, strict=True):
        run.carry_out(parcels, kept)
    return run.report()


class _Run:
    """One rank's execution of a plan, pass by pass."""

    def __init__(self, transport: Transport, staging: _Staging, timeout_s: float) -> None:
        self._transport = transport
        self._staging = staging
        self._timeout_s = timeout_s
        self._clock = _Clock()
        self._sent = self._received = self._num_operations = 0
        self._under_way: deque[tuple[_Window, Transfer]] = deque()

    def carry_out(self, parcels: Sequence[Parcel], kept: _Copies) -> None:
        """All windows of a pass; when this returns, what they bring is in its place."""
        transport, clock = self._transport, self._clock
        self._staging.clear()
        windows = by_window(parcels)
        for number, together in enumerate(windows):
            window = _prepare(together, self._staging)
            window.pack.run()
            clock.lap("pack")
            self._under_way.append((window, transport.start(window.sends, window.receives)))
            clock.lap("wire")
            if number:
                self._finish_first()
            else:  # the first one is on its way; meanwhile, what this rank keeps
                self._keep(kept)
        if windows:
            self._finish_first()
        else:
            self._keep(kept)
        self._sent += sum(parcel.nbytes for parcel in parcels if parcel.sending)
        self._received += sum(parcel.nbytes for parcel in parcels if not parcel.sending)
        self._num_operations += len(parcels)

    def report(self) -> ExecutionReport:
        """What was done so far."""
        seconds = self._clock.seconds
        return ExecutionReport(
            seconds["pack"],
            seconds["wire"],
            seconds["unpack"],
            seconds["retain"],
            self._sent,
            self._received,
            self._num_operations,
            self._staging.allocated_bytes + self._transport.held_bytes,
        )

    def _finish_first(self) -> None:
        window, transfer = self._under_way.popleft()
        transfer.wait(timeout_s=self._timeout_s)
        self._clock.lap("wire")
        window.unpack.run()
        self._clock.lap("unpack")

    def _keep(self, kept: _Copies) -> None:
        kept.run()
        self._clock.lap("retain")


class _Buffer:
    """Staging memory, allocated when it is first used and handed out from its begin."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._memory: torch.Tensor | None = None
        self._used = 0

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._memory is None else self._nbytes

    def take(self, nbytes: int, alignment: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        start = -(-self._used // alignment) * alignment
        self._used = start + nbytes
        return self._memory[start : self._used]

    def clear(self) -> None:
        self._used = 0


class _Staging:
    """As many buffers as windows of the plan are under way, used by turns by those that need one.

    Where no pass has more than a single window there is a single buffer, and all of it fits.
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        nbytes = plan.staging_bytes(transport.rank)
        count = plan.peak_staging_bytes(transport.rank) // max(1, nbytes)
        self._buffers = [_Buffer(nbytes, transport.device) for _ in range(count)]
        self._next = itertools.cycle(self._buffers)

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.allocated_bytes for buffer in self._buffers)

    def clear(self) -> None:
        """Nothing is under way: every buffer is free as a whole."""
        for buffer in self._buffers:
            buffer.clear()

    def borrow(self) -> _Buffer:
        """A buffer whose last window is done; the only one there is goes on where it was."""
        buffer = next(self._next)
        if len(self._buffers) > 1:
            buffer.clear()
        return buffer


@dataclass(frozen=True, slots=True)
class _Copies:
    """Pairs of tensors of the same shape and dtype, the second to be copied to the first."""

    to: list[torch.Tensor] = field(default_factory=list)
    of: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        if self.to:
            torch._foreach_copy_(self.to, self.of)


@dataclass(frozen=True, slots=True)
class _Window:
    """What one rank does in one window, every view of it made."""

    sends: list[Message]
    receives: list[Message]
    pack: _Copies
    unpack: _Copies
    buffer: _Buffer | None


def _prepare(parcels: Sequence[Parcel], staging: _Staging) -> _Window:
    needs_memory = any(parcel.is_staged for parcel in parcels)
    window = _Window([], [], _Copies(), _Copies(), staging.borrow() if needs_memory else None)
    for parcel in parcels:
        carried = parcel.views[0]
        if parcel.is_staged:
            assert window.buffer is not None
            carried = window.buffer.take(parcel.nbytes, carried.element_size())
            room = _divide(carried, parcel.views)
            copies = window.pack if parcel.sending else window.unpack
            copies.to.extend(room if parcel.sending else parcel.views)
            copies.of.extend(parcel.views if parcel.sending else room)
        (window.sends if parcel.sending else window.receives).append((parcel.peer, carried))
    return window


def _divide(memory: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
    """``memory`` as one tensor after the other, shaped as ``views``."""
    parts = torch.split(memory, [view.nbytes for view in views])
    return [part.view(view.dtype).view(view.shape) for part, view in zip(parts, views, strict=True)]


def _retained(retained: Routes, rank: int, source: Fragments, target: Fragments) -> _Copies:
    """What this rank keeps, from its old fragments to its new ones."""
    copies = _Copies()
    for i in np.nonzero(retained.dst == rank)[0]:
        region = retained.start[i], retained.stop[i]
        copies.to.extend(target.piece(int(retained.dst_slot[i]), *region))
        copies.of.extend(source.piece(int(retained.src_slot[i]), *region))
    return copies
