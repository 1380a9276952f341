"""Regions: boxes ``[start, stop)`` in the coordinates of a logical tensor, and flat ranges of them.

The distributed optimizer cuts a rank's local tensor at arbitrary *flat* offsets. In the tensor's
coordinates such a range ``[s, e)`` of a row-major box is a staircase, which at most
``2 * ndim - 1`` regions cover exactly::

    shape (4, 5), range [3, 17)

        . . . # #     head: rest of the first row
        # # # # #  \\  middle: whole rows
        # # # # #  /
        # # . . .     tail: beginning of the last row
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A non-empty box ``[start, stop)``; ``start`` and ``stop`` have one entry per dim.

    Raises ``ValueError`` where a box would be empty, negative or of unequal dims: an empty
    intersection is ``None``, never an empty Region.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"start {self.start} and stop {self.stop} differ in number of dims")
        if any(a < 0 or a >= b for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"empty or negative region [{self.start}, {self.stop})")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """The region that covers a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def shift(self, offset: Sequence[int]) -> Region:
        """This region moved by ``offset`` (one entry per dim)."""
        return Region(
            tuple(a + o for a, o in zip(self.start, offset, strict=True)),
            tuple(b + o for b, o in zip(self.stop, offset, strict=True)),
        )

    def relative_to(self, origin: Sequence[int]) -> Region:
        """This region in coordinates whose zero is ``origin``."""
        return self.shift([-o for o in origin])

    def intersect(self, other: Region) -> Region | None:
        """The common part, or ``None`` where there is none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Region(start, stop)

    def contains(self, other: Region) -> bool:
        """Whether ``other`` lies wholly inside."""
        return self.intersect(other) == other

    def subtract(self, other: Region) -> list[Region]:
        """Disjoint regions that cover this one without ``other`` (at most ``2 * ndim``).

        Cut dim by dim: what lies before and after ``other`` in dim 0 comes off whole, then dim 1
        of what is left, and so on, so that row-major runs stay as long as they can.
        """
        common = self.intersect(other)
        if common is None:
            return [self]
        rest: list[Region] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(self.ndim):
            if start[dim] < common.start[dim]:
                before = list(stop)
                before[dim] = common.start[dim]
                rest.append(Region(tuple(start), tuple(before)))
            if common.stop[dim] < stop[dim]:
                after = list(start)
                after[dim] = common.stop[dim]
                rest.append(Region(tuple(after), tuple(stop)))
            start[dim], stop[dim] = common.start[dim], common.stop[dim]
        return rest


def without(whole: Region, parts: Iterable[Region]) -> list[Region]:
    """Disjoint regions that cover ``whole`` without any of ``parts``; none where they cover it."""
    rest = [whole]
    for part in parts:
        rest = [left for region in rest for left in region.subtract(part)]
    return rest


def flat_range_regions(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """Regions that cover the flat range ``[start, stop)`` of a row-major box of ``shape``.

    They are disjoint, in ascending flat order, at most ``2 * ndim - 1`` and in the box's own
    coordinates. A scalar (``shape == ()``) is one region without dims. Raises ``ValueError``
    where the range is not inside the box.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"flat range [{start}, {stop}) is not inside [0, {numel})")
    if start == stop:
        return []
    if len(shape) <= 1:
        return [Region((start,), (stop,))] if shape else [Region((), ())]
    inner = tuple(shape[1:])
    row = math.prod(inner)
    regions: list[Region] = []
    first, head = divmod(start, row)
    if head:  # the rest of a row that was begun before
        head_stop = min(row, stop - first * row)
        regions += [_in_row(first, r) for r in flat_range_regions(inner, head, head_stop)]
        first += 1
    last, tail = divmod(stop, row)
    if first < last:
        regions.append(Region((first, *(0 for _ in inner)), (last, *inner)))
    if tail and first <= last:
        regions += [_in_row(last, r) for r in flat_range_regions(inner, 0, tail)]
    return regions


def _in_row(row: int, region: Region) -> Region:
    return Region((row, *region.start), (row + 1, *region.stop))
