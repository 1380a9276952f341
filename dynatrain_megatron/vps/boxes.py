"""Many boxes at once: the arithmetic of :mod:`vps.region` on columns.

Boxes are two arrays ``start``, ``stop`` [n, D], tensors of fewer dims padded with [0, 1). A box has
two *flat ends*: the row-major positions of its first element and behind its last one, counted
through all logical tensors one after the other. They name the box (no other has the same two), and
where two boxes have an element in common, their flat intervals overlap, so that pairs are found by
sorting instead of by trying all::

    shape (4, 5)     . . . . .       box [(1, 1), (3, 3)) has the flat ends 6 and 13
                     . # # . .
                     . # # . .
                     . . . . .
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dynatrain_megatron.vps.tensors import LogicalTensor

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
UintArray = NDArray[np.uint64]

_WORD = np.uint64(0x9E3779B97F4A7C15)


def volumes(start: IntArray, stop: IntArray) -> IntArray:
    """Elements of each box, [n]; zero or less where a box is empty."""
    found = np.ones(len(start), dtype=np.int64)
    for dim in range(start.shape[1]):
        found *= np.maximum(stop[:, dim] - start[:, dim], 0)
    return found


def flat_ends(
    tensors: Sequence[LogicalTensor], tensor: IntArray, start: IntArray, stop: IntArray
) -> tuple[IntArray, IntArray]:
    """The flat ends of boxes, each [n]; ``tensor`` [n] indexes ``tensors``."""
    dims = start.shape[1]
    strides = np.zeros((len(tensors), dims), dtype=np.int64)
    first = np.zeros(len(tensors), dtype=np.int64)
    total = 0
    for number, logical in enumerate(tensors):
        size = 1
        for dim in reversed(range(len(logical.shape))):
            strides[number, dim] = size
            size *= logical.shape[dim]
        first[number] = total
        total += size
    low = first[tensor]
    high = low + 1
    for dim in range(dims):
        stride = strides[tensor, dim]
        low = low + start[:, dim] * stride
        high = high + (stop[:, dim] - 1) * stride
    return low, high


def ranges(first: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """All of ``first[i] … first[i] + count[i] - 1`` one after the other, and each one's i."""
    owner = np.repeat(np.arange(len(first)), count)
    begin = np.cumsum(count) - count
    return np.arange(len(owner)) + (first - begin)[owner], owner


def run_starts(*columns: IntArray) -> BoolArray:
    """Where a row differs from the one before in any column, [n]; the first always does."""
    found = np.ones(len(columns[0]), dtype=np.bool_)
    found[1:] = False
    for column in columns:
        found[1:] |= column[1:] != column[:-1]
    return found


def overlapping_intervals(
    low_a: IntArray, high_a: IntArray, low_b: IntArray, high_b: IntArray
) -> tuple[IntArray, IntArray]:
    """All pairs (i, j) where interval i of a and j of b overlap; both sides sorted by ``low``.

    Empty intervals, as damaged plans have them, may overlap or not; they never raise.
    """
    first = np.searchsorted(low_a, low_b, side="left")
    last = np.searchsorted(low_a, high_b, side="left")
    inside_b, of_b = ranges(first, np.maximum(last - first, 0))
    first = np.searchsorted(low_b, low_a, side="right")
    last = np.searchsorted(low_b, high_a, side="left")
    inside_a, of_a = ranges(first, np.maximum(last - first, 0))
    return np.concatenate((inside_b, of_a)), np.concatenate((of_b, inside_a))


def flat_parts(
    start: IntArray, stop: IntArray, low: IntArray, high: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Boxes that cover the flat range [low[i], high[i]) of box i, at most 2 · D − 1 of each.

    Ranges count in the box's own row-major order and are not empty. Returns (i, start, stop) of
    the parts, in order of i and then of their first element; :func:`vps.region.flat_range_regions`
    for many boxes.
    """
    number, dims = start.shape
    index = np.arange(number)
    cut = (low > 0) | (high < volumes(start, stop))
    whole = index[~cut]
    parts = [(whole, start[whole], stop[whole])]
    index, start, stop, low, high = index[cut], start[cut], stop[cut], low[cut], high[cut]
    shape = stop - start
    inner = np.ones_like(shape)
    for dim in reversed(range(dims - 1)):
        inner[:, dim] = inner[:, dim + 1] * shape[:, dim + 1]
    at_low, at_high = low[:, None] // inner, high[:, None] // inner
    at_low[:, 1:] %= shape[:, 1:]
    at_high[:, 1:] %= shape[:, 1:]
    up = at_low + (low[:, None] % inner > 0)  # the first whole row, in each dim
    split = np.argmax(at_low != at_high, axis=1) if dims else np.zeros(len(index), np.int64)

    def part(rows: BoolArray, dim: int, lead: IntArray, a: IntArray, b: IntArray) -> None:
        chosen = np.nonzero(rows & (a < b))[0]
        part_start, part_stop = start[chosen].copy(), stop[chosen].copy()
        part_start[:, :dim] += lead[chosen, :dim]
        part_stop[:, :dim] = part_start[:, :dim] + 1
        part_stop[:, dim] = part_start[:, dim] + b[chosen]
        part_start[:, dim] += a[chosen]
        parts.append((index[chosen], part_start, part_stop))

    zero = np.zeros(len(index), dtype=np.int64)
    for dim in reversed(range(1, dims)):  # the rests of rows that begin before the range
        begun = (split < dim) & (low % inner[:, dim - 1] > 0)
        part(begun, dim, at_low, up[:, dim], shape[:, dim])
    for dim in range(dims):
        part(split == dim, dim, at_low, up[:, dim], at_high[:, dim])
    for dim in range(1, dims):  # the beginnings of rows that end behind it
        part(split < dim, dim, at_high, zero, at_high[:, dim])
    owner = np.concatenate([p[0] for p in parts])
    order = np.argsort(owner, kind="stable")
    starts, stops = (np.concatenate([p[side] for p in parts])[order] for side in (1, 2))
    return owner[order], starts, stops


def measures(start: IntArray, stop: IntArray) -> UintArray:
    """A random measure of each box, [n], modulo 2⁶⁴; additive over any cut into boxes.

    Boxes whose measures and volumes add up to those of a box cover each of its elements exactly
    once, or else pseudo-random numbers agree by chance (about D in 2⁶⁰): the sum over elements of
    (times covered − 1) · weight is a polynomial in the random values at the boxes' ends, zero
    everywhere only where all are covered once.
    """
    found = np.ones(len(start), dtype=np.uint64)
    for dim in range(start.shape[1]):
        found *= _values(stop[:, dim], dim) - _values(start[:, dim], dim)
    return found


def scatter(number: IntArray) -> UintArray:
    """A pseudo-random 64-bit number for each of ``number``, the same everywhere (splitmix64)."""
    z = (number.astype(np.uint64) + np.uint64(1)) * _WORD
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _values(position: IntArray, dim: int) -> UintArray:
    return scatter(position * 64 + dim)
