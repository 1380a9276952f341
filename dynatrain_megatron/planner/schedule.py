"""Schedule: moved pieces become messages, messages are placed into windows.

Pieces of one pair of ranks are coalesced into *messages* of bounded size: operations, not bytes,
are what small pieces cost. Messages are placed into *windows*, processed in ascending order by
every rank; a rank posts all its sends and receives of a window, waits for all, goes on.

Why this cannot deadlock: a message has the same window at both ends. Take the unfinished message
of the lowest window: both its ranks have finished everything in lower windows, so both have
posted it, and nothing else is needed for it to complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.planner.routes import Routes
from dynatrain_megatron.vps.roster import IntArray

_LARGEST_MESSAGE = 16 << 20


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

    def peak_staging_bytes(self, rank: int) -> int:
        """The most bytes of messages that ``rank`` sends and receives in one window."""
        own = (self.src == rank) | (self.dst == rank)
        total = np.zeros(self.num_windows, dtype=np.int64)
        np.add.at(total, self.window[own], self.nbytes[own])
        return int(total.max(initial=0))

    def pieces_of(self, message: int) -> range:
        """Positions in ``pieces`` of one message."""
        return range(int(self.first_piece[message]), int(self.first_piece[message + 1]))


def schedule_direct(
    routes: Routes,
    element_bytes: IntArray,
    num_ranks: int,
    *,
    staging_bytes: int,
    window_ops: int,
) -> Schedule:
    """All messages as early as the bounds allow.

    In each window a rank takes part in at most ``window_ops`` messages, and those it sends and
    receives have at most ``staging_bytes`` together, but for a single message of one element that
    is larger. ``element_bytes`` is indexed by logical tensor.
    """
    moves = routes.src != routes.dst
    limit = max(1, min(_LARGEST_MESSAGE, staging_bytes // 4))
    pieces = _split_large(routes.take(moves), element_bytes, limit)
    nbytes = pieces.numel * element_bytes[pieces.tensor]
    order = np.lexsort((np.arange(len(pieces)), pieces.dst, pieces.src))
    messages: list[tuple[int, int, int, list[int], int]] = []  # (turn, src, dst, pieces, bytes)
    for i in order:
        src, dst, size = int(pieces.src[i]), int(pieces.dst[i]), int(nbytes[i])
        if messages:
            turn, last_src, last_dst, members, total = messages[-1]
            if (last_src, last_dst) == (src, dst):
                if total + size <= limit:
                    messages[-1] = (turn, src, dst, [*members, int(i)], total + size)
                else:
                    messages.append((turn + 1, src, dst, [int(i)], size))
                continue
        messages.append((0, src, dst, [int(i)], size))
    # One message of each pair at a time, and each rank's peers in a rotating order, so that in
    # every window all ranks have something to do.
    messages.sort(key=lambda m: (m[0], (m[2] - m[1]) % num_ranks, m[1]))
    windows = _place(messages, num_ranks, staging_bytes=staging_bytes, window_ops=window_ops)
    counts = [len(m[3]) for m in messages]
    return Schedule(
        np.array([m[1] for m in messages], dtype=np.int64),
        np.array([m[2] for m in messages], dtype=np.int64),
        np.array(windows, dtype=np.int64),
        np.array([m[4] for m in messages], dtype=np.int64),
        np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int64),
        pieces.take(np.array([i for m in messages for i in m[3]], dtype=np.int64)),
        routes.take(~moves),
    )


def _place(
    messages: list[tuple[int, int, int, list[int], int]],
    num_ranks: int,
    *,
    staging_bytes: int,
    window_ops: int,
) -> list[int]:
    """The window of each message: the first, not before an earlier one of its ranks, with room."""
    window = [0] * num_ranks  # the last window each rank takes part in ...
    ops = [0] * num_ranks  # ... and what it has there
    staged = [0] * num_ranks
    placed: list[int] = []
    for _, src, dst, _, size in messages:
        at = max(window[src], window[dst])
        for rank in (src, dst):
            full = ops[rank] >= window_ops or staged[rank] + size > staging_bytes
            if window[rank] == at and ops[rank] and full:
                at += 1
                break
        for rank in (src, dst):
            if window[rank] < at:
                window[rank], ops[rank], staged[rank] = at, 0, 0
            ops[rank] += 1
            staged[rank] += size
        placed.append(at)
    return placed


def _split_large(pieces: Routes, element_bytes: IntArray, limit: int) -> Routes:
    """Cut pieces of more than ``limit`` bytes along their first dims until they fit."""
    large = pieces.numel * element_bytes[pieces.tensor] > limit
    if not large.any():
        return pieces
    rows: list[int] = []
    starts: list[IntArray] = []
    stops: list[IntArray] = []
    for i in range(len(pieces)):
        boxes = [(pieces.start[i], pieces.stop[i])]
        if large[i]:
            boxes = _cut(*boxes[0], max(1, limit // int(element_bytes[pieces.tensor[i]])))
        for start, stop in boxes:
            rows.append(i)
            starts.append(start)
            stops.append(stop)
    split = pieces.take(np.array(rows, dtype=np.int64))
    return Routes(
        split.tensor,
        split.src,
        split.dst,
        split.src_slot,
        split.dst_slot,
        np.array(starts),
        np.array(stops),
    )


def _cut(start: IntArray, stop: IntArray, limit: int) -> list[tuple[IntArray, IntArray]]:
    """Sub-boxes of at most ``limit`` elements (at least one), in row-major order."""
    shape = stop - start
    if int(shape.prod()) <= limit:
        return [(start, stop)]
    dim = int(np.argmax(shape > 1))
    inner = int(shape[dim + 1 :].prod())
    step = max(1, limit // inner)
    boxes: list[tuple[IntArray, IntArray]] = []
    for low in range(int(start[dim]), int(stop[dim]), step):
        part_start, part_stop = start.copy(), stop.copy()
        part_start[dim], part_stop[dim] = low, min(low + step, int(stop[dim]))
        boxes += _cut(part_start, part_stop, limit)
    return boxes
