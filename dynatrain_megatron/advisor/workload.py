"""What is trained, and on what: the sizes that memory and time of a layout are estimated from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from dynatrain_megatron.layout import ModelShape, ParallelLayout
from dynatrain_megatron.shapes import Model, model_shape

RESERVED = 0.08
"""Share of a GPU's memory that no estimate may use."""

TOKENS_A_STEP = 4 << 20
"""Tokens of a step where no global batch size is known."""


class Recompute(StrEnum):
    """What of the forward pass is computed again in the backward pass instead of being kept.

    ``selective``: the scores of attention. ``full``: all of a layer but its input.
    """

    none = "none"
    selective = "selective"
    full = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes of one parameter: as the forward pass reads it, its gradient, the optimizer's part.

    The optimizer's part, main parameter and moments, is what the distributed optimizer shards. The
    defaults are those of bf16 with Adam. Activations have the bytes of ``param``.
    """

    param: int = 2
    grad: int = 4
    optimizer: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and how it is trained, whatever the layout.

    ``seq_length`` counts tokens, ``global_batch_size`` samples; without one a step has about
    TOKENS_A_STEP tokens. ``keeps_scores`` says that attention is not fused, so that its scores are
    kept for the backward pass. ``uneven_pipeline`` says that the launch's flags place the layers on
    stages; a layout then has to say itself where they lie.
    """

    model: Model
    seq_length: int = 4096
    global_batch_size: int | None = None
    recompute: Recompute = Recompute.none
    keeps_scores: bool = False
    element_bytes: ElementBytes = ElementBytes()
    uneven_pipeline: bool = False

    @property
    def shape(self) -> ModelShape:
        """The sizes that a layout must divide."""
        return replace(
            model_shape(self.model),
            global_batch_size=self.global_batch_size,
            seq_length=self.seq_length,
        )

    def num_microbatches(self, layout: ParallelLayout) -> int:
        """Micro-batches that each data parallel rank goes through in a step."""
        samples = layout.mbs * layout.dp
        if self.global_batch_size is not None:
            return max(1, self.global_batch_size // samples)
        return max(1, math.ceil(TOKENS_A_STEP / (self.seq_length * samples)))

    def microbatch_tokens(self, layout: ParallelLayout) -> float:
        """Tokens of a micro-batch on one rank, before sequence parallelism shares them out."""
        return layout.mbs * self.seq_length / layout.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One rank's GPU and its links; predictions are as rough as these figures.

    ``memory_bytes`` is a GPU's, None where it does not matter, ``memory_gb_s`` its rate.
    ``near_gb_s`` is the rate between GPUs of a node each way, ``far_gb_s`` that of one GPU's way
    out of it, ``latency_s`` what an exchange takes however small. The defaults are round figures of
    a node with NVLink and an adapter for each GPU; only their ratios rank layouts.
    """

    memory_bytes: int | None = None
    gpus_per_node: int = 8
    tflops: float = 400.0
    memory_gb_s: float = 2500.0
    near_gb_s: float = 200.0
    far_gb_s: float = 25.0
    latency_s: float = 20e-6

    @property
    def usable_bytes(self) -> int | None:
        """What is left for a job: some is for the driver, communicators and fragmentation."""
        return None if self.memory_bytes is None else int(self.memory_bytes * (1 - RESERVED))

    def with_room_for(self, num_bytes: int) -> Machine:
        """The same, with more memory where so much is not usable."""
        if self.memory_bytes is None or num_bytes <= int(self.memory_bytes * (1 - RESERVED)):
            return self
        return replace(self, memory_bytes=math.ceil((num_bytes + 1) / (1 - RESERVED)))
