"""Bytes that lie in several places, addressed by how many of them lie before.

::

    spans        [addr a, 3]  [addr b, 4]  [addr c, 2]
    bytes          0  1  2      3 4 5 6       7  8
    between(2, 8)        [a + 2, 1] [b, 4] [c, 1]
"""

from __future__ import annotations

import numpy as np

from dynatrain_megatron.vps.boxes import IntArray

MOST_SPANS = 1024
"""The kernel's limit for one call that takes a list of spans."""


class Spans:
    """Spans of memory, (address, bytes) [n, 2], one after the other; ``bytes`` in all."""

    def __init__(self, spans: IntArray) -> None:
        self._spans = spans
        self._ends = np.cumsum(spans[:, 1])
        self.bytes = int(self._ends[-1]) if len(spans) else 0

    def reach(self, start: int) -> int:
        """How far one call can go from ``start``."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        return int(self._ends[min(first + MOST_SPANS, len(self._ends)) - 1])

    def between(self, start: int, stop: int) -> IntArray:
        """The spans of these bytes, the first and the last cut to fit."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        found = self._spans[first : last + 1].copy()
        found[-1, 1] -= self._ends[last] - stop
        skipped = start - (self._ends[first] - self._spans[first, 1])
        found[0] += (skipped, -skipped)
        return found
