"""What Megatron's flags say of a model, under Megatron's names: what all that read them share.

``args`` are flags as parsed here, without Megatron, or a running job's own arguments.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from dynatrain_megatron.errors import ConfigError
from dynatrain_megatron.shapes.models import Experts, LatentAttention, Model

_LARGEST = (1 << 24) - 1  # more than any size; keeps products printable
_MOST_LAYERS = 10_000

RANK_ORDERS = {"tp-cp-ep-dp-pp": False, "tp-cp-ep-pp-dp": True}
"""Megatron's rank orders and the value of --use-tp-pp-dp-mapping that gives each."""

# What all readers need; defaults are Megatron's, None where a value follows from others or must be
# given.
_COUNTS: dict[str, int | None] = {
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "num_query_groups": 1,
    "ffn_hidden_size": None,
    "kv_channels": None,
    "vocab_size": None,
    "make_vocab_size_divisible_by": 128,
    "seq_length": None,
    "global_batch_size": None,
    "micro_batch_size": 1,
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_router_topk": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "tensor_model_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
}
_SWITCHES = (
    *("group_query_attention", "swiglu", "untie_embeddings_and_output_weights"),
    *("multi_latent_attention", "moe_router_enable_expert_bias", "sequence_parallel"),
    *("use_distributed_optimizer", "use_tp_pp_dp_mapping"),
)
_TEXTS = {"moe_layer_freq": "1"}


class FlagParser(argparse.ArgumentParser):
    """Parses those of Megatron's flags that all readers need, and a reader's own.

    A wrong value is a ConfigError.
    """

    def __init__(
        self,
        counts: Mapping[str, int | None],
        switches: Iterable[str],
        texts: Mapping[str, str | None],
    ) -> None:
        """A reader's own flags, by the names of their arguments, with their defaults."""
        super().__init__(add_help=False, allow_abbrev=False)
        for name, default in (_COUNTS | dict(counts)).items():
            self.add_argument(flag_of(name), type=count, default=default)
        for name in (*_SWITCHES, *switches):
            self.add_argument(flag_of(name), action="store_true")
        for name, text in (_TEXTS | dict(texts)).items():
            self.add_argument(flag_of(name), default=text)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"Megatron flags: {message}")


def flag_of(name: str) -> str:
    """The flag that sets an argument."""
    return "--" + name.replace("_", "-")


def count(text: str) -> int:
    """A size, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r:.100} is not a whole number of at least 1, and of {_LARGEST} at most"
        )
    return number


def rank_order(args: Any) -> str:
    """The rank order that the arguments ask for."""
    mapped = bool(args.use_tp_pp_dp_mapping)
    return next(order for order, mapping in RANK_ORDERS.items() if mapping == mapped)


def sizes(args: Any) -> Model:
    """The model by its sizes; biases, learned positions and norms of queries are left out.

    Raises ConfigError where sizes do not divide each other, and for what is no such model.
    """
    hidden, heads = args.hidden_size, args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    if args.kv_channels is None and hidden % heads:
        raise ConfigError(f"--num-attention-heads {heads} must divide --hidden-size {hidden}")
    if heads % groups:
        raise ConfigError(f"--num-query-groups {groups} must divide --num-attention-heads {heads}")
    gated = bool(args.swiglu)
    ffn = args.ffn_hidden_size or _default_ffn(hidden, gated)
    return Model(
        num_layers=args.num_layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=groups,
        head=args.kv_channels or hidden // heads,
        vocab=_padded_vocab(args),
        tied=not args.untie_embeddings_and_output_weights,
        gated=gated,
        latent=_latent_attention(args),
        experts=_experts(args, ffn),
    )


def _default_ffn(hidden: int, gated: bool) -> int:
    """Megatron's own rule."""
    return max(64, int(4 * hidden * 2 / 3) // 64 * 64) if gated else 4 * hidden


def _padded_vocab(args: Any) -> int:
    """Rows of the embedding, as padded for the launch's tensor parallelism."""
    padded = getattr(args, "padded_vocab_size", None)
    if padded:
        return int(padded)
    multiple = int(args.make_vocab_size_divisible_by * args.tensor_model_parallel_size)
    return -(-int(args.vocab_size) // multiple) * multiple


def _latent_attention(args: Any) -> LatentAttention | None:
    """Latent attention's sizes; raises ConfigError without a query rank."""
    if not args.multi_latent_attention:
        return None
    if args.q_lora_rank is None:
        raise ConfigError(
            "--multi-latent-attention without --q-lora-rank: the memory of such a model is not "
            "estimated; give --q-lora-rank, or name layouts yourself"
        )
    return LatentAttention(
        q_rank=args.q_lora_rank,
        kv_rank=args.kv_lora_rank,
        qk_head=args.qk_head_dim,
        rope_head=args.qk_pos_emb_head_dim,
        v_head=args.v_head_dim,
    )


def _experts(args: Any, ffn: int) -> Experts | None:
    """The experts' sizes; raises ConfigError for dense layers between expert layers."""
    if args.num_experts is None:
        return None
    return Experts(
        count=args.num_experts,
        ffn=args.moe_ffn_hidden_size or ffn,
        topk=args.moe_router_topk,
        first_layer=_first_expert_layer(args.moe_layer_freq, args.num_layers),
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        bias=bool(args.moe_router_enable_expert_bias),
    )


def _first_expert_layer(freq: Any, num_layers: int) -> int:
    """How many dense layers precede those with experts; refuses patterns that mix them."""
    pattern = _pattern(freq) if isinstance(freq, str) else freq
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(min(num_layers, _MOST_LAYERS))]
    if len(pattern) != min(num_layers, _MOST_LAYERS):
        raise ConfigError(
            f"--moe-layer-freq {freq!s:.100} names {len(pattern)} layers, but --num-layers is "
            f"{num_layers}"
        )
    first = pattern.index(1) if 1 in pattern else len(pattern)
    if first == len(pattern) or 0 in pattern[first:]:
        raise ConfigError(
            f"--moe-layer-freq {freq!s:.100}: memory is estimated for dense layers followed by "
            f"layers with experts only, such as ([0]*3+[1]*58); name layouts yourself"
        )
    return first


def _pattern(text: str) -> int | list[int]:
    """The number, or the list of zeros and ones, that a text of numbers, lists, + and * means."""
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"--moe-layer-freq {text!r:.100} cannot be read; write a number, or a list such as "
            f"([0]*3+[1]*58)"
        ) from error
    return found


def _value(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(number)) if type(number) is int and 0 < number <= _MOST_LAYERS:
            return number
        case ast.List(elts=items):
            kinds = [item.value if isinstance(item, ast.Constant) else None for item in items]
            if all(type(kind) is int and kind in (0, 1) for kind in kinds):
                return [kind for kind in kinds if isinstance(kind, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _value(left), _value(right)
            if isinstance(one, list) and isinstance(other, list):
                return _short(one + other)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, times = _value(left), _value(right)
            if isinstance(one, list) and isinstance(times, int):
                return _short(one * times)
    raise ValueError(ast.dump(node))


def _short(layers: list[int]) -> list[int]:
    if len(layers) > _MOST_LAYERS:
        raise ValueError(f"{len(layers)} layers")
    return layers
