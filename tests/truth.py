"""What every element of a GPT model's state must be, worked out by hand.

Each element of each state of the unsharded model gets its own bits. Which of them a rank holds
follows here from the textbook rules alone: layers in stages, cuts over tensor-parallel ranks,
SwiGLU's two halves cut apart, experts dealt out, and the optimizer's own flat range. Megatron's
checkpoint description, from which fragments are made, is not asked::

    name on the rank        ->  name in the unsharded model, unsharded shape,
                                and for each dim the unsharded index of every local one

Names and shapes of other modules than GPT's are added by :class:`Rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dynatrain_megatron.layout import ParallelLayout
from tests.dry import DryRank, move

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = torch.tensor(7.0)  # Megatron insists on one count for all parameters
_NOTHING = -1  # what the target holds before a transfer

Segments = Callable[[str, int], Sequence[int]]
"""Sizes of the parts of a local dim that are cut over tensor parallelism each by itself."""


def swiglu_halves(name: str, size: int) -> Sequence[int]:
    """Gate and up projections lie one after the other in the first layer of an MLP."""
    return (size // 2, size // 2) if "linear_fc1" in name else (size,)


@dataclass(frozen=True)
class Rules:
    """The model's shape, as far as it decides what lies where.

    ``stages`` is how many layers each stage has, in the order the model runs through them, in a
    layout that has a pipeline layout string; elsewhere all stages have the same number.
    """

    num_layers: int
    tied: bool = False
    stages: Sequence[int] | None = None
    segments: Segments = swiglu_halves


class _Place(NamedTuple):
    """Name and shape in the unsharded model, and for each dim the index of each local position."""

    name: str
    shape: tuple[int, ...]
    index: list[torch.Tensor]


class Truth:
    """Writes the true bits into a world, and finds what differs from them in another."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._first: dict[tuple[str, str], int] = {}
        self._next = 0

    def write(self, world: Sequence[DryRank]) -> None:
        """Fill all state of ``world`` with its true bits."""
        for rank in world:
            for _, tensor, bits in self._state(rank):
                _as_bits(tensor).copy_(bits)

    def wipe(self, world: Sequence[DryRank]) -> None:
        """Fill all state of ``world`` with bits that are nowhere true."""
        for rank in world:
            for _, tensor, _ in self._state(rank):
                _as_bits(tensor).fill_(_NOTHING)

    def differences(self, world: Sequence[DryRank]) -> list[str]:
        """Names of states that are not what they must be; empty where all is right."""
        return [
            f"rank {rank.rank}: {name}"
            for rank in world
            for name, tensor, bits in self._state(rank)
            if not torch.equal(_as_bits(tensor), bits)
        ]

    def _state(self, rank: DryRank) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, live tensor, its true bits) for all that a transfer has to bring."""
        found = {}
        for number, chunk in enumerate(rank.model):
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                short = re.sub(r"^(module\.)+", "", name)
                found[id(tensor)] = f"{number}.{short}", self._place(rank, number, short, tensor)
        for shard in rank.state.shards():
            name, place = found[id(shard.param)]
            for kind, tensor in shard.states.items():
                flat = self._bits(place, kind, tensor.dtype).reshape(-1)[shard.start : shard.stop]
                yield f"{name} {kind}", tensor, flat.reshape(tensor.shape)
            yield f"{name} step", shard.inner.state[shard.key]["step"], _as_bits(_STEP)
        for tensor in _whole_tensors(rank):
            name, place = found[id(tensor)]
            yield name, tensor.detach(), self._bits(place, "whole", tensor.dtype)

    def _bits(self, place: _Place, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """The true bits of a local tensor, of its shape."""
        if (place.name, kind) not in self._first:
            self._first[place.name, kind] = self._next
            self._next += math.prod(place.shape)
        at = torch.tensor(self._first[place.name, kind])
        for dim, positions in enumerate(place.index):
            at = at[..., None] + positions * math.prod(place.shape[dim + 1 :])
        return at.to(_BITS[dtype.itemsize])

    def _place(self, rank: DryRank, chunk: int, name: str, tensor: torch.Tensor) -> _Place:
        at, layout = rank.layout.coordinate(rank.rank), rank.layout
        degree, cut = layout.tp, at["tp"]
        stage = chunk * layout.pp + at["pp"]
        name = re.sub(
            r"^decoder\.layers\.(\d+)",
            lambda found: f"decoder.layers.{self._first_layer(layout, stage) + int(found[1])}",
            name,
        )
        local = re.search(r"(?<=local_experts\.)\d+|(?<=weight)\d+$", name)
        if local:
            expert = at["ep"] * rank.args.num_experts // layout.ep + int(local[0])
            name = f"{name[: local.start()]}{expert}{name[local.end() :]}"
            degree, cut = layout.expert_tp, at["etp"]
        if self.rules.tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        cut_dim = tensor.partition_dim if getattr(tensor, "tensor_model_parallel", False) else None
        shape, index = [], []
        for dim, size in enumerate(tensor.shape):
            if dim != cut_dim:
                shape.append(size)
                index.append(torch.arange(size))
                continue
            parts, first = [], 0
            for part in self.rules.segments(name, size):
                parts.append(first + cut * part + torch.arange(part))
                first += degree * part
            shape.append(first)
            index.append(torch.cat(parts))
        return _Place(name, tuple(shape), index)

    def _first_layer(self, layout: ParallelLayout, stage: int) -> int:
        if layout.pipeline is not None:
            assert self.rules.stages is not None
            return sum(self.rules.stages[:stage])
        return stage * (self.rules.num_layers // (layout.pp * (layout.vpp or 1)))


def carried(truth: Truth, source: Sequence[DryRank], target: Sequence[DryRank]) -> list[str]:
    """Move the true bits from one world to another; what differs from them there."""
    truth.write(source)
    truth.wipe(target)
    assert len(truth.differences(target)) > len(target)
    move(source, target)
    return truth.differences(target)


def _whole_tensors(rank: DryRank) -> Iterator[torch.Tensor]:
    """What is state without being trained: frozen parameters, and the buffers a router updates."""
    for chunk in rank.model:
        yield from (param for param in chunk.parameters() if not param.requires_grad)
        yield from (b for name, b in chunk.named_buffers() if name.endswith("expert_bias"))


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])
