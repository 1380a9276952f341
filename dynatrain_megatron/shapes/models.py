"""Models by their sizes: which parameters each layer has, in Megatron's order and by its names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one layer, as it lies in its logical tensor.

    ``lead`` are the positions in the logical tensor's leading dims (layer, expert) that it is at.
    ``cut`` is the dim of the logical tensor that tensor parallelism cuts, None where it is
    replicated; ``halves`` how many parts of that dim are cut each by itself (SwiGLU's two).
    ``buffer`` is a state without optimizer.
    """

    name: str
    shape: tuple[int, ...]
    lead: tuple[int, ...] = ()
    cut: int | None = None
    halves: int = 1
    expert: bool = False
    buffer: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape[len(self.lead) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Ranks and head sizes of multi-latent attention.

    Its down-projections are cut by tensor parallelism, as in Megatron's own modules; Transformer
    Engine's are replicated.
    """

    q_rank: int
    kv_rank: int
    qk_head: int
    rope_head: int
    v_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """``count`` experts in every layer from ``first_layer`` on, and a shared one of ``shared_ffn``.

    ``ffn`` is the hidden size of each, ``topk`` how many of them a token goes through; ``bias``
    says that the router keeps an expert bias.
    """

    count: int
    ffn: int
    topk: int = 2
    first_layer: int = 0
    shared_ffn: int = 0
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder of the Llama family (RMSNorm, SwiGLU, no biases), or of GPT-3's where so marked.

    ``vocab`` is the padded vocabulary. ``head`` is the size of an attention head. Without ``gated``
    MLPs have a plain activation in place of SwiGLU. ``biases`` and ``norm_biases`` say that linear
    layers and norms have biases; ``positions`` are learned ones, 0 where there are none;
    ``qk_norm`` is a norm of queries and of keys.
    """

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocab: int
    tied: bool = False
    gated: bool = True
    biases: bool = False
    norm_biases: bool = False
    positions: int = 0
    qk_norm: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return sum(p.numel for p in self.parameters() if not p.buffer)

    @property
    def halves(self) -> int:
        """How many matrices of an MLP's first layer lie in one parameter: SwiGLU has two."""
        return 2 if self.gated else 1

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter, each once."""
        yield from self.before
        for layer in range(self.num_layers):
            yield from self.layer(layer)
        yield from self.final_norm
        if not self.tied:
            yield self.output

    @property
    def embedding(self) -> Parameter:
        return Parameter("embedding.word_embeddings.weight", (self.vocab, self.hidden), cut=0)

    @property
    def output(self) -> Parameter:
        return Parameter("output_layer.weight", (self.vocab, self.hidden), cut=0)

    @property
    def before(self) -> list[Parameter]:
        """What comes before the layers."""
        name, shape = "embedding.position_embeddings.weight", (self.positions, self.hidden)
        return [self.embedding, *([Parameter(name, shape)] if self.positions else [])]

    @property
    def final_norm(self) -> list[Parameter]:
        kinds = ("weight", "bias") if self.norm_biases else ("weight",)
        return [Parameter(f"decoder.final_layernorm.{kind}", (self.hidden,)) for kind in kinds]

    def layer(self, number: int, experts: range | None = None) -> Iterator[Parameter]:
        """The parameters of one layer, with the experts given (default: all)."""
        norms = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
        if self.latent is not None:
            norms = "input_layernorm.", "pre_mlp_layernorm."
        yield from self._norm(number, norms[0])
        yield from self._attention(number)
        yield from self._norm(number, norms[1])
        if self.experts is None or number < self.experts.first_layer:
            yield from self._mlp(number, "mlp", self.ffn)
        else:
            yield from self._expert_mlp(number, self.experts, experts)

    def _attention(self, number: int) -> Iterator[Parameter]:
        hidden, heads = self.hidden, self.heads
        if self.latent is None:
            width = heads * self.head
            yield from self._linear(number, "self_attention.linear_proj", (hidden, width), 1)
            width = (heads + 2 * self.groups) * self.head
            yield from self._linear(number, "self_attention.linear_qkv", (width, hidden), 0)
            for name in ("q_layernorm", "k_layernorm") if self.qk_norm else ():
                yield self._of_layer(number, f"self_attention.{name}.weight", (self.head,))
            return
        latent = self.latent
        q_width = heads * (latent.qk_head + latent.rope_head)
        kv_width = heads * (latent.qk_head + latent.v_head)
        for name, shape, cut in (
            ("linear_proj.weight", (hidden, heads * latent.v_head), 1),
            ("linear_q_down_proj.weight", (latent.q_rank, hidden), 0),
            ("linear_q_up_proj.weight", (q_width, latent.q_rank), 0),
            ("linear_kv_down_proj.weight", (latent.kv_rank + latent.rope_head, hidden), 0),
            ("linear_kv_up_proj.weight", (kv_width, latent.kv_rank), 0),
            ("q_layernorm.weight", (latent.q_rank,), None),
            ("kv_layernorm.weight", (latent.kv_rank,), None),
        ):
            yield self._of_layer(number, f"self_attention.{name}", shape, cut)

    def _mlp(self, number: int, prefix: str, ffn: int) -> Iterator[Parameter]:
        hidden, halves = self.hidden, self.halves
        yield from self._linear(number, f"{prefix}.linear_fc1", (halves * ffn, hidden), 0, halves)
        yield from self._linear(number, f"{prefix}.linear_fc2", (hidden, ffn), 1)

    def _linear(
        self, number: int, name: str, shape: tuple[int, int], cut: int, halves: int = 1
    ) -> Iterator[Parameter]:
        """A matrix and, where linear layers have one, its bias, which is cut with the rows."""
        yield self._of_layer(number, f"{name}.weight", shape, cut, halves)
        if self.biases:
            along = None if cut else 0
            yield self._of_layer(number, f"{name}.bias", shape[:1], along, halves)

    def _norm(self, number: int, prefix: str) -> Iterator[Parameter]:
        for kind in ("weight", "bias") if self.norm_biases else ("weight",):
            yield self._of_layer(number, f"{prefix}{kind}", (self.hidden,))

    def _expert_mlp(
        self, number: int, experts: Experts, chosen: range | None
    ) -> Iterator[Parameter]:
        hidden, ffn = self.hidden, experts.ffn
        width = self.halves * ffn
        yield self._of_layer(number, "mlp.router.weight", (experts.count, hidden))
        if experts.bias:
            yield self._of_layer(number, "mlp.router.expert_bias", (experts.count,), buffer=True)
        for expert in range(experts.count) if chosen is None else chosen:
            for name, shape, cut, halves in (
                ("mlp.experts.experts.linear_fc1.weight", (width, hidden), 0, self.halves),
                ("mlp.experts.experts.linear_fc2.weight", (hidden, ffn), 1, 1),
            ):
                found = self._of_layer(number, name, shape, cut, halves)
                yield Parameter(
                    found.name,
                    (*found.shape[: len(found.lead)], experts.count, *shape),
                    (*found.lead, expert),
                    len(found.lead) + 1 + cut,
                    halves,
                    expert=True,
                )
        if experts.shared_ffn:
            yield from self._mlp(number, "mlp.shared_experts", experts.shared_ffn)

    def _of_layer(
        self,
        number: int,
        name: str,
        shape: tuple[int, ...],
        cut: int | None = None,
        halves: int = 1,
        buffer: bool = False,
    ) -> Parameter:
        """Layers that are all alike share a logical tensor, whose first dim is the layer."""
        if self.experts is not None and self.experts.first_layer:
            return Parameter(
                f"decoder.layers.{number}.{name}", shape, (), cut, halves, False, buffer
            )
        cut = None if cut is None else cut + 1
        shape = (self.num_layers, *shape)
        return Parameter(f"decoder.layers.{name}", shape, (number,), cut, halves, False, buffer)

    def stages(self, number: int) -> list[range]:
        """The layers of each of so many stages; where they do not divide, the first have more."""
        few, more = divmod(self.num_layers, number)
        ends = itertools.accumulate((few + (i < more) for i in range(number)), initial=0)
        return [range(a, b) for a, b in itertools.pairwise(ends)]


MODELS = {
    "1B": Model(  # Llama 3.2
        num_layers=16, hidden=2048, ffn=8192, heads=32, groups=8, head=64, vocab=128_256, tied=True
    ),
    "7B": Model(  # Llama 2
        num_layers=32, hidden=4096, ffn=11_008, heads=32, groups=32, head=128, vocab=32_000
    ),
    "13B": Model(  # Llama 2
        num_layers=40, hidden=5120, ffn=13_824, heads=40, groups=40, head=128, vocab=32_000
    ),
    "70B": Model(  # Llama 2
        num_layers=80, hidden=8192, ffn=28_672, heads=64, groups=8, head=128, vocab=32_000
    ),
    "235B": Model(  # Qwen 3, a mixture of experts
        num_layers=94, hidden=4096, ffn=12_288, heads=64, groups=4, head=128, vocab=151_936,
        qk_norm=True,
        experts=Experts(count=128, ffn=1536, topk=8),
    ),
    "671B": Model(  # DeepSeek-V3, a mixture of experts; without its MTP layer
        num_layers=61, hidden=7168, ffn=18_432, heads=128, groups=128, head=128, vocab=129_280,
        latent=LatentAttention(q_rank=1536, kv_rank=512, qk_head=128, rope_head=64, v_head=128),
        experts=Experts(
            count=256, ffn=2048, topk=8, first_layer=3, shared_ffn=2048, bias=True
        ),
    ),
}  # fmt: skip
