"""Layers on stages: how many each has, as Megatron's text, and the elements a rank holds of them.

Where the stages do not divide the layers the middle ones take what is over: the first stage has
the embedding and the most micro-batches in flight, the last one has the output layer. Megatron
wants such a pipeline spelled out; six layers on four stages are ``Et|t*2|t*2|tL``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes import Model, Parameter

_ALIGN = 64  # a parameter begins at a multiple of so many elements of its buffer


def split_layers(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage; needs at least one for each."""
    few, more = divmod(num_layers, num_stages)
    middle = range(num_stages - 2, 0, -1)
    fuller = set([*middle, 0, num_stages - 1][:more])
    return [few + (stage in fuller) for stage in range(num_stages)]


def pipeline_text(counts: Sequence[int]) -> str:
    """Megatron's pipeline layout string for so many layers on each stage."""
    first, *middle = ("t" if count == 1 else f"t*{count}" for count in counts)
    last = middle.pop() if middle else ""
    runs = ((stage, len(list(group))) for stage, group in itertools.groupby(middle))
    inner = "".join(f"({stage}|)*{n}" if n > 2 else f"{stage}|" * n for stage, n in runs)
    return f"E{first}|{inner}{last}L" if last else f"E{first}L"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A model chunk: how many dense and how many expert layers, and which ends of the model."""

    dense_layers: int
    expert_layers: int
    first: bool
    last: bool

    @property
    def num_layers(self) -> int:
        return self.dense_layers + self.expert_layers


Stages = tuple[tuple[Chunk, ...], ...]
"""The chunks of each pipeline stage, [pp][vpp]."""


def chunks_of(model: Model, layout: ParallelLayout) -> Stages:
    """The chunks of ``layout``; a pipeline string is taken to be that of :func:`split_layers`."""
    first_expert = model.num_layers if model.experts is None else model.experts.first_layer
    return _chunks(model.num_layers, first_expert, layout.pp, layout.vpp or 1)


@lru_cache(maxsize=4096)
def _chunks(num_layers: int, first_expert: int, pp: int, vpp: int) -> Stages:
    chunks = []
    ends = itertools.accumulate(split_layers(num_layers, pp * vpp), initial=0)
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        dense = min(max(first_expert - begin, 0), end - begin)
        chunks.append(Chunk(dense, end - begin - dense, number == 0, number == pp * vpp - 1))
    return tuple(tuple(chunks[stage::pp]) for stage in range(pp))


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a rank's parameters: how many, and how long they lie in a buffer."""

    numel: int = 0
    length: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.numel + other.numel, self.length + other.length)

    def __mul__(self, times: int) -> Elements:
        return Elements(self.numel * times, self.length * times)


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds: parameters of the dense grid, of the expert grid, elements of buffers."""

    dense: Elements = Elements()
    expert: Elements = Elements()
    buffer: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            self.dense + other.dense, self.expert + other.expert, self.buffer + other.buffer
        )

    def __mul__(self, times: int) -> Held:
        return Held(self.dense * times, self.expert * times, self.buffer * times)


@lru_cache(maxsize=4096)
def layer_held(model: Model, number: int, tp: int, ep: int, etp: int) -> Held:
    """What a rank holds of one layer, all its experts of that rank together."""
    dense, expert, buffer = Elements(), Elements(), 0
    local = 0 if model.experts is None else model.experts.count // ep
    for parameter in model.layer(number, range(1)):
        if parameter.buffer:
            buffer += parameter.numel
        elif parameter.expert:
            expert += _elements(parameter, etp) * local
        else:
            dense += _elements(parameter, tp)
    return Held(dense, expert, buffer)


@lru_cache(maxsize=65536)
def chunk_held(model: Model, chunk: Chunk, tp: int, ep: int, etp: int) -> Held:
    """What a rank holds of a chunk; of a tied model the embedding, or its copy, is left out."""
    held = Held()
    if chunk.dense_layers:
        held += layer_held(model, 0, tp, ep, etp) * chunk.dense_layers
    if chunk.expert_layers:
        held += layer_held(model, model.num_layers - 1, tp, ep, etp) * chunk.expert_layers
    ends = [model.embedding] if chunk.first and not model.tied else []
    if chunk.last:
        ends += [*model.final_norm, *([] if model.tied else [model.output])]
    for parameter in ends:
        held += Held(_elements(parameter, tp))
    return held


def embedding_held(model: Model, tp: int) -> Elements:
    """What a rank of the first or last stage holds of a tied embedding."""
    return _elements(model.embedding, tp)


@lru_cache(maxsize=64)
def cut_sizes(model: Model) -> tuple[tuple[str, int, bool], ...]:
    """(name, size, of experts) of each dim that tensor parallelism cuts; equal ones once."""
    layers = [*model.layer(0, range(1)), *model.layer(model.num_layers - 1, range(1))]
    found = {
        (size, p.expert): p.name
        for p in (model.embedding, *layers)
        if p.cut is not None
        for size in (p.shape[p.cut] // p.halves,)
    }
    return tuple((name, size, expert) for (size, expert), name in found.items())


def _elements(parameter: Parameter, degree: int) -> Elements:
    numel = parameter.numel if parameter.cut is None else parameter.numel // degree
    return Elements(numel, -(-numel // _ALIGN) * _ALIGN)
