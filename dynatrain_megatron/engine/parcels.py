"""What one rank sends and receives: parcels, each with the window it travels in.

A message of the plan is the concatenation of its pieces' states, wider dtypes first, so that every
part is aligned without padding and the bytes moved are exactly the plan's. It is cut into parcels:
parts that are large enough for the transport travel by themselves, in place where they lie so that
it can carry them; what lies between two of those travels together, through staging memory. A parcel
is an operation, and the plan says how many a message may be, so that no window has more than its
bound; what is read from memory is none. Both ends derive order and cuts from the plan and the
transport's terms.

Windows are the plan's, which bound staging memory at both ends. Where receivers read from the
sender's memory only the sender may need any, and it knows how much: it chooses the windows, and
tells.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.transport import Message, Terms, Transport
from dynatrain_megatron.planner.schedule import Schedule, staged


@dataclass(slots=True)
class Parcel:
    """Views of the state that travel as one message; through staging memory if ``is_staged``.

    ``states`` are the logical tensor and the state of each, by their numbers in the plan.
    ``is_near``: all of them lie in memory that the transport reaches.
    """

    peer: int
    sending: bool
    views: list[torch.Tensor]
    states: list[tuple[int, int]]
    is_near: bool
    is_staged: bool
    is_read: bool
    window: int

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)


class _Part(NamedTuple):
    """One state of one piece."""

    view: torch.Tensor
    tensor: int
    state: int


def make_parcels(
    schedule: Schedule,
    source: Fragments,
    target: Fragments,
    transport: Transport,
    *,
    timeout_s: float,
) -> list[Parcel]:
    """All parcels of this rank in a pass's order; collective over ranks that exchange any.

    Those to be sent view ``source``, those to be received ``target``.
    """
    rank = transport.rank
    windows = schedule.windows_of(rank)
    parcels: list[Parcel] = []
    for window in windows:
        for m in window.tolist():
            sending = int(schedule.src[m]) == rank
            peer = int((schedule.dst if sending else schedule.src)[m])
            terms = transport.terms(peer, sending=sending)
            parts = _parts(schedule, m, source if sending else target, sending=sending)
            for together in _cut(parts, terms, int(schedule.max_parcels[m])):
                views = [part.view for part in together]
                is_near = all(transport.reaches(view) for view in views)
                in_place = is_near and len(views) == 1 and terms.fit(views[0])
                parcels.append(
                    Parcel(
                        peer,
                        sending,
                        views,
                        [(part.tensor, part.state) for part in together],
                        is_near,
                        is_staged=not in_place,
                        is_read=terms.is_read,
                        window=int(schedule.window[m]),
                    )
                )
    # Of a pass with a single window everything fits at once.
    _choose_windows(parcels, schedule.staging_bytes(rank) if len(windows) > 1 else math.inf)
    _tell_windows(parcels, transport, timeout_s)
    return parcels


def _parts(schedule: Schedule, message: int, fragments: Fragments, *, sending: bool) -> list[_Part]:
    """The state that one message carries, wider dtypes first, else in the plan's order."""
    pieces = schedule.pieces
    slots = pieces.src_slot if sending else pieces.dst_slot
    parts = [
        _Part(view, int(pieces.tensor[i]), state)
        for i in schedule.pieces_of(message)
        for state, view in enumerate(
            fragments.piece(int(slots[i]), pieces.start[i], pieces.stop[i])
        )
    ]
    return sorted(parts, key=lambda part: -part.view.element_size())  # stable: equal at both ends


def _cut(parts: Sequence[_Part], terms: Terms, max_parcels: int) -> list[list[_Part]]:
    """What travels together; where parts are sent, not read, in at most ``max_parcels`` parcels."""
    part_bytes = terms.part_bytes
    parcels = list(_apart(parts, part_bytes))
    while len(parcels) > max_parcels and not terms.is_read:
        part_bytes *= 2
        parcels = list(_apart(parts, part_bytes))
    return parcels


def _apart(parts: Iterable[_Part], part_bytes: int) -> Iterator[list[_Part]]:
    """Each large part by itself, and together the small ones between two of them."""
    small: list[_Part] = []
    for part in parts:
        if part.view.nbytes < part_bytes:
            small.append(part)
            continue
        if small:
            yield small
            small = []
        yield [part]
    if small:
        yield small


def _choose_windows(parcels: Iterable[Parcel], room: float) -> None:
    """Place what others read: all that is ready at once, and the rest as staging memory allows."""
    used = Counter[int]()
    for parcel in parcels:
        if parcel.is_staged and not parcel.is_read:
            used[parcel.window] += staged(parcel.nbytes)
    window = 1
    for parcel in parcels:
        if not (parcel.sending and parcel.is_read):
            continue
        if not parcel.is_staged:
            parcel.window = 0
            continue
        size = staged(parcel.nbytes)
        while used[window] and used[window] + size > room:
            window += 1
        used[window] += size
        parcel.window = window


def _tell_windows(parcels: Iterable[Parcel], transport: Transport, timeout_s: float) -> None:
    """Tell readers the windows chosen for them, and learn those of what this rank reads."""
    given: dict[int, list[Parcel]] = {}
    wanted: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        if parcel.is_read:
            (given if parcel.sending else wanted).setdefault(parcel.peer, []).append(parcel)
    sends: list[Message] = [
        (peer, torch.tensor([parcel.window for parcel in ours])) for peer, ours in given.items()
    ]
    receives: list[Message] = [
        (peer, torch.empty(len(theirs), dtype=torch.int64)) for peer, theirs in wanted.items()
    ]
    transport.exchange(sends, receives, timeout_s=timeout_s)
    for peer, windows in receives:
        for parcel, window in zip(wanted[peer], windows.tolist(), strict=True):
            parcel.window = window


def by_window(parcels: Sequence[Parcel]) -> list[list[Parcel]]:
    """The parcels of each window this rank takes part in, in ascending order."""
    windows: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        windows.setdefault(parcel.window, []).append(parcel)
    return [windows[number] for number in sorted(windows)]
