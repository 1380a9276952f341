"""Megatron's local attention, extended to multi-latent heads and to context parallelism.

Megatron's own ``DotProductAttention``, which needs no Transformer Engine, takes heads of one size
and the whole sequence. :class:`CoreAttention` does what it does, bit for bit, and two things more:

- keys and values of different sizes, as multi-latent attention has them;
- a sequence in pieces. Megatron cuts it into 2·cp chunks and gives each context-parallel rank one
  from either end, so that the work under a causal mask is the same on all ranks::

      cp = 2         chunk 0   chunk 1   chunk 2   chunk 3
      held by rank         0         1         1         0

  Each rank gathers the keys and values of all ranks, puts the chunks in the order of the sequence
  and computes the rows of its own queries. In the backward pass the gradients of keys and values
  are summed where they came from.

Imports Megatron, so the platform has to be installed before.
"""

import copy
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

# Megatron's default, which means any way to it, and the way that is taken.
_COMMUNICATION = (None, "p2p", "allgather", "all_gather")


class CoreAttention(DotProductAttention):
    """Scaled dot-product attention over the heads of one tensor-parallel rank.

    Takes what ``DotProductAttention`` takes. ``k_channels`` and ``v_channels`` are the sizes of a
    query or key head and of a value head; without them both are ``config.kv_channels``.

    Raises:
        ValueError: where the sequence is split over ranks and the attention is not a causal one
            over the whole sequence, or is to be exchanged in another way than by gathering.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        whole = config
        if config.context_parallel_size > 1:
            whole = copy.copy(config)
            whole.context_parallel_size = 1  # the parent refuses any other
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        if softmax_scale is None and k_channels is not None:
            softmax_scale = k_channels**-0.5
        super().__init__(
            whole,
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout,
            softmax_scale,
            cp_comm_type,
            pg_collection,
        )
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
        if config.context_parallel_size > 1:
            self._check_split_sequence(cp_comm_type)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend; with context parallelism a collective over its group.

        Shapes: query [sequence, batch, heads, k_channels], key and value likewise with the KV
        groups as heads, all of this rank's part; ``attention_mask`` [batch or 1, 1, own sequence,
        whole sequence], True where a query must not look, None for the causal mask. Returns
        [sequence, batch, heads * v_channels].
        """
        if self.config.context_parallel_size > 1:
            group = self.pg_collection.cp
            if attention_mask is None:
                attention_mask = causal_mask(
                    query.size(0), group.size(), group.rank(), query.device
                )
            key, value = gather_sequence(key, group), gather_sequence(value, group)
        return super().forward(
            query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
        )

    def _check_split_sequence(self, cp_comm_type: str | None) -> None:
        problem = None
        if cp_comm_type not in _COMMUNICATION:
            problem = f"--cp-comm-type {cp_comm_type}: it gathers keys and values (allgather)"
        elif self.scale_mask_softmax.window_size is not None:
            problem = f"--window-size {self.config.window_size}: it attends to all earlier tokens"
        elif self.attn_mask_type is not AttnMaskType.causal or self.attention_type != "self":
            problem = f"{self.attn_mask_type} {self.attention_type} attention: it has a causal mask"
        if problem is not None:
            raise ValueError(
                "the local attention with --context-parallel-size "
                f"{self.config.context_parallel_size} has no {problem}"
            )


def gather_sequence(part: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """Collective: the whole sequence along dim 0, in order, from every rank's two chunks.

    Its backward pass sums over the ranks what each has found for this rank's part.
    """
    whole = tensor_parallel.gather_from_sequence_parallel_region(part.contiguous(), group=group)
    chunks = whole.chunk(2 * group.size())
    # As gathered, the chunks lie by rank: 0, last, 1, last but one, …
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])))


def causal_mask(length: int, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Which of all tokens this rank's queries must not see: shape [1, 1, length, size * length].

    ``length`` is that of this rank's part of the sequence, ``size`` and ``rank`` are those of the
    context-parallel group.
    """
    everyone = torch.arange(length * size, device=device)
    chunks = everyone.chunk(2 * size)
    own = torch.cat((chunks[rank], chunks[-1 - rank]))
    return (own[:, None] < everyone)[None, None]
