"""Builds GPT models from Megatron's arguments, for a host whose wheel has no builder of its own.

megatron-core 0.19 makes the model from a config (``gpt_config_from_args``); 0.18 asks the script
for a model provider. Imports Megatron, so the platform has to be installed before.
"""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """One stage of the model the arguments describe; runs on every rank, with its groups made."""
    args = get_args()
    if config is None:
        config = core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    chosen = {
        "use_transformer_engine": use_te,
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
    }
    if args.spec is not None:
        layers = import_module(args.spec)
    else:
        layers = get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **chosen)
    prediction = None
    if args.mtp_num_layers is not None:
        prediction = get_gpt_mtp_block_spec(
            config,
            get_gpt_decoder_layer_specs(config, **chosen)[-1],
            use_transformer_engine=use_te,
            vp_stage=vp_stage,
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=prediction,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
