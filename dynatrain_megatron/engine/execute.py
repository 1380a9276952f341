"""Moves what a plan says: pass by pass, window by window, pack → exchange → unpack.

Two windows of a pass are under way at a time.

::

    window 0   pack  |--- on the wire ---|  unpack
    window 1               pack  |--- on the wire ---|  unpack
    window 2                                     pack  |--- on the wire ---|  unpack

State that lies so that the transport can carry it is neither packed nor unpacked; see
:mod:`.parcels`. What waits for what on a GPU is in :mod:`.streams`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynatrain_megatron import faults, whereabouts
from dynatrain_megatron.engine.checksums import MessageChecks
from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.parcels import Parcel, by_window, make_parcels
from dynatrain_megatron.engine.streams import Copies, Streams, streams_for
from dynatrain_megatron.engine.transport import Message, Transfer, Transport, as_bytes
from dynatrain_megatron.faults import Phase
from dynatrain_megatron.planner.plan import Plan
from dynatrain_megatron.planner.routes import Routes, TakesFrom
from dynatrain_megatron.planner.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """What one rank did; bytes are those really handed to or taken from the transport.

    ``wire_s`` is the time this rank spent in the transport, ``retain_s`` that for copying what it
    keeps, ``verify_s`` that for checksums of messages. On a GPU the time that copies take there is
    counted beside the host's, so that all of them together may be longer than the execution.
    ``num_operations`` counts sends and receives of state.
    ``peak_staging_bytes`` has what the transport holds in it; ``pinned_bytes`` is host memory
    beside it, for state that the transport does not reach, and not more than is planned either.
    """

    pack_s: float
    wire_s: float
    unpack_s: float
    retain_s: float
    verify_s: float
    sent_bytes: int
    received_bytes: int
    num_operations: int
    peak_staging_bytes: int
    pinned_bytes: int


class _Clock:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("pack", "wire", "unpack", "retain", "verify"), 0.0)
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self._since
        self._since = now

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add what others measured, in place of the time since the last lap."""
        for name, more in seconds.items():
            self.seconds[name] += more
        self._since = time.perf_counter()


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """What one rank copies from where to where, pass by pass, every view of the state made.

    Good for any number of executions between the same fragments: views stay right when memory is
    given back and taken again.
    """

    parcels: tuple[list[Parcel], ...]
    kept: tuple[Copies, ...]


def bind_plan(
    plan: Plan, source: Fragments, target: Fragments, transport: Transport, *, timeout_s: float
) -> BoundPlan:
    """This rank's part of ``plan`` bound to memory; collective over ranks that exchange any."""
    parcels, kept = [], []
    for each in plan.passes:
        given = source if each.takes_from is TakesFrom.SOURCE else target
        parcels.append(make_parcels(each.schedule, given, target, transport, timeout_s=timeout_s))
        kept.append(_retained(each.schedule.retained, given, target, transport))
    return BoundPlan(tuple(parcels), tuple(kept))


def execute(
    plan: Plan,
    source: Fragments,
    target: Fragments,
    transport: Transport,
    *,
    timeout_s: float,
    bound: BoundPlan | None = None,
    check_messages: bool = False,
) -> ExecutionReport:
    """Fill this rank's ``target`` fragments; runs on every rank of the plan.

    ``source`` is only read. ``bound`` is what :func:`bind_plan` gave for the same arguments, on
    every rank or on none. With ``check_messages``, the same on all ranks, checksums of all messages
    of a pass are compared before anything of it is used; this is collective, and a difference
    raises on all ranks alike. Raises :class:`TransitionError` where a transfer fails; the target is
    then undefined and the source intact.
    """
    with streams_for(transport.device, timeout_s) as streams:
        run = _Run(transport, streams, _Staging(plan, transport), timeout_s)
        if bound is None:
            bound = bind_plan(plan, source, target, transport, timeout_s=timeout_s)
        for each, parcels, kept in zip(plan.passes, bound.parcels, bound.kept, strict=True):
            checks = MessageChecks(plan.tensors, transport) if check_messages else None
            run.carry_out(parcels, kept, checks)
            if checks is not None:
                run.compare(checks, each.schedule)
    return run.report()


