"""Layers of a Hybrid model made of Megatron's local modules; what ``--spec`` names.

Megatron's own stack is made of Transformer Engine's modules. This one has what can be had without:
attention (``*``), multi-latent attention (``+``), MLP (``-``), experts (``E``) and multi-token
prediction, each cut out of Megatron's local layer. Norms that Transformer Engine fuses into the
next projection stand by themselves here, under the same names in a checkpoint.

Imports Megatron, so the platform has to be installed before.
"""

from dataclasses import fields
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


def _local_layer(**wanted: Any) -> TransformerLayerSubmodules:
    # So asked, Megatron takes torch's norms, which are of the kind that the config names.
    return get_gpt_layer_local_submodules(normalization="RMSNorm", **wanted)


def _attention(layer: TransformerLayerSubmodules, names: dict[str, str]) -> ModuleSpec:
    """The first half of a layer; ``names`` are those in a checkpoint, by prefix."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=layer.self_attention,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def _feed_forward(
    kind: type, layer: TransformerLayerSubmodules, names: dict[str, str]
) -> ModuleSpec:
    """The second half of a layer."""
    return ModuleSpec(
        module=kind,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=layer.mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def _prediction() -> ModuleSpec:
    """Multi-token prediction; Megatron makes its inner layers from the pattern."""
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        layer_norm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)]
        ),
    )


def _stack(*, latent_norms: bool) -> ModuleSpec:
    plain = _local_layer()
    latent = _local_layer(multi_latent_attention=True, qk_layernorm=latent_norms)
    experts = _local_layer(num_experts=1)  # with experts; the config says how many
    known = {field.name for field in fields(HybridStackSubmodules)}
    # megatron-core 0.18 has no layers of latent attention alone.
    latents = {"mla_layer": _attention(latent, {})} if "mla_layer" in known else {}
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=_attention(
                plain, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
            ),
            mlp_layer=_feed_forward(
                MLPLayer, plain, {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
            ),
            moe_layer=_feed_forward(MoETransformerLayer, experts, {}),
            mtp_block_spec=_prediction(),
            **latents,
        ),
    )


stack = _stack(latent_norms=False)
"""The layers without ``--qk-layernorm``."""

stack_with_latent_norms = _stack(latent_norms=True)
"""The layers with ``--qk-layernorm``, which norms the latent vectors of ``+``."""
