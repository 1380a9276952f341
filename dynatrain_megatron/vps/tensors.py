"""Logical tensors: the unsharded tensors of a job, named by checkpoint key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class StateKind(StrEnum):
    """What a tensor is to the training step."""

    PARAM = "param"  # what the forward pass reads
    MAIN_PARAM = "main_param"  # what the optimizer updates (float32 beside a bf16/fp16 param)
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM_BUFFER = "momentum_buffer"
    BUFFER = "buffer"


#: Bytes of one element, by dtype name (torch's names without the ``torch.`` prefix).
ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class State(NamedTuple):
    """One state kind of a logical tensor and the dtype it is kept in (a key of ITEM_BYTES)."""

    kind: StateKind
    dtype: str

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, order=True)
class LogicalTensor:
    """An unsharded tensor and the state kinds that are cut exactly as it is.

    A parameter's main parameter and moments share one geometry, so they are one logical tensor
    with several ``states``, planned once. ``name`` is the checkpoint key, the same in every
    layout; ``shape`` is the unsharded shape.
    """

    name: str
    shape: tuple[int, ...]
    states: tuple[State, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element, all its states together."""
        return sum(state.item_bytes for state in self.states)
