"""Schedule: moved pieces become messages, messages are placed into windows.

Pieces of one pair of ranks are coalesced into *messages* of bounded size: operations, not bytes,
are what small pieces cost. Messages are placed into *windows*, which every rank processes in
ascending order: it posts all its sends and receives of a window, and then waits for the window
before, so that two are under way at a time.

How windows are filled is a choice (:class:`EngineSchedule`)::

    direct   every message as early as the bounds allow; a rank has many partners in a window
    xor      rounds: rank i with i ^ s, for s = 1, 2, ...
    ring     rounds: a round-robin tournament, which needs fewer of them unless the number of
             ranks is a power of two
    auto     the one of them that a simple cost model finds fastest

Why none of them can deadlock: a message has the same window at both ends. Take the unfinished
message of the lowest window: both its ranks have finished everything in lower windows, so both
have posted it, and nothing else is needed for it to complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner.routes import Routes
from dynatrain_megatron.vps.roster import IntArray

_LARGEST_MESSAGE = 16 << 20
_ALIGNMENT = 16  # where a message may begin in staging memory, bytes
_WINDOWS_UNDER_WAY = 2

# The cost model of ``auto``: what gloo does on one machine. Only the order it puts schedules in
# matters, and that hardly depends on the numbers.
_SECONDS_PER_OPERATION = 75e-6
_BYTES_PER_SECOND = 1.5e9


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Messages as columns, in global order; their number is the operation id.

    ``src``, ``dst``, ``window``, ``nbytes`` [m]; ``pieces`` are the moved pieces in message order
    and ``first_piece`` [m + 1] says where each message's begin. ``retained`` are the others.
    """

    src: IntArray
    dst: IntArray
    window: IntArray
    nbytes: IntArray
    first_piece: IntArray
    pieces: Routes
    retained: Routes

    def __len__(self) -> int:
        return len(self.src)

    @property
    def num_windows(self) -> int:
        return int(self.window.max()) + 1 if len(self) else 0

    def windows_of(self, rank: int) -> list[IntArray]:
        """The messages ``rank`` sends and receives, window by window, ids ascending in each."""
        own = np.nonzero((self.src == rank) | (self.dst == rank))[0]
        own = own[np.argsort(self.window[own], kind="stable")]
        if not len(own):
            return []
        return np.split(own, np.nonzero(np.diff(self.window[own]))[0] + 1)

    def staging_bytes(self, rank: int) -> int:
        """Staging memory of one window of ``rank``: the most that any of them can need."""
        sizes = [int(staged(self.nbytes[window]).sum()) for window in self.windows_of(rank)]
        return max(sizes, default=0)

    def peak_staging_bytes(self, rank: int) -> int:
        """Staging memory of all windows that ``rank`` has under way together.

        It takes less only where the transport carries the state as it lies.
        """
        under_way = min(_WINDOWS_UNDER_WAY, len(self.windows_of(rank)))
        return under_way * self.staging_bytes(rank)

    def pieces_of(self, message: int) -> range:
        """Positions in ``pieces`` of one message."""
        return range(int(self.first_piece[message]), int(self.first_piece[message + 1]))


