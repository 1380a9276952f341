"""What every rank of a layout holds of a model, as a roster set.

A rank's parameters lie one after the other in a buffer, last layer first; the distributed optimizer
gives each rank of a data parallel group the same length of it. Which part of which parameter that
is does not depend on the tensor or expert parallel coordinate, so it is worked out once a stage::

    buffer of a stage  | fc2 | fc1   | qkv | proj | ...   | pad |
    shard of dp rank   |  0      |  1        |  2      |  3     |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes.models import Model, Parameter
from dynatrain_megatron.vps.boxes import IntArray, flat_parts, ranges, volumes
from dynatrain_megatron.vps.roster import KindRows, RosterSet
from dynatrain_megatron.vps.tensors import LogicalTensor, State, StateKind

TRAINED = tuple(
    State(kind, "float32")
    for kind in (StateKind.MAIN_PARAM, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
)
WEIGHTS = (State(StateKind.PARAM, "bfloat16"),)

_PARAM_ALIGN = 64
_BUCKET_ALIGN = 128
_BUCKET_NUMEL = 40_000_000
_BUCKET_NUMEL_A_RANK = 1_000_000


def make_rosters(
    model: Model,
    layout: ParallelLayout,
    *,
    weights_only: bool = False,
    overlap: bool = False,
    num_ranks: int | None = None,
) -> RosterSet:
    """The rosters of all ranks: Adam's states beside main parameters, and buffers.

    ``weights_only`` takes bf16 parameters instead, which every data parallel rank has. ``overlap``
    cuts the first stage's gradient buffer into buckets, as overlapped gradient reduction does.
    ``num_ranks`` appends ranks that hold nothing. Layouts with a pipeline string are not made.
    """
    if layout.pipeline is not None:
        raise ValueError(f"rosters of a layout with a pipeline string are not made: {layout}")
    states = WEIGHTS if weights_only else TRAINED
    sharded = layout.dist_opt and not weights_only
    tensors = _tensors(model, states)
    index = {tensor.name: number for number, tensor in enumerate(tensors)}
    dims = max(len(tensor.shape) for tensor in tensors)
    at = _coordinates(layout)
    # Experts are in the dense buffer unless they have groups of their own.
    apart = layout.ep > 1 or layout.expert_tp != layout.tp
    dense_dp = _shard(at, ("pp", "tp"), layout.instances) if sharded else (at["zero"], 1)
    expert_dp = _shard(at, ("pp", "ep", "etp"), layout.instances) if sharded else (at["zero"], 1)
    found: list[_Held] = []
    for stage, chunk in itertools.product(range(layout.pp), range(layout.vpp or 1)):
        parameters = _stage(model, layout, stage, chunk)
        buffers = [p for p in parameters if p.buffer]
        own = [p for p in parameters if p.expert and apart]
        rest = [p for p in parameters if not (p.buffer or (p.expert and apart))]
        bucketed = overlap and stage == chunk == 0
        lone = {model.embedding.name} if model.tied and layout.pp > 1 else set()
        for number, group, tp, shards in (
            (0, rest, layout.tp, dense_dp[1]),
            (1, own, layout.expert_tp, expert_dp[1]),
            (2, buffers, layout.tp, 1),
        ):
            limit = max(_BUCKET_NUMEL, _BUCKET_NUMEL_A_RANK * shards) if bucketed else None
            parts = _parts(group[::-1], index, dims, tp, shards, limit, lone)
            copies = (layout.ep, layout.expert_tp) if number == 1 else (1, tp)
            found.append(_cut(parts, stage, number, copies, shards))
    return _assemble(tensors, found, at, layout, dense_dp, expert_dp, num_ranks)


def _tensors(model: Model, states: Sequence[State]) -> tuple[LogicalTensor, ...]:
    buffer = (State(StateKind.BUFFER, "float32"),)
    found = {
        p.name: LogicalTensor(p.name, p.shape, buffer if p.buffer else tuple(states))
        for p in model.parameters()
    }
    return tuple(found[name] for name in sorted(found))


def _coordinates(layout: ParallelLayout) -> dict[str, IntArray]:
    """Index of every rank on each axis."""
    at = [layout.coordinate(rank) for rank in range(layout.world)]
    found = {axis: np.array([one[axis] for one in at]) for axis in at[0]}
    return {**found, "zero": np.zeros(layout.world, dtype=np.int64)}


def _shard(at: dict[str, IntArray], axes: Iterable[str], instances: int) -> tuple[IntArray, int]:
    """(each rank's shard, number of shards) among the ranks with the same index on ``axes``."""
    group = np.zeros_like(at["zero"])
    for axis in axes:
        group = group * (int(at[axis].max()) + 1) + at[axis]
    size = len(group) // (int(group.max()) + 1)
    order = np.argsort(group, kind="stable")
    place = np.zeros_like(group)
    place[order] = np.arange(len(group)) % size
    shards = size // instances
    return place % shards, shards


def _stage(model: Model, layout: ParallelLayout, stage: int, chunk: int) -> list[Parameter]:
    """The parameters of one model chunk in order, with the experts of the first expert rank."""
    stages = model.stages(layout.pp * (layout.vpp or 1))
    number = chunk * layout.pp + stage
    experts = None if model.experts is None else range(model.experts.count // layout.ep)
    found = model.before if number == 0 else []
    found += [p for layer in stages[number] for p in model.layer(layer, experts)]
    if number == len(stages) - 1:
        found += model.final_norm
        if not model.tied:
            found.append(model.output)
        elif number > 0:
            found.append(model.embedding)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Boxes of a stage's parameters in the order of their buffer, for the first coordinate.

    ``offset`` [n] is where each begins in its bucket, ``shard`` [n] the length of a shard of that.
    ``tp_step`` and ``ep_step`` [n, D] lead to the next coordinate's box.
    """

    tensor: IntArray
    start: IntArray
    stop: IntArray
    offset: IntArray
    shard: IntArray
    tp_step: IntArray
    ep_step: IntArray


def _parts(
    parameters: Sequence[Parameter],
    index: dict[str, int],
    dims: int,
    tp: int,
    shards: int,
    limit: int | None,
    lone: set[str],
) -> _Parts:
    """Lay parameters into buckets; those called ``lone`` have a bucket of their own."""
    rows: list[tuple[int, ...]] = []
    offsets: list[int] = []
    lengths: list[int] = []  # of a shard, for each bucket
    buckets: list[int] = []
    end = 0
    local_experts = sum(p.expert for p in parameters)

    def finish() -> None:
        nonlocal end
        if len(buckets) < len(offsets):
            align = math.lcm(shards, _BUCKET_ALIGN)
            lengths.append(-(-end // align) * align // shards)
            buckets.extend([len(lengths) - 1] * (len(offsets) - len(buckets)))
        end = 0

    for parameter in parameters:
        end = -(-end // _PARAM_ALIGN) * _PARAM_ALIGN
        if parameter.name in lone:
            finish()
        for half in range(parameter.halves):
            row = _box(parameter, half, index, dims, tp)
            rows.append(row)
            offsets.append(end)
            start, stop = row[1 : 1 + dims], row[1 + dims : 1 + 2 * dims]
            end += math.prod(b - a for a, b in zip(start, stop, strict=True))
        if parameter.name in lone or (limit is not None and end >= limit):
            finish()
    finish()
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 1 + 3 * dims)
    ep_step = np.zeros((len(rows), dims), dtype=np.int64)
    if local_experts:
        lead = np.array(
            [len(p.lead) if p.expert else 0 for p in parameters for _ in range(p.halves)]
        )
        number = {p.lead[-1] for p in parameters if p.expert}
        chosen = np.nonzero(lead)[0]
        ep_step[chosen, lead[chosen] - 1] = len(number)
    return _Parts(
        table[:, 0],
        table[:, 1 : 1 + dims],
        table[:, 1 + dims : 1 + 2 * dims],
        np.array(offsets, dtype=np.int64),
        np.array(lengths, dtype=np.int64)[np.array(buckets, dtype=np.int64)],
        table[:, 1 + 2 * dims :],
        ep_step,
    )


def _box(
    parameter: Parameter, half: int, index: dict[str, int], dims: int, tp: int
) -> tuple[int, ...]:
    """Tensor, start, stop and step to the next tensor parallel rank, of one half of a parameter."""
    lead = len(parameter.lead)
    start = [*parameter.lead, *(0 for _ in parameter.shape[lead:])]
    stop = [*(x + 1 for x in parameter.lead), *parameter.shape[lead:]]
    step = [0] * dims
    if parameter.cut is not None:
        width = parameter.shape[parameter.cut] // parameter.halves
        start[parameter.cut] = half * width
        stop[parameter.cut] = half * width + width // tp
        step[parameter.cut] = width // tp
    pad = dims - len(start)
    return (index[parameter.name], *start, *[0] * pad, *stop, *[1] * pad, *step)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Fragments and who has them: the ranks of ``stage`` at ``ep``, ``tp`` with ``shard`` [n]."""

    buffer: int
    stage: int
    ep: IntArray
    tp: IntArray
    shard: IntArray
    tensor: IntArray
    start: IntArray
    stop: IntArray


def _cut(parts: _Parts, stage: int, buffer: int, copies: tuple[int, int], shards: int) -> _Held:
    """Deal the parts to shards, and repeat that for every coordinate."""
    numel = volumes(parts.start, parts.stop)
    first = parts.offset // parts.shard
    shard, part = ranges(first, (parts.offset + numel - 1) // parts.shard - first + 1)
    begin = shard * parts.shard[part] - parts.offset[part]
    owner, start, stop = flat_parts(
        parts.start[part],
        parts.stop[part],
        np.maximum(begin, 0),
        np.minimum(begin + parts.shard[part], numel[part]),
    )
    part, shard = part[owner], shard[owner]
    ep, tp, row = (
        x.reshape(-1)
        for x in np.meshgrid(
            np.arange(copies[0]), np.arange(copies[1]), np.arange(len(part)), indexing="ij"
        )
    )
    moved = ep[:, None] * parts.ep_step[part[row]] + tp[:, None] * parts.tp_step[part[row]]
    return _Held(
        buffer,
        stage,
        ep,
        tp,
        shard[row],
        parts.tensor[part[row]],
        start[row] + moved,
        stop[row] + moved,
    )


def _assemble(
    tensors: tuple[LogicalTensor, ...],
    found: Sequence[_Held],
    at: dict[str, IntArray],
    layout: ParallelLayout,
    dense_dp: tuple[IntArray, int],
    expert_dp: tuple[IntArray, int],
    num_ranks: int | None,
) -> RosterSet:
    """Give every rank what lies at its coordinates; ranks with the same are of one kind."""
    zero = at["zero"]
    coordinates = [  # of every rank in the three buffers: stage, ep, tp, shard
        (at["pp"], zero, at["tp"], dense_dp[0]),
        (at["pp"], at["ep"], at["etp"], expert_dp[0]),
        (at["pp"], zero, at["tp"], zero),
    ]
    sizes = (layout.pp, layout.ep, max(layout.tp, layout.expert_tp))
    shards = max(dense_dp[1], expert_dp[1])

    def place(
        buffer: int, stage: IntArray, ep: IntArray, tp: IntArray, shard: IntArray
    ) -> IntArray:
        number = ((buffer * sizes[0] + stage) * sizes[1] + ep) * sizes[2] + tp
        return number * shards + shard

    where = np.concatenate(
        [place(h.buffer, np.full(len(h.ep), h.stage), h.ep, h.tp, h.shard) for h in found]
    )
    order = np.argsort(where, kind="stable")
    tensor, start, stop = (
        np.concatenate([getattr(h, name) for h in found])[order]
        for name in ("tensor", "start", "stop")
    )
    where = where[order]
    places = np.stack([place(number, *c) for number, c in enumerate(coordinates)])
    kinds, kind_of_rank = np.unique(places, axis=1, return_inverse=True)
    low = np.searchsorted(where, kinds)
    count = np.searchsorted(where, kinds, side="right") - low
    row, owner = ranges(low.T.reshape(-1), count.T.reshape(-1))
    kind = owner // len(coordinates)
    per_kind = np.bincount(kind, minlength=kinds.shape[1])
    slot = np.arange(len(kind)) - (np.cumsum(per_kind) - per_kind)[kind]
    of_rank = kind_of_rank.reshape(-1)
    if num_ranks is not None and num_ranks > len(of_rank):
        of_rank = np.append(of_rank, np.full(num_ranks - len(of_rank), kinds.shape[1]))
    return RosterSet(tensors, of_rank, KindRows(kind, slot, tensor[row], start[row], stop[row]))
