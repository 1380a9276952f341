"""Moves what a plan says: window by window, pack → exchange → unpack, two windows under way.

::

    window 0   pack  |--- on the wire ---|  unpack
    window 1               pack  |--- on the wire ---|  unpack
    window 2                                     pack  |--- on the wire ---|  unpack

A message of the plan is the concatenation of its pieces' states, wider dtypes first, so that every
part is aligned without padding and the bytes on the wire are exactly the plan's. Parts that are
large enough for the transport travel by themselves, in place where they lie so that it can carry
them; everything else goes through staging memory. Both ends derive order and cuts from the plan
and the transport's terms; nothing describes them on the wire.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.transport import Message, Terms, Transfer, Transport
from dynatrain_megatron.planner.plan import Plan
from dynatrain_megatron.planner.routes import Routes
from dynatrain_megatron.planner.schedule import staged
from dynatrain_megatron.vps.roster import IntArray


@dataclass(frozen=True, slots=True)
class ExecutionReport:
    """What one rank did; bytes are those really handed to or taken from the transport.

    ``wire_s`` is the time this rank spent in the transport, ``retain_s`` that for copying what it
    keeps. ``num_operations`` counts sends and receives.
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


def execute(
    plan: Plan, source: Fragments, target: Fragments, transport: Transport, *, timeout_s: float
) -> ExecutionReport:
    """Fill this rank's ``target`` fragments; runs on every rank of the plan.

    ``source`` is only read. Raises :class:`TransitionError` where a transfer fails; the target is
    then undefined and the source intact.
    """
    schedule, rank = plan.schedule, transport.rank
    clock = _Clock()
    buffers = [_Buffer(size, transport.device) for size in schedule.staging_bytes(rank)]
    under_way: deque[tuple[_Window, Transfer]] = deque()
    sent = received = operations = 0

    def finish_first() -> None:
        window, transfer = under_way.popleft()
        transfer.wait(timeout_s=timeout_s)
        clock.lap("wire")
        window.unpack.run()
        clock.lap("unpack")

    for messages, buffer in zip(schedule.windows_of(rank), itertools.cycle(buffers), strict=False):
        window = _prepare(plan, messages, source, target, transport, buffer)
        window.pack.run()
        clock.lap("pack")
        under_way.append((window, transport.start(window.sends, window.receives)))
        clock.lap("wire")
        if len(under_way) > 1:
            finish_first()
        else:  # the first one is on its way; meanwhile, what this rank keeps
            _retained(schedule.retained, rank, source, target).run()
            clock.lap("retain")
        sent += sum(tensor.nbytes for _, tensor in window.sends)
        received += sum(tensor.nbytes for _, tensor in window.receives)
        operations += len(window.sends) + len(window.receives)
    if under_way:
        finish_first()
    else:
        _retained(schedule.retained, rank, source, target).run()
        clock.lap("retain")
    return ExecutionReport(
        clock.seconds["pack"],
        clock.seconds["wire"],
        clock.seconds["unpack"],
        clock.seconds["retain"],
        sent,
        received,
        operations,
        sum(buffer.allocated_bytes for buffer in buffers),
    )


class _Buffer:
    """Staging memory of every other window, allocated when it is first used."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._memory: torch.Tensor | None = None

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._memory is None else self._nbytes

    def take(self, start: int, nbytes: int) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[start : start + nbytes]


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

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    pack: _Copies = field(default_factory=_Copies)
    unpack: _Copies = field(default_factory=_Copies)


def _prepare(
    plan: Plan,
    messages: IntArray,
    source: Fragments,
    target: Fragments,
    transport: Transport,
    buffer: _Buffer,
) -> _Window:
    schedule, window = plan.schedule, _Window()
    place = 0  # in the buffer, of which no more is touched than is needed
    for m in messages.tolist():
        sending = int(schedule.src[m]) == transport.rank
        peer = int((schedule.dst if sending else schedule.src)[m])
        terms = transport.terms(peer, sending=sending)
        parts = _parts(plan, m, source if sending else target, sending=sending)
        for together in _cut(parts, terms):
            if len(together) == 1 and terms.fit(together[0]):
                carried = together[0]
            else:
                # Wider dtypes come first, so what comes next is always aligned.
                nbytes = sum(view.nbytes for view in together)
                carried = buffer.take(place, nbytes)
                place += nbytes
                room = _divide(carried, together)
                copies = window.pack if sending else window.unpack
                copies.to.extend(room if sending else together)
                copies.of.extend(together if sending else room)
            (window.sends if sending else window.receives).append((peer, carried))
        place = staged(place)
    return window


def _parts(plan: Plan, message: int, fragments: Fragments, *, sending: bool) -> list[torch.Tensor]:
    """Views of the state that one message carries, wider dtypes first, else in the plan's order."""
    pieces = plan.schedule.pieces
    slots = pieces.src_slot if sending else pieces.dst_slot
    views = [
        view
        for i in plan.schedule.pieces_of(message)
        for view in fragments.piece(int(slots[i]), pieces.start[i], pieces.stop[i])
    ]
    return sorted(views, key=lambda view: -view.element_size())  # stable: equal at both ends


def _cut(views: Iterable[torch.Tensor], terms: Terms) -> Iterator[list[torch.Tensor]]:
    """What travels together: each large view by itself, and the small ones between two of them."""
    small: list[torch.Tensor] = []
    for view in views:
        if view.nbytes < terms.part_bytes:
            small.append(view)
            continue
        if small:
            yield small
            small = []
        yield [view]
    if small:
        yield small


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
