"""Memory of a layout's fullest rank.

Parameters, gradients and optimizer state follow from the cut: exact, but for padding of gradient
buffers (less than a MiB). Activations are an estimate. For each token of a micro-batch a layer
keeps, in elements, where t = tp, w = t with sequence parallelism and 1 without, k = 3 for a gated
MLP and 2 for a plain one::

    norms           4 hidden / w                          their inputs and outputs
    attention       (2 heads + 2 groups) head / t         q, k, v and the output
    latent          2 (q_rank + kv_rank) + rope + heads (2 qk + 2 rope + 2 v) / t    in its place
    MLP             k ffn / t                             before and after the activation
    experts         topk (2 hidden etp + k ffn) / t       balanced; a shared one as an MLP
    unfused scores  2.5 heads seq / t                     unless recomputed

With full recomputation a layer keeps its input alone, hidden / w, and one layer at a time all of
the above. Stage i of p has min(p - i, m) of the m micro-batches in flight; with v chunks a stage
min(2 (p - i - 1) + (v - 1) p + 1, m v) chunks of micro-batches. The last stage has the logits of
one micro-batch as well, once as they are and once in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynatrain_megatron.advisor.stages import (
    Chunk,
    Elements,
    chunk_held,
    chunks_of,
    embedding_held,
)
from dynatrain_megatron.advisor.workload import Recompute, Workload
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes import Model

_BUCKET_ALIGN = 128
_BUFFER_BYTES = 4
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of the fullest rank of pipeline stage ``stage``; ``activations`` are a guess.

    ``weights`` are parameters and buffers.
    """

    stage: int
    weights: int
    grads: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.grads + self.optimizer + self.activations


def estimate_memory(workload: Workload, layout: ParallelLayout) -> MemoryEstimate:
    """The estimate for the stage that needs most."""
    stages = [stage_memory(workload, layout, stage) for stage in range(layout.pp)]
    return max(stages, key=lambda stage: stage.total)


def stage_memory(workload: Workload, layout: ParallelLayout, stage: int) -> MemoryEstimate:
    """The estimate for the first rank of one stage, which no other rank of it exceeds."""
    model, size = workload.model, workload.element_bytes
    chunks = chunks_of(model, layout)[stage]
    numel = optimizer = buffers = 0
    for chunk in chunks:
        held = chunk_held(model, chunk, layout.tp, layout.ep, layout.expert_tp)
        buffers += held.buffer
        for elements, num_shards in _gradient_buffers(model, layout, chunk):
            numel += elements.numel
            optimizer += _first_shard(elements, num_shards)
    return MemoryEstimate(
        stage,
        size.param * numel + _BUFFER_BYTES * buffers,
        size.grad * numel,
        size.optimizer * optimizer,
        _activation_bytes(workload, layout, stage, chunks),
    )


def _gradient_buffers(
    model: Model, layout: ParallelLayout, chunk: Chunk
) -> list[tuple[Elements, int]]:
    """What lies in each gradient buffer of a chunk, and over how many ranks that is sharded.

    Experts are in the dense buffer unless they have groups of their own; a tied embedding shared
    by two stages has a bucket to itself.
    """
    held = chunk_held(model, chunk, layout.tp, layout.ep, layout.expert_tp)
    dense_shards, expert_shards = 1, 1
    if layout.dist_opt:
        dense_shards = layout.dp * layout.cp // layout.instances
        expert_shards = layout.expert_dp // layout.instances
    dense, found = held.dense, []
    if layout.ep > 1 or layout.expert_tp != layout.tp:
        found.append((held.expert, expert_shards))
    else:
        dense += held.expert
    if model.tied and (chunk.first or chunk.last):
        embedding = embedding_held(model, layout.tp)
        if layout.pp == 1:
            # One stage has the embedding once, whichever of its chunks are first and last.
            dense += embedding if chunk.first else Elements()
        else:
            found.append((embedding, dense_shards))
    return [(dense, dense_shards), *found]


def _first_shard(elements: Elements, num_shards: int) -> int:
    """Elements in the first of equal shards; exact where nothing is padded between parameters."""
    align = math.lcm(num_shards, _BUCKET_ALIGN)
    return min(elements.numel, -(-elements.length // align) * align // num_shards)


# ---------------------------------------------------------------- activations


def _activation_bytes(
    workload: Workload, layout: ParallelLayout, stage: int, chunks: tuple[Chunk, ...]
) -> int:
    tokens = workload.microbatch_tokens(layout)
    size = workload.element_bytes.param
    dense, expert = (_layer_elements(workload, layout, expert=kind) for kind in (False, True))
    kept = sum(chunk.dense_layers * dense + chunk.expert_layers * expert for chunk in chunks)
    working = 0.0
    if workload.recompute is Recompute.full:
        inputs = workload.model.hidden / _spread(layout)
        kept = inputs * sum(chunk.num_layers for chunk in chunks)
        working = max(
            dense if any(chunk.dense_layers for chunk in chunks) else 0.0,
            expert if any(chunk.expert_layers for chunk in chunks) else 0.0,
        )
    in_flight = chunks_in_flight(layout, stage, workload.num_microbatches(layout))
    elements = kept / len(chunks) * in_flight + working
    logits = 0.0
    if any(chunk.last for chunk in chunks):
        logits = workload.model.vocab / layout.tp * (size + _FLOAT32_BYTES)
    return math.ceil(tokens * (size * elements + logits))


def chunks_in_flight(layout: ParallelLayout, stage: int, num_microbatches: int) -> int:
    """Chunks of micro-batches whose activations a stage keeps at once, by Megatron's schedules."""
    behind = layout.pp - stage - 1
    if layout.vpp is None:
        return min(behind + 1, num_microbatches)
    ahead = 2 * behind + (layout.vpp - 1) * layout.pp + 1
    return min(ahead, num_microbatches * layout.vpp)


def _layer_elements(workload: Workload, layout: ParallelLayout, *, expert: bool) -> float:
    """Elements that a layer keeps for each token of a micro-batch."""
    model, tp = workload.model, layout.tp
    factor = 3 if model.gated else 2
    elements = 4 * model.hidden / _spread(layout)
    latent = model.latent
    if latent is None:
        elements += (2 * model.heads + 2 * model.groups) * model.head / tp
    else:
        heads = 2 * (latent.qk_head + latent.rope_head + latent.v_head)
        elements += model.heads * heads / tp
        elements += 2 * (latent.q_rank + latent.kv_rank) + latent.rope_head
    if workload.keeps_scores and workload.recompute is not Recompute.selective:
        elements += 2.5 * model.heads * workload.seq_length / tp
    if not expert or model.experts is None:
        return elements + factor * model.ffn / tp
    experts = model.experts
    routed = experts.topk * (2 * model.hidden * layout.expert_tp + factor * experts.ffn)
    return elements + (routed + factor * experts.shared_ffn) / tp


def _spread(layout: ParallelLayout) -> int:
    """Over how many ranks sequence parallelism spreads what tensor parallelism does not cut."""
    return layout.tp if layout.sp else 1
