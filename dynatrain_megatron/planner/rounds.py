"""The schedules ``xor`` and ``ring``: rounds in which a rank has one peer.

In a round every rank is paired with one other or idle, and over all rounds with each other rank
once. What the two have for each other, both ways, is all they do in that round::

    xor, 5 ranks: i with i ⊕ s        ring, 5 ranks: i with j where i + j = r modulo 5

    s = 1    0-1  2-3  4              r = 0    0  1-4  2-3
    s = 2    0-2  1-3  4              r = 1    0-1  2-4  3
    s = 3    0-3  1-2  4              r = 2    0-2  1  3-4
    s = 4    0-4  1  2  3             r = 3    0-3  1-2  4
    s = 5    0  1-4  2  3             r = 4    0-4  1-3  2
    s = 6    0  1  2-4  3
    s = 7    0  1  2  3-4

A round has as many windows as its largest pair needs; one in which nobody has anything has none.
"""

from __future__ import annotations

import numpy as np

from dynatrain_megatron.planner.schedule import (
    ALIGNMENT,
    WINDOWS_UNDER_WAY,
    Links,
    Messages,
    staged,
)
from dynatrain_megatron.vps.boxes import BoolArray, IntArray, ranges


def xor_rounds(links: Links) -> IntArray:
    """The round of each link, [n]: i meets i ⊕ s in round s − 1, idle where there is no such rank.

    Of N ranks there are 2^⌈log2 N⌉ − 1 rounds.
    """
    return (links.src ^ links.dst) - 1


def ring_rounds(links: Links, num_ranks: int) -> IntArray:
    """The round of each link, [n]: of N ranks there are N − 1 rounds if N is even, N if it is odd.

    This is the round robin of tournaments: i meets j where i + j is the round, modulo an odd
    number. Of an even number of ranks the last is left out of that and meets whoever would meet
    itself.
    """
    num_rounds = (num_ranks - 1) | 1
    low, high = np.minimum(links.src, links.dst), np.maximum(links.src, links.dst)
    return np.where(high == num_rounds, 2 * low, low + high) % num_rounds


def schedule_rounds(
    links: Links, round_of_link: IntArray, *, staging_bytes: int, window_ops: int
) -> Messages:
    """Each link in the windows of its round, as few as the bounds allow.

    Bounds are those of :func:`planner.windows.place_messages`. Both ways of a pair share its
    windows evenly; where these have no room for both, one way comes after the other.
    """
    staging_bytes = max(1, staging_bytes // WINDOWS_UNDER_WAY)
    numel, size, back = links.numel, links.element_bytes, links.opposite()
    alone = (back < 0) | (window_ops < 2) | (staged(size) + staged(size[back]) > staging_bytes)
    other = np.where(alone, 0, numel[back])
    other_size = np.where(alone, 0, size[back])
    steps = -(-numel // _num_windows(numel, size, other, other_size, staging_bytes))
    count = -(-numel // steps)
    begin = np.where(alone & (back >= 0) & (links.src > links.dst), count[back], 0)
    width = np.zeros(int(round_of_link.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(width, round_of_link, begin + count)
    first_of_round = np.cumsum(width) - width
    window, _ = ranges(first_of_round[round_of_link] + begin, count)
    return Messages(steps, count, np.cumsum(count) - count, window)


def _num_windows(
    numel: IntArray, size: IntArray, other: IntArray, other_size: IntArray, staging_bytes: int
) -> IntArray:
    """How many windows two streams take together, [n]; elements of one and of the other."""

    def fit(num: IntArray) -> BoolArray:
        parts = -(-numel // num) * size, -(-other // num) * other_size
        return staged(parts[0]) + staged(parts[1]) <= staging_bytes

    nbytes = numel * size + other * other_size
    # A part is longer than its stream's even share by less than an element, and then aligned.
    room = staging_bytes - size - other_size - 2 * ALIGNMENT
    found = np.where(room > 0, -(-nbytes // np.maximum(room, 1)), np.maximum(numel, other))
    for more in (2, 1, 0):  # mostly, fewer will do
        few = -(-nbytes // staging_bytes) + more
        found = np.where(fit(few), few, found)
    return found
