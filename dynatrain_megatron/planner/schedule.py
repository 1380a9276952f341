"""Schedule: which messages there are, and in which window each of them travels.

The elements that go from one rank to another are a stream, cut into *messages* of bounded size:
operations, not bytes, are what small pieces cost. Messages are placed into *windows*, processed in
ascending order by every rank; a rank posts all its sends and receives of a window, and then waits
for the window before, so that two are under way at a time. This module has the columns;
:mod:`planner.windows` chooses by which schedule they are filled.

Which messages there are follows from the lengths of the streams alone, so every rank knows the
windows of all without knowing what is in them.

Why no schedule can deadlock (docs/schedules.md says it with a picture):

1. a message has the same window at both ends;
2. every rank goes through its windows in ascending order, posts all of one before it waits for any
   of it, and waits for nothing but messages of lower windows before it posts the next, whatever
   else it does in between (staging memory, memory stages);
3. messages from one rank to another are posted in the same order at both ends;
4. the transport can carry all operations of one window of a rank together: there are at most
   ``window_ops``, also where parts of a message travel by themselves (``max_parcels``).

Take the unfinished messages of the lowest window: their ranks have finished everything in lower
windows, so by 2 both ends have posted them or will without waiting; by 3 and 4 nothing is before
them, and so they complete. A rank without messages in a window has nothing to wait for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.planner.cells import grouped_order
from dynatrain_megatron.planner.flows import Flows
from dynatrain_megatron.planner.routes import Routes
from dynatrain_megatron.planner.shares import Shares
from dynatrain_megatron.vps.boxes import IntArray, ranges, run_starts

WINDOWS_UNDER_WAY = 2
ALIGNMENT = 16
"""Where a message may begin in staging memory, bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Pairs of ranks with something to move, in order of source and destination.

    ``src``, ``dst``, ``numel`` and ``nbytes`` [n] of the pair's stream, whose largest elements have
    ``element_bytes`` [n].
    """

    src: IntArray
    dst: IntArray
    numel: IntArray
    nbytes: IntArray
    element_bytes: IntArray

    def __len__(self) -> int:
        return len(self.src)

    def opposite(self) -> IntArray:
        """For each link the one that goes the other way between the same ranks, or -1, [n]."""
        size = max(int(self.src.max(initial=0)), int(self.dst.max(initial=0))) + 1
        key, wanted = self.src * size + self.dst, self.dst * size + self.src
        place = np.searchsorted(key, wanted)
        place[place == len(key)] = 0
        return np.where(key[place] == wanted, place, -1)

    def parts(self, link: IntArray, part: IntArray, steps: IntArray) -> IntArray:
        """Elements in these parts of these links, whose streams are cut every ``steps`` [n]."""
        return np.minimum(steps[link], self.numel[link] - part * steps[link])


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """How the stream of each link is cut and placed.

    Message p of link l has the elements from ``p * steps[l]`` on, ``steps[l]`` of them but for the
    last of ``count[l]``. It is in window p, if ``first[l]`` is -1, and ``window[first[l] + p]``
    otherwise.
    """

    steps: IntArray
    count: IntArray
    first: IntArray
    window: IntArray

    def __len__(self) -> int:
        return int(self.count.sum())

    @property
    def num_windows(self) -> int:
        spread = int(self.count[self.first < 0].max(initial=0))
        return max(spread, int(self.window.max(initial=-1)) + 1)

    def of_links(self, link: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(link, part, window) of every message of these links."""
        part, owner = ranges(np.zeros(len(link), dtype=np.int64), self.count[link])
        link = link[owner]
        window = part.copy()
        placed = self.first[link] >= 0
        window[placed] = self.window[(self.first[link] + part)[placed]]
        return link, part, window

    def fullest_window(self, links: Links) -> tuple[int, int]:
        """The most messages that any rank has in one window, and the most bytes in one."""
        most = nbytes = 0
        for link, part in self.by_window():
            end = np.concatenate((links.src[link], links.dst[link]))
            size = links.parts(link, part, self.steps) * links.element_bytes[link]
            most = max(most, int(np.bincount(end).max(initial=0)))
            nbytes = max(nbytes, int(np.bincount(end, np.concatenate((size, size))).max(initial=0)))
        return most, nbytes

    def by_window(self) -> Iterator[tuple[IntArray, IntArray]]:
        """(link, part) of every message of each window, in ascending order."""
        spread, placed = (np.nonzero(chosen)[0] for chosen in (self.first < 0, self.first >= 0))
        link, part, at = self.of_links(placed)
        order = grouped_order(at)
        link, part = link[order], part[order]
        end = np.searchsorted(at[order], np.arange(self.num_windows + 1)).tolist()
        for window in range(self.num_windows):
            own = slice(end[window], end[window + 1])
            spread = spread[self.count[spread] > window]
            if not len(spread):
                yield link[own], part[own]
                continue
            every = np.concatenate((spread, link[own]))
            yield every, np.concatenate((np.full(len(spread), window), part[own]))


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Messages as columns, those of all ranks or of one, in the same order everywhere.

    ``src``, ``dst``, ``window``, ``nbytes`` [m]; ``pieces`` are the moved pieces in message order
    and ``first_piece`` [m + 1] says where each message's begin. ``retained`` are the others.
    ``max_parcels`` [m] is how many operations a message may be: those of a window of any rank are
    at most ``window_ops``.
    """

    src: IntArray
    dst: IntArray
    window: IntArray
    nbytes: IntArray
    max_parcels: IntArray
    first_piece: IntArray
    pieces: Routes
    retained: Routes

    def __len__(self) -> int:
        return len(self.src)

    @property
    def num_windows(self) -> int:
        return int(self.window.max()) + 1 if len(self) else 0

    def windows_of(self, rank: int) -> list[IntArray]:
        """The messages ``rank`` sends and receives, window by window, in order in each."""
        own = np.nonzero((self.src == rank) | (self.dst == rank))[0]
        own = own[np.argsort(self.window[own], kind="stable")]
        if not len(own):
            return []
        return np.split(own, np.nonzero(np.diff(self.window[own]))[0] + 1)

    def pairs_of(self, rank: int) -> list[list[IntArray]]:
        """Positions in ``pieces`` of all that ``rank`` sends to, or gets from, another rank.

        One array for each other rank and direction, in the window of its first message, and like
        the messages in order in each.
        """
        messages: dict[tuple[int, int], list[int]] = {}
        for m in itertools.chain.from_iterable(window.tolist() for window in self.windows_of(rank)):
            messages.setdefault((int(self.src[m]), int(self.dst[m])), []).append(m)
        windows: dict[int, list[IntArray]] = {}
        for own in messages.values():
            pieces = np.concatenate([np.array(self.pieces_of(m), dtype=np.int64) for m in own])
            windows.setdefault(int(self.window[own[0]]), []).append(pieces)
        return list(windows.values())

    def staging_bytes(self, rank: int) -> int:
        """Staging memory of one window of ``rank``: the most that any of them can need."""
        sizes = [int(staged(self.nbytes[window]).sum()) for window in self.windows_of(rank)]
        return max(sizes, default=0)

    def windows_under_way(self, rank: int) -> int:
        """How many windows of ``rank`` are under way at a time."""
        return min(WINDOWS_UNDER_WAY, len(self.windows_of(rank)))

    def pieces_of(self, message: int) -> range:
        """Positions in ``pieces`` of one message."""
        return range(int(self.first_piece[message]), int(self.first_piece[message + 1]))


def staged[Number: (int, IntArray)](nbytes: Number) -> Number:
    """Bytes that messages take in staging memory: each begins aligned."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def links_of(flows: Flows, shares: Shares) -> tuple[Links, IntArray]:
    """Who moves how much to whom, and the link of each share (-1 where it is retained)."""
    moved = np.nonzero(shares.src != shares.dst)[0]
    own = shares.take(moved)
    size = flows.element_bytes[own.flow]
    new = run_starts(own.src, own.dst)
    first = np.nonzero(new)[0]
    link = np.full(len(shares), -1)
    link[moved] = np.cumsum(new) - 1
    if not len(first):
        none = np.zeros(0, dtype=np.int64)
        return Links(none, none, none, none, none), link
    numel, nbytes = (np.add.reduceat(x, first) for x in (own.numel, own.numel * size))
    largest = np.maximum.reduceat(size, first)
    return Links(own.src[first], own.dst[first], numel, nbytes, largest), link
