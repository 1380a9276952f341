"""Where a tensor lies in memory: rows of equal length at regular places.

::

    a 3 x 4 cut of a matrix of 6 columns      row bytes = 4 * itemsize
    . # # # # .   address ->                  counts    = (3,)
    . # # # # .                               strides   = (6 * itemsize,)
    . # # # # .
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dynatrain_megatron.vps.boxes import IntArray

_MOST_DIMS = 6  # dims of rows; Megatron's state has one or two


class Rows(NamedTuple):
    """Bytes of a tensor in row-major order: ``nbytes`` at a time, from ``address`` on.

    ``counts`` and ``strides`` (in bytes) of the dims of rows, outermost first; none where the
    tensor is contiguous.
    """

    address: int
    nbytes: int
    counts: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Rows:
        """The rows of a tensor in host memory."""
        row = tensor.element_size()
        counts: list[int] = []
        strides: list[int] = []
        for count, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            step = stride * tensor.element_size()
            if count == 1:
                continue
            if not counts and step == row:
                row *= count
            elif counts and step == strides[-1] * counts[-1]:
                counts[-1] *= count
            else:
                counts.append(count)
                strides.append(step)
        return cls(tensor.data_ptr(), row, tuple(counts[::-1]), tuple(strides[::-1]))

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Rows:
        """What :meth:`numbers` described."""
        address, nbytes, num_dims, *rest = numbers
        return cls(address, nbytes, tuple(rest[:num_dims]), tuple(rest[num_dims : 2 * num_dims]))

    def numbers(self) -> list[int]:
        """:data:`NUM_NUMBERS` integers that say it all."""
        found = [self.address, self.nbytes, len(self.counts), *self.counts, *self.strides]
        return found + [0] * (NUM_NUMBERS - len(found))

    def spans(self) -> IntArray:
        """(address, bytes) of each row, [number of rows, 2]."""
        starts = np.array([self.address], dtype=np.int64)
        for count, stride in zip(self.counts, self.strides, strict=True):
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return np.stack((starts, np.full(len(starts), self.nbytes)), axis=1)


NUM_NUMBERS = 3 + 2 * _MOST_DIMS
