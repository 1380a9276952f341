"""The schedule ``direct``: everything as early as the bounds of windows allow.

What is long enough is spread evenly over the windows that the busiest rank needs, which keeps every
rank's windows equally full; what is short fills the room that this leaves::

    window      0     1     2     3
    0 -> 1      ##    ##    ##    ##       8 units on 4 windows
    2 -> 1      #     #     #     #
    0 -> 3      ###
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.planner.cells import grouped_order
from dynatrain_megatron.planner.schedule import WINDOWS_UNDER_WAY, Links, Messages, staged
from dynatrain_megatron.vps.boxes import BoolArray, IntArray, ranges, run_starts

_SMALLEST_PART = 1 << 20  # bytes of a stream that is spread over windows, in each of them
_LARGEST_MESSAGE = 16 << 20  # of other streams
_TRIES = 4  # to fill a window; each costs time and finds less than the one before
_LOOK_AHEAD = 4  # windows' worth of messages that are looked at for one window


def schedule_direct(
    links: Links, num_ranks: int, *, staging_bytes: int, window_ops: int
) -> Messages:
    """All messages in as few windows as the bounds allow.

    Bounds are those of :func:`planner.windows.place_messages`.
    """
    staging_bytes = max(1, staging_bytes // WINDOWS_UNDER_WAY)
    limit = max(1, min(_LARGEST_MESSAGE, staging_bytes // 4))
    steps = np.maximum(1, limit // links.element_bytes)
    spread, wide = _spread(links, num_ranks, staging_bytes, window_ops)
    steps[spread] = wide
    count = -(-links.numel // steps)
    first = np.full(len(links), -1)
    rest = np.nonzero(~spread)[0]
    first[rest] = np.cumsum(count[rest]) - count[rest]
    part, owner = ranges(np.zeros(len(rest), dtype=np.int64), count[rest])
    link = rest[owner]
    # One message of each pair at a time, and each rank's peers in a rotating order, so that in
    # every window all ranks have something to do.
    turn = (links.dst - links.src) % num_ranks
    order = grouped_order((part * num_ranks + turn[link]) * num_ranks + links.src[link])
    nbytes = staged(links.parts(link, part, steps) * links.element_bytes[link])
    held, ops = (
        _at_both_ends(links, spread, amount, num_ranks)
        for amount in (staged(steps * links.element_bytes), np.ones_like(steps))
    )
    window = np.zeros(len(part), dtype=np.int64)
    window[order] = _place(
        links.src[link[order]],
        links.dst[link[order]],
        nbytes[order],
        _Room(held, ops, int(count[spread].max(initial=0)), staging_bytes, window_ops),
    )
    return Messages(steps, count, first, window)


def _spread(
    links: Links, num_ranks: int, staging_bytes: int, window_ops: int
) -> tuple[BoolArray, IntArray]:
    """Which links are spread over all windows, and how many elements of each are in one."""
    least = max(_SMALLEST_PART, -(-staging_bytes // window_ops))
    every = np.ones(len(links), dtype=np.bool_)
    load = _at_both_ends(links, every, links.numel * links.element_bytes, num_ranks)
    windows = -(-int(load.max(initial=0)) // staging_bytes)
    for _ in range(_TRIES):
        spread = links.nbytes >= windows * least
        steps = -(-links.numel // max(1, windows))
        held = _at_both_ends(links, spread, staged(steps * links.element_bytes), num_ranks)
        if held.max(initial=0) <= staging_bytes:  # but for rounding up it always is
            return spread, steps[spread]
        windows += 1 + windows // 64
    return ~every, np.zeros(0, dtype=np.int64)


def _at_both_ends(links: Links, chosen: BoolArray, amount: IntArray, num_ranks: int) -> IntArray:
    """The sum over the chosen links of each rank, [num_ranks]."""
    total = np.zeros(num_ranks, dtype=np.int64)
    for end in (links.src, links.dst):
        np.add.at(total, end[chosen], amount[chosen])
    return total


@dataclass(frozen=True, slots=True, eq=False)
class _Room:
    """Bounds of a window, and what is in the first ``windows`` of them already, [num_ranks]."""

    held: IntArray
    ops: IntArray
    windows: int
    staging_bytes: int
    window_ops: int


def _place(src: IntArray, dst: IntArray, nbytes: IntArray, room: _Room) -> IntArray:
    """The window of each message.

    Window by window, a rank offers room to its next messages in order; those that both their ranks
    have room for are in. What the others leave is offered again, to those that still fit.
    """
    placed = np.full(len(src), -1)
    num_ranks = len(room.ops)
    at_once = min(room.window_ops, room.staging_bytes // max(1, int(nbytes.max(initial=1))))
    look = max(4096, _LOOK_AHEAD * num_ranks * at_once)
    waiting = np.zeros(0, dtype=np.int64)
    seen = window = 0
    while seen < len(src) or len(waiting):
        more = min(len(src), seen + max(0, look - len(waiting)))
        waiting = np.concatenate((waiting, np.arange(seen, more)))
        seen = more
        begun = window < room.windows
        ops, held = (x.copy() if begun else np.zeros_like(x) for x in (room.ops, room.held))
        trying = waiting
        for _ in range(_TRIES):
            a, b, size = src[trying], dst[trying], nbytes[trying]
            fits = _fits(a, b, size, ops, held, room)
            placed[trying[fits]] = window
            for end in (a[fits], b[fits]):
                np.add.at(ops, end, 1)
                np.add.at(held, end, size[fits])
            left = np.where(ops > 0, room.staging_bytes - held, np.iinfo(np.int64).max)
            left[ops >= room.window_ops] = 0
            trying = trying[~fits & (size <= np.minimum(left[a], left[b]))]
            if not len(trying):
                break
        still = placed[waiting] < 0
        # Where nothing finds room beside what is spread, nothing will in the next such window.
        window = room.windows if begun and still.all() else window + 1
        waiting = waiting[still]
    return placed


def _fits(
    src: IntArray, dst: IntArray, nbytes: IntArray, ops: IntArray, held: IntArray, room: _Room
) -> BoolArray:
    """Which messages both ends have room for if each lets its own in by their order."""
    rank = np.stack((src, dst), axis=1).reshape(-1)
    order = grouped_order(rank)
    message, end = order >> 1, rank[order]
    new = run_starts(end)
    begin = np.nonzero(new)[0]
    group = np.cumsum(new) - 1
    size = nbytes[message]
    total = np.cumsum(size)
    total += (held[end[begin]] - (total[begin] - size[begin]))[group]
    count = np.arange(len(end)) - begin[group] + 1 + ops[end]
    fits = (total <= room.staging_bytes) & (count <= room.window_ops)
    fits |= new & (ops[end] == 0)
    result = np.ones(len(src), dtype=np.bool_)
    result[message[~fits]] = False
    return result