class _Run:
    """One rank's execution of a plan, pass by pass."""

    def __init__(
        self, transport: Transport, streams: Streams, staging: _Staging, timeout_s: float
    ) -> None:
        self._transport = transport
        self._streams = streams
        self._staging = staging
        self._timeout_s = timeout_s
        self._clock = _Clock()
        self._sent = self._received = self._num_operations = 0
        self._under_way: deque[tuple[_Window, Transfer]] = deque()

    def carry_out(
        self, parcels: Sequence[Parcel], kept: Copies, checks: MessageChecks | None
    ) -> None:
        """All windows of a pass; when this returns, all is in its place and no source in use."""
        transport, clock = self._transport, self._clock
        self._staging.clear()
        windows = by_window(parcels)
        for number, together in enumerate(windows):
            whereabouts.begin(Phase.pack, transport.rank)
            window = _prepare(together, self._staging, transport)
            self._streams.pack(window.pack, is_staged=window.is_staged)
            clock.lap("pack")
            whereabouts.begin(Phase.wire, transport.rank)
            sends, receives = (window.messages(sending=each) for each in (True, False))
            self._under_way.append((window, transport.start(sends, receives)))
            clock.lap("wire")
            if checks is not None:
                checks.sent(window.carried)
                clock.lap("verify")
            if number:
                self._finish_first(checks)
            else:  # the first one is on its way; meanwhile, what this rank keeps
                self._keep(kept)
        if windows:
            self._finish_first(checks)
        else:
            for phase in (Phase.pack, Phase.wire, Phase.unpack):
                whereabouts.begin(phase, transport.rank)
            self._keep(kept)
        clock.add(self._streams.finish())
        self._sent += sum(parcel.nbytes for parcel in parcels if parcel.sending)
        self._received += sum(parcel.nbytes for parcel in parcels if not parcel.sending)
        self._num_operations += len(parcels)

    def compare(self, checks: MessageChecks, schedule: Schedule) -> None:
        """Both ends of every message of the pass agree; collective."""
        whereabouts.begin(Phase.verify, self._transport.rank)
        checks.compare(schedule, timeout_s=self._timeout_s)
        self._clock.lap("verify")

    def report(self) -> ExecutionReport:
        """What was done so far."""
        seconds = self._clock.seconds
        return ExecutionReport(
            seconds["pack"],
            seconds["wire"],
            seconds["unpack"],
            seconds["retain"],
            seconds["verify"],
            self._sent,
            self._received,
            self._num_operations,
            self._staging.allocated_bytes + self._transport.held_bytes,
            self._staging.pinned_bytes,
        )

    def _finish_first(self, checks: MessageChecks | None) -> None:
        window, transfer = self._under_way.popleft()
        transfer.wait(timeout_s=self._timeout_s)
        received = window.messages(sending=False)
        if received and faults.takes_flip(self._transport.rank):
            _flip_a_bit(received)
        self._clock.lap("wire")
        if checks is not None:
            checks.arrived(window.carried)
            self._clock.lap("verify")
        whereabouts.begin(Phase.unpack, self._transport.rank)
        self._streams.unpack(window.unpack)
        self._clock.lap("unpack")

    def _keep(self, kept: Copies) -> None:
        self._streams.keep(kept)
        self._clock.lap("retain")


class _Buffer:
    """Staging memory, allocated when it is first used and handed out from its begin.

    So is pinned memory of the same size, for state that the transport does not reach.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._memory: torch.Tensor | None = None
        self._pinned: torch.Tensor | None = None
        self._used = 0

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._memory is None else self._nbytes

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._pinned is None else self._nbytes

    def take(self, nbytes: int, alignment: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        start = -(-self._used // alignment) * alignment
        self._used = start + nbytes
        return self._memory[start : self._used]

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory for the ``nbytes`` taken last."""
        if self._pinned is None:
            pin = self._device.type == "cuda"
            self._pinned = torch.empty(
                self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin
            )
        return self._pinned[self._used - nbytes : self._used]

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

    @property
    def pinned_bytes(self) -> int:
        return sum(buffer.pinned_bytes for buffer in self._buffers)

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
class _Window:
    """What one rank does in one window, every view of it made; ``carried`` are its messages."""

    carried: list[tuple[Parcel, torch.Tensor]]
    pack: Copies
    unpack: Copies
    is_staged: bool

    def messages(self, *, sending: bool) -> list[Message]:
        """Those it sends, or receives."""
        return [(parcel.peer, m) for parcel, m in self.carried if parcel.sending == sending]


def _prepare(parcels: Sequence[Parcel], staging: _Staging, transport: Transport) -> _Window:
    is_staged = any(parcel.is_staged for parcel in parcels)
    buffer = staging.borrow() if is_staged else None
    window = _Window([], Copies(), Copies(), is_staged)
    for parcel in parcels:
        carried = parcel.views[0]
        if parcel.is_staged:
            assert buffer is not None
            carried = _stage(parcel, buffer, window, transport)
        window.carried.append((parcel, carried))
    return window


def _stage(parcel: Parcel, buffer: _Buffer, window: _Window, transport: Transport) -> torch.Tensor:
    """The staging memory of a parcel, the copies to or from it added to the window's."""
    views, sending = parcel.views, parcel.sending
    memory = buffer.take(parcel.nbytes, views[0].element_size())
    room = _divide(memory, views)
    copies = window.pack if sending else window.unpack
    if parcel.is_near:
        copies.near.join(views, room, packing=sending)
        return memory
    for view, pinned, place in zip(
        views, _divide(buffer.pinned(parcel.nbytes), views), room, strict=True
    ):
        if transport.reaches(view):
            copies.near.join([view], [place], packing=sending)
        else:
            copies.host.join([view], [pinned], packing=sending)
            copies.bus.join([pinned], [place], packing=sending)
    return memory


def _divide(memory: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
    """``memory`` as one tensor after the other, shaped as ``views``."""
    parts = torch.split(memory, [view.nbytes for view in views])
    return [part.view(view.dtype).view(view.shape) for part, view in zip(parts, views, strict=True)]


def _retained(
    retained: Routes, source: Fragments, target: Fragments, transport: Transport
) -> Copies:
    """What this rank keeps, from its old fragments to its new ones."""
    copies = Copies()
    for i in np.nonzero(retained.dst == transport.rank)[0]:
        region = retained.start[i], retained.stop[i]
        to = target.piece(int(retained.dst_slot[i]), *region)
        of = source.piece(int(retained.src_slot[i]), *region)
        for pair in zip(to, of, strict=True):
            near = all(transport.reaches(view) for view in pair)
            (copies.near if near else copies.host).append(*pair)
    return copies


def _flip_a_bit(messages: Sequence[Message]) -> None:
    """Any bit of any of them, in place."""
    _, message = random.choice(messages)
    place = tuple(random.randrange(n) for n in message.shape)
    element = as_bytes(message[place].reshape(1))
    element[random.randrange(len(element))] ^= 1 << random.randrange(8)
