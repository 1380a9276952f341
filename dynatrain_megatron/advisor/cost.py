"""How long a step takes, roughly: enough to put layouts in order, no more.

A stage needs for a micro-batch, T = its tokens on a rank::

    compute   T · FLOP of its layers / tp / FLOP/s; backward is twice forward, and full
              recomputation one forward more. Or, where that is longer, moving parameters once a
              pass and gradients in and out. The slowest stage counts
    tp        4 all-reduces a dense layer, 2 an expert layer: each 2 (tp - 1) / tp · T · hidden;
              4 exchanges an expert layer over etp: each (etp - 1) / tp · T · topk · hidden
    ep        4 all-to-alls an expert layer: each (ep - 1) / ep · T / tp · topk · hidden
    cp        3 rounds of keys and values a layer: each (cp - 1) · T · 2 groups · head / tp

and the step, with m micro-batches and v chunks a stage::

    bubble    (pp - 1) / v times all of the above: stages wait while the pipeline fills and drains
    pp        m · v times a micro-batch's hidden states, forth and back
    dp        gradients once out, parameters once back: (d - 1) / d of both, dense and experts

Every exchange of a group of several ranks takes a latency as well. Nothing overlaps. Groups within
a node use its links; what leaves a node shares the ways out of the group's ranks there. Tensor
parallelism stays within a node by rule.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from dynatrain_megatron.advisor.stages import Chunk, Stages, chunk_held, chunks_of, embedding_held
from dynatrain_megatron.advisor.workload import Machine, Recompute, Workload
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes import Model


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted seconds of a step by what they are spent on; see the module."""

    compute: float
    bubble: float
    tp: float
    cp: float
    ep: float
    pp: float
    dp: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


def predict_step(workload: Workload, layout: ParallelLayout, machine: Machine) -> StepCost:
    """The seconds of a step; a guess that serves to compare layouts of one workload."""
    stages = chunks_of(workload.model, layout)
    compute = _compute_s(workload, layout, machine, stages)
    links = _Links(machine)
    tp, cp, ep = _layer_traffic_s(workload, layout, links, stages)
    num_microbatches = workload.num_microbatches(layout)
    waits = (layout.pp - 1) / (layout.vpp or 1)
    return StepCost(
        compute * num_microbatches,
        (compute + tp + cp + ep) * waits,
        tp * num_microbatches,
        cp * num_microbatches,
        ep * num_microbatches,
        _pipeline_s(workload, layout, links) * num_microbatches,
        _data_parallel_s(workload, layout, links, stages),
    )


# ---------------------------------------------------------------- compute


def _compute_s(
    workload: Workload, layout: ParallelLayout, machine: Machine, stages: Stages
) -> float:
    """Seconds of a micro-batch in the slowest stage, forward and backward."""
    model, size = workload.model, workload.element_bytes
    forwards = 2 if workload.recompute is Recompute.full else 1
    seq = workload.seq_length
    dense, expert = (_layer_flop(model, seq, expert) for expert in (False, True))
    tokens = workload.microbatch_tokens(layout) / layout.tp
    slowest = 0.0
    for chunks in stages:
        flop = sum(
            (forwards + 2) * (chunk.dense_layers * dense + chunk.expert_layers * expert)
            + (3 * 2 * model.vocab * model.hidden if chunk.last else 0)
            for chunk in chunks
        )
        element_bytes = (forwards + 1) * size.param + 2 * size.grad
        moved = element_bytes * _numel(model, layout, chunks)
        seconds = max(tokens * flop / (machine.tflops * 1e12), moved / (machine.memory_gb_s * 1e9))
        slowest = max(slowest, seconds)
    return slowest


def _numel(model: Model, layout: ParallelLayout, chunks: tuple[Chunk, ...]) -> int:
    """Parameters of a rank of a stage, without the embedding, of which few rows are read."""
    held = [chunk_held(model, c, layout.tp, layout.ep, layout.expert_tp) for c in chunks]
    embedding = embedding_held(model, layout.tp).numel
    spared = embedding if not model.tied and any(chunk.first for chunk in chunks) else 0
    return sum(one.dense.numel + one.expert.numel for one in held) - spared


@lru_cache(maxsize=64)
def _layer_flop(model: Model, seq_length: int, expert: bool) -> float:
    """Floating-point operations of a layer's forward pass for each token."""
    width = model.head
    if model.latent is not None:
        width = (model.latent.qk_head + model.latent.rope_head + model.latent.v_head) // 2
    # Half of the scores are masked: 2 matmuls · 2 · seq · width / 2.
    flop: float = 2.0 * model.heads * width * seq_length
    number = model.num_layers - 1 if expert else 0
    for parameter in model.layer(number, range(1)):
        if not parameter.buffer:
            times = model.experts.topk if parameter.expert and model.experts else 1
            flop += 2 * times * parameter.numel
    return flop