def staged[Number: (int, IntArray)](nbytes: Number) -> Number:
    """Bytes that messages take in staging memory: each begins aligned."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def make_schedule(
    kind: EngineSchedule,
    routes: Routes,
    element_bytes: IntArray,
    num_ranks: int,
    *,
    staging_bytes: int,
    window_ops: int,
) -> Schedule:
    """Messages and windows for ``routes``; ``element_bytes`` is indexed by logical tensor.

    In each window a rank takes part in at most ``window_ops`` messages. Those of its windows that
    are under way together take at most ``staging_bytes``, but for windows of a single message of
    one element that is larger.
    """
    moves = routes.src != routes.dst
    bounds = _Bounds(staging_bytes // _WINDOWS_UNDER_WAY, window_ops)
    limit = max(1, min(_LARGEST_MESSAGE, bounds.staging_bytes // 4))
    pieces = _split_large(routes.take(moves), element_bytes, limit)
    messages, pieces = _coalesce(pieces, pieces.numel * element_bytes[pieces.tensor], limit)
    if kind is EngineSchedule.auto:
        kind = _fastest(messages, num_ranks, bounds)
    window = _place(kind, messages, num_ranks, bounds)
    retained = routes.take(~moves)
    return _ordered(messages, window, pieces, retained, num_ranks)


def schedule_direct(
    routes: Routes,
    element_bytes: IntArray,
    num_ranks: int,
    *,
    staging_bytes: int,
    window_ops: int,
) -> Schedule:
    """:func:`make_schedule` of kind ``direct``."""
    return make_schedule(
        EngineSchedule.direct,
        routes,
        element_bytes,
        num_ranks,
        staging_bytes=staging_bytes,
        window_ops=window_ops,
    )


class _Bounds(NamedTuple):
    """What one window of one rank may have."""

    staging_bytes: int
    window_ops: int


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """Messages as columns [m]: the ``turn``-th of its pair of ranks, and its first piece [m + 1].

    Sorted by pair, then turn.
    """

    src: IntArray
    dst: IntArray
    turn: IntArray
    nbytes: IntArray
    first_piece: IntArray


# ------------------------------------------------------------------ messages


def _coalesce(pieces: Routes, nbytes: IntArray, limit: int) -> tuple[_Messages, Routes]:
    """Messages of at most ``limit`` bytes (or one piece), and the pieces in their order.

    Each takes as many pieces as fit, in the order of the routes.
    """
    order = np.lexsort((pieces.dst, pieces.src))
    pieces, nbytes = pieces.take(order), nbytes[order]
    num = len(pieces)
    total = np.concatenate(([0], np.cumsum(nbytes)))
    changes = np.nonzero((np.diff(pieces.src) != 0) | (np.diff(pieces.dst) != 0))[0] + 1
    pair = np.searchsorted(changes, np.arange(num), side="right")
    pair_first = np.unique(pair, return_index=True)[1]
    pair_stop = np.append(changes, num)[pair]  # of each piece: where its pair ends
    following = np.searchsorted(total, total[:-1] + limit, side="right") - 1
    following = np.clip(following, np.arange(num) + 1, pair_stop)
    # All pairs at once: their first messages, then their second ones, and so on.
    firsts: list[IntArray] = []
    turns: list[IntArray] = []
    at = pair_first
    while len(at):
        firsts.append(at)
        turns.append(np.full(len(at), len(turns), dtype=np.int64))
        stop = following[at]
        at = stop[stop < pair_stop[at]]
    first = np.concatenate([np.zeros(0, dtype=np.int64), *firsts])
    turn = np.concatenate([np.zeros(0, dtype=np.int64), *turns])
    order = np.argsort(first)
    first, turn = first[order], turn[order]
    bounds = np.append(first, num)
    sizes = total[bounds[1:]] - total[bounds[:-1]]
    return _Messages(pieces.src[first], pieces.dst[first], turn, sizes, bounds), pieces


def _split_large(pieces: Routes, element_bytes: IntArray, limit: int) -> Routes:
    """Cut pieces of more than ``limit`` bytes along their first dims until they fit.

    In row-major order; a box of one element stays whole.
    """
    most = np.maximum(1, limit // element_bytes[pieces.tensor])
    shape = pieces.stop - pieces.start
    if not (shape.prod(axis=1) > most).any():
        return pieces
    num, dims = shape.shape
    # inner[:, d]: elements behind one index of dim d. The first dim of which one index fits is cut
    # into blocks of indices, those before it into single ones, those behind it not at all.
    inner = np.ones((num, dims), dtype=np.int64)
    inner[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    cut = np.argmax(inner <= most[:, None], axis=1)
    dim = np.arange(dims)
    block = np.where(dim < cut[:, None], 1, shape)
    rows = np.arange(num)
    block[rows, cut] = np.minimum(shape[rows, cut], most // inner[rows, cut])
    blocks = -(-shape // block)
    count = blocks.prod(axis=1)
    row = np.repeat(rows, count)
    number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    split = pieces.take(row)
    start, stop = split.start.copy(), split.stop.copy()
    for d in reversed(range(dims)):
        number, at = np.divmod(number, blocks[row, d])
        start[:, d] += at * block[row, d]
        stop[:, d] = np.minimum(stop[:, d], start[:, d] + block[row, d])
    return Routes(split.tensor, split.src, split.dst, split.src_slot, split.dst_slot, start, stop)


# ------------------------------------------------------------------ windows


def _place(kind: EngineSchedule, messages: _Messages, num_ranks: int, bounds: _Bounds) -> IntArray:
    """The window of each message, numbered without gaps."""
    if kind is EngineSchedule.direct:
        window = _as_early_as_possible(messages, num_ranks, bounds)
    else:
        window = _in_rounds(kind, messages, num_ranks, bounds)
    numbered: IntArray = np.unique(window, return_inverse=True)[1].reshape(-1)
    return numbered


def _as_early_as_possible(messages: _Messages, num_ranks: int, bounds: _Bounds) -> IntArray:
    """Each message's first window with room, not before an earlier message of its ranks."""
    order = _spread(messages, num_ranks)
    window = [0] * num_ranks  # the last window each rank takes part in ...
    ops = [0] * num_ranks  # ... and what it has there
    held = [0] * num_ranks
    placed = np.zeros(len(order), dtype=np.int64)
    columns = (messages.src[order], messages.dst[order], staged(messages.nbytes[order]))
    most_bytes, most_ops = bounds
    for m, src, dst, size in zip(order.tolist(), *(c.tolist() for c in columns), strict=True):
        at = max(window[src], window[dst])
        for rank in (src, dst):
            full = ops[rank] >= most_ops or held[rank] + size > most_bytes
            if window[rank] == at and ops[rank] and full:
                at += 1
                break
        for rank in (src, dst):
            if window[rank] < at:
                window[rank], ops[rank], held[rank] = at, 0, 0
            ops[rank] += 1
            held[rank] += size
        placed[m] = at
    return placed