# ---------------------------------------------------------------- traffic


class _Links:
    """Seconds of one exchange in which a rank has so many bytes for its group; 0 for none."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def near(self, nbytes: float) -> float:
        """Within a node."""
        return self._seconds(nbytes, 0)

    def ring(self, nbytes: float, stride: int, span: int) -> float:
        """In a group whose ranks are ``stride`` apart and reach over ``span`` ranks."""
        node = self._machine.gpus_per_node
        if span <= node:
            return self._seconds(nbytes, 0)
        ways_out = max(1, node // stride)
        return max(self._seconds(nbytes, 0), self._seconds(0, nbytes / ways_out))

    def all_to_all(self, nbytes: float, span: int) -> float:
        """In a group that reaches over ``span`` ranks."""
        inside = min(1.0, self._machine.gpus_per_node / span)
        return self._seconds(nbytes * inside, nbytes * (1 - inside))

    def neighbour(self, nbytes: float, distance: int) -> float:
        """To the rank that is ``distance`` away."""
        near = distance < self._machine.gpus_per_node
        return self._seconds(nbytes, 0) if near else self._seconds(0, nbytes)

    def _seconds(self, near_bytes: float, far_bytes: float) -> float:
        if not (near_bytes or far_bytes):
            return 0.0
        machine = self._machine
        wire = near_bytes / (machine.near_gb_s * 1e9) + far_bytes / (machine.far_gb_s * 1e9)
        return machine.latency_s + wire


def _layer_traffic_s(
    workload: Workload, layout: ParallelLayout, links: _Links, stages: Stages
) -> tuple[float, float, float]:
    """Seconds of a micro-batch's traffic for tp, cp and ep in the stage with most layers."""
    model = workload.model
    num_dense, num_expert = max(
        (
            (sum(c.dense_layers for c in chunks), sum(c.expert_layers for c in chunks))
            for chunks in stages
        ),
        key=sum,
    )
    hidden = workload.microbatch_tokens(layout) * model.hidden * workload.element_bytes.param
    reduced = 2 * (layout.tp - 1) / layout.tp * hidden
    tp = links.near(reduced) * (4 * num_dense + 2 * num_expert)
    kept = workload.microbatch_tokens(layout) * _kv_width(model) / layout.tp
    passed = (layout.cp - 1) * kept * workload.element_bytes.param
    cp = 3 * links.ring(passed, layout.tp, layout.tp * layout.cp) * (num_dense + num_expert)
    if model.experts is None:
        return tp, cp, 0.0
    sent = (layout.ep - 1) / layout.ep * hidden / layout.tp * model.experts.topk
    ep = 4 * links.all_to_all(sent, layout.expert_tp * layout.ep) * num_expert
    etp = layout.expert_tp  # each expert's tokens are gathered from, and reduced to, its ranks
    gathered = (etp - 1) / layout.tp * model.experts.topk * hidden
    return tp + 4 * links.near(gathered) * num_expert, cp, ep


def _kv_width(model: Model) -> int:
    if model.latent is None:
        return 2 * model.groups * model.head
    return model.heads * (model.latent.qk_head + model.latent.rope_head + model.latent.v_head)


def _pipeline_s(workload: Workload, layout: ParallelLayout, links: _Links) -> float:
    """Seconds of a micro-batch's hidden states between stages."""
    if layout.pp == 1:
        return 0.0
    hidden = workload.microbatch_tokens(layout) * workload.model.hidden
    nbytes = hidden / (layout.tp if layout.sp else 1) * workload.element_bytes.param
    distance = layout.tp * layout.cp * (layout.dp if layout.order.endswith("pp") else 1)
    return 2 * (layout.vpp or 1) * links.neighbour(nbytes, distance)


def _data_parallel_s(
    workload: Workload, layout: ParallelLayout, links: _Links, stages: Stages
) -> float:
    """Seconds of gradients and parameters between replicas, in the stage that has most of them."""
    model, size = workload.model, workload.element_bytes
    span = layout.world if layout.pp > 1 and not layout.order.endswith("pp") else 0
    span = span or layout.world // layout.pp
    slowest = 0.0
    for chunks in stages:
        held = [chunk_held(model, c, layout.tp, layout.ep, layout.expert_tp) for c in chunks]
        dense = sum(one.dense.numel for one in held)
        if model.tied and any(chunk.first or chunk.last for chunk in chunks):
            dense += embedding_held(model, layout.tp).numel
        expert = sum(one.expert.numel for one in held)
        seconds = 0.0
        for numel, degree, stride in (
            (dense, layout.dp * layout.cp, layout.tp),
            (expert, layout.expert_dp, layout.expert_tp * layout.ep),
        ):
            nbytes = (degree - 1) / degree * numel * (size.grad + size.param)
            seconds += links.ring(nbytes, stride, span)
        slowest = max(slowest, seconds)
    return slowest