def _spread(messages: _Messages, num_ranks: int) -> IntArray:
    """An order in which all ranks have something to do at every point.

    One message of each pair at a time, and each rank's partners in a rotating order.
    """
    distance = (messages.dst - messages.src) % num_ranks
    return np.lexsort((messages.src, distance, messages.turn))


def _in_rounds(
    kind: EngineSchedule, messages: _Messages, num_ranks: int, bounds: _Bounds
) -> IntArray:
    """Windows in which a rank has one partner: all rounds again and again, a few turns in each."""
    low, high = np.minimum(messages.src, messages.dst), np.maximum(messages.src, messages.dst)
    rounds = low ^ high if kind is EngineSchedule.xor else _ring_round(low, high, num_ranks)
    largest = int(staged(messages.nbytes).max(initial=1))
    turns = min(bounds.window_ops, bounds.staging_bytes // largest) // 2
    one_way = turns == 0  # no room for a message each way: the two ways have windows of their own
    part = (messages.src > messages.dst) & one_way
    window: IntArray = messages.turn // max(1, turns)
    window = window * (int(rounds.max(initial=0)) + 1) + rounds
    return window * 2 + part


def _ring_round(low: IntArray, high: IntArray, num_ranks: int) -> IntArray:
    """The round in which two ranks meet: each meets every other once, and one in each round.

    Ranks sit around a table of odd size and meet the one who sits as far on the other side of the
    round's place; with an even number, the last rank meets the one who would meet itself.
    """
    size = num_ranks - 1 + num_ranks % 2
    met: IntArray = np.where(high == size, 2 * low, low + high) % size
    return met


def _fastest(messages: _Messages, num_ranks: int, bounds: _Bounds) -> EngineSchedule:
    """The kind of schedule that the cost model likes best."""
    kinds = (EngineSchedule.direct, EngineSchedule.ring, EngineSchedule.xor)
    costs = {
        kind: _seconds(messages, _place(kind, messages, num_ranks, bounds), num_ranks)
        for kind in kinds
    }
    return min(kinds, key=lambda kind: costs[kind])


def _seconds(messages: _Messages, window: IntArray, num_ranks: int) -> float:
    """When the last rank is done, if ranks send and receive at once at equal rates.

    A rank is through a window when it has carried its messages, and when their other ends have
    theirs.
    """
    order = np.argsort(window, kind="stable")
    done = np.zeros(num_ranks)
    for part in np.split(order, np.nonzero(np.diff(window[order]))[0] + 1):
        src, dst, nbytes = messages.src[part], messages.dst[part], messages.nbytes[part]
        ops = np.bincount(src, minlength=num_ranks) + np.bincount(dst, minlength=num_ranks)
        sent = np.bincount(src, weights=nbytes, minlength=num_ranks)
        received = np.bincount(dst, weights=nbytes, minlength=num_ranks)
        done += ops * _SECONDS_PER_OPERATION + np.maximum(sent, received) / _BYTES_PER_SECOND
        met = np.maximum(done[src], done[dst])
        np.maximum.at(done, src, met)
        np.maximum.at(done, dst, met)
    return float(done.max(initial=0.0))


def _ordered(
    messages: _Messages, window: IntArray, pieces: Routes, retained: Routes, num_ranks: int
) -> Schedule:
    """The schedule, with its messages and their pieces in global order."""
    order = _spread(messages, num_ranks)
    order = order[np.argsort(window[order], kind="stable")]
    counts = np.diff(messages.first_piece)[order]
    first = np.concatenate(([0], np.cumsum(counts)))
    index = np.repeat(messages.first_piece[:-1][order] - first[:-1], counts)
    return Schedule(
        messages.src[order],
        messages.dst[order],
        window[order],
        messages.nbytes[order],
        first,
        pieces.take(index + np.arange(len(index))),
        retained,
    )
