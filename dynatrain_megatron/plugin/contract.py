"""Every name of Megatron and torch that we rely on: what for, why, and in which releases.

``dynatrain doctor`` and the contract tests read this one table. It is made of the tables that are
acted on (hooks, replacements, the names below worlds) and of the names that the code just calls,
which a test compares with the sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from dynatrain_megatron.elastic import contract as worlds
from dynatrain_megatron.errors import HostMismatch
from dynatrain_megatron.platform.versions import ALL, Release, Releases, problem_of
from dynatrain_megatron.plugin.hooks import HOOKS


class Use(StrEnum):
    """What cannot be done where a name is missing."""

    attach = "attach to Megatron's training loop"
    switch = "change the layout of a job"
    hybrid = "Hybrid models without Transformer Engine"
    repair = "train without Transformer Engine and Apex"
    entry = "our own training script"
    worlds = "change worlds of processes"


@dataclass(frozen=True, slots=True)
class HostName:
    """One dotted name, and what the code needs of it."""

    name: str
    use: Use
    reason: str
    parameters: tuple[str, ...] = ()
    releases: Releases = ALL

    def problem(self) -> str | None:
        """What is wrong with it in this process; None where it is as expected."""
        return problem_of(self.name, self.parameters)


def _names(
    use: Use, module: str, names: str, reason: str, releases: Releases = ALL
) -> Iterator[HostName]:
    for name in names.split():
        yield HostName(f"{module}.{name}", use, reason, releases=releases)


_FROM_0_18 = Releases(since=(0, 18))
_FROM_0_19 = Releases(since=(0, 19))

_CORE, _TRAINING = "megatron.core", "megatron.training"
_STATE = "names and boxes of the state, as checkpoints have them"
_BUILD = "the target is built as Megatron builds a model"
_BATCHES = "micro-batches are counted anew in each layout"
_LAYERS = "layers of a Hybrid model, of Megatron's local modules"
_STEPS = "data, forward step and loss of a GPT model"
_PROVIDER = "builds the model where the wheel has no builder"

# Names that the code calls, besides those it replaces. Transformer layers and the like come with
# what they are made of; only what we name ourselves stands here.
CALLED: tuple[HostName, ...] = (
    *_names(Use.switch, _TRAINING, "get_args get_timers", "the run's arguments and timers"),
    *_names(
        Use.switch,
        f"{_TRAINING}.training",
        "save_checkpoint_and_time should_disable_forward_pre_hook",
        "what the loop does around a step is done around a switch",
    ),
    *_names(Use.switch, f"{_TRAINING}.arguments", "validate_args", "validates a target"),
    *_names(
        Use.switch,
        f"{_TRAINING}.argument_utils",
        "pretrain_cfg_container_from_args",
        "a fresh config container for each layout",
        _FROM_0_18,
    ),
    *_names(
        Use.switch,
        f"{_TRAINING}.argument_utils",
        "gpt_config_from_args hybrid_config_from_args",
        "the model's own part of it",
        _FROM_0_19,
    ),
    *_names(
        Use.switch,
        f"{_TRAINING}.async_utils",
        "maybe_finalize_async_save",
        "saves in flight hold groups of the old layout",
    ),
    *_names(Use.switch, f"{_TRAINING}.checkpointing", "_build_sharded_state_dict_metadata", _STATE),
    *_names(
        Use.switch,
        f"{_TRAINING}.datasets.data_samplers",
        "MegatronPretrainingRandomSampler",
        "its order of samples depends on the layout and is kept",
    ),
    *_names(
        Use.switch,
        f"{_TRAINING}.global_vars",
        "_GLOBAL_TENSORBOARD_WRITER _GLOBAL_WANDB_WRITER _set_tensorboard_writer _set_wandb_writer",
        "writers are on the last rank, which may become another process",
    ),
    *_names(
        Use.switch,
        f"{_TRAINING}.initialize",
        "_set_random_seed",
        "random streams begin anew by Megatron's formula",
    ),
    *_names(
        Use.switch,
        f"{_CORE}.parallel_state",
        "initialize_model_parallel get_data_parallel_group",
        "groups of all layouts are made by it and exchanged in it",
    ),
    *_names(
        Use.switch,
        f"{_CORE}.num_microbatches_calculator",
        "_GLOBAL_NUM_MICROBATCHES_CALCULATOR init_num_microbatches_calculator "
        "unset_num_microbatches_calculator update_num_microbatches",
        _BATCHES,
    ),
    *_names(
        Use.switch,
        f"{_CORE}.num_microbatches_calculator",
        "StepBatchsizeNumMicroBatchesCalculator",
        _BATCHES,
        _FROM_0_18,
    ),
    *_names(
        Use.switch,
        f"{_CORE}.tensor_parallel.random",
        "get_cuda_rng_tracker",
        "random streams of the target are set, and those of a refused one put back",
    ),
    *_names(
        Use.switch,
        f"{_CORE}.optimizer.optimizer",
        "param_group_identifier_keys",
        "groups of parameters keep what they go by",
    ),
    *_names(Use.switch, f"{_CORE}.utils", "get_model_config unwrap_model", _BUILD),
    *_names(Use.switch, f"{_CORE}.process_groups_config", "ProcessGroupCollection", _BUILD),
    *_names(Use.switch, f"{_CORE}.dist_checkpointing.dict_utils", "nested_values", _STATE),
    *_names(
        Use.switch,
        f"{_CORE}.dist_checkpointing.mapping",
        "ShardedObject ShardedTensor ShardedTensorFactory",
        _STATE,
    ),
    *_names(
        Use.switch,
        f"{_CORE}.optimizer.distrib_optimizer.DistributedOptimizer",
        "_get_model_param_range_map",
        "which part of a parameter a rank's optimizer has",
    ),
    *_names(
        Use.switch, f"{_CORE}.datasets", "indexed_dataset utils.Split", "data go on where they were"
    ),
    *_names(
        Use.switch,
        f"{_CORE}.transformer.moe.moe_logging",
        "get_moe_metrics_tracker",
        "keeps groups of the old layout",
        _FROM_0_18,
    ),
    *_names(
        Use.switch,
        f"{_CORE}.transformer.multi_token_prediction",
        "MTPLossLoggingHelper",
        "keeps groups of the old layout",
    ),
    *_names(
        Use.repair,
        f"{_CORE}.tensor_parallel",
        "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
        "gather_from_tensor_model_parallel_region scatter_to_sequence_parallel_region",
        "gradients that cross ranks",
    ),
    *_names(
        Use.repair,
        f"{_CORE}.optimizer.distrib_optimizer",
        "HAVE_APEX_OR_TE",
        "whose Adam the optimizer has",
    ),
    *_names(Use.repair, f"{_CORE}.transformer.torch_norm", "WrappedTorchNorm", "the local norm"),
    *_names(
        Use.repair,
        f"{_CORE}.transformer",
        "dot_product_attention.DotProductAttention enums.AttnMaskType "
        "transformer_config.TransformerConfig",
        "our attention stands in its place",
    ),
    *_names(
        Use.hybrid,
        f"{_CORE}.models.hybrid.hybrid_block",
        "HybridStack HybridStackSubmodules",
        _LAYERS,
        _FROM_0_18,
    ),
    *_names(Use.hybrid, f"{_CORE}.ssm.mlp_layer", "MLPLayer", _LAYERS),
    *_names(Use.hybrid, f"{_CORE}.tensor_parallel.layers", "ColumnParallelLinear", _LAYERS),
    *_names(Use.hybrid, f"{_CORE}.fusions.fused_bias_dropout", "get_bias_dropout_add", _LAYERS),
    *_names(
        Use.hybrid,
        f"{_CORE}.models.gpt.gpt_layer_specs",
        "get_gpt_layer_local_submodules",
        _LAYERS,
        _FROM_0_18,
    ),
    *_names(
        Use.hybrid,
        f"{_CORE}.transformer.multi_token_prediction",
        "MultiTokenPredictionBlock MultiTokenPredictionBlockSubmodules MultiTokenPredictionLayer "
        "MultiTokenPredictionLayerSubmodules",
        _LAYERS,
    ),
    *_names(
        Use.hybrid,
        f"{_CORE}.transformer.transformer_layer",
        "MoETransformerLayer TransformerLayer TransformerLayerSubmodules",
        _LAYERS,
    ),
    *_names(Use.hybrid, f"{_CORE}.transformer.spec_utils", "ModuleSpec", _LAYERS),
    *_names(
        Use.entry,
        _TRAINING,
        "pretrain print_rank_0 set_startup_timestamps",
        "starts a run as Megatron's own scripts do",
    ),
    *_names(
        Use.entry,
        f"{_TRAINING}.arguments",
        "core_transformer_config_from_args parse_and_validate_args",
        "starts a run as Megatron's own scripts do",
        _FROM_0_18,
    ),
    *_names(
        Use.entry, f"{_TRAINING}.arguments", "add_megatron_arguments", "shows our flag in --help"
    ),
    *_names(Use.entry, f"{_TRAINING}.utils", "get_blend_and_blend_per_split", _STEPS),
    *_names(Use.entry, f"{_CORE}.enums", "ModelType", _STEPS),
    *_names(
        Use.entry,
        f"{_CORE}.mpu",
        "get_context_parallel_group get_tensor_model_parallel_group get_tensor_model_parallel_rank "
        "get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size "
        "is_pipeline_first_stage is_pipeline_last_stage",
        _STEPS,
    ),
    *_names(
        Use.entry,
        f"{_CORE}.datasets",
        "blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder gpt_dataset.GPTDataset "
        "gpt_dataset.GPTDatasetConfig gpt_dataset.MockGPTDataset",
        _STEPS,
    ),
    *_names(Use.entry, f"{_CORE}.rerun_state_machine", "get_rerun_state_machine", _STEPS),
    *_names(
        Use.entry,
        f"{_CORE}.tokenizers.utils.build_tokenizer",
        "build_tokenizer",
        _STEPS,
        Releases(since=(0, 17)),
    ),
    *_names(
        Use.entry,
        f"{_CORE}.transformer.multi_token_prediction",
        "get_mtp_ranks mtp_on_this_rank",
        _STEPS,
    ),
    *_names(
        Use.entry,
        f"{_CORE}.utils",
        "StragglerDetector get_attr_wrapped_model get_batch_on_this_cp_rank get_model_config",
        _STEPS,
    ),
    *_names(Use.entry, f"{_CORE}.models.gpt", "GPTModel", _PROVIDER),
    *_names(
        Use.entry,
        f"{_CORE}.models.gpt.gpt_layer_specs",
        "get_gpt_decoder_block_spec get_gpt_decoder_layer_specs get_gpt_mtp_block_spec",
        _PROVIDER,
    ),
    *_names(Use.entry, f"{_CORE}.transformer.spec_utils", "import_module", _PROVIDER),
)


def table() -> tuple[HostName, ...]:
    """All names; the platform has to be installed, as for anything of Megatron."""
    from dynatrain_megatron.platform.host import HOST_TABLE

    hooks = (
        HostName(f"{hook.module}.{hook.name}", Use.attach, hook.why, hook.parameters, hook.releases)
        for hook in HOOKS
    )
    repairs = (
        HostName(row.target, Use.repair, row.reason, releases=row.releases) for row in HOST_TABLE
    )
    below_worlds = (
        HostName(f"torch.{entry.name}", Use.worlds, entry.reason) for entry in worlds.NAMES
    )
    return (*hooks, *CALLED, *repairs, *below_worlds)


def problems(names: Iterable[HostName], release: Release) -> dict[HostName, str]:
    """The names of ``release`` that are not as expected, each with what is wrong; imports them."""
    found = {name: name.problem() for name in names if release in name.releases}
    return {name: problem for name, problem in found.items() if problem is not None}


def worlds_problem() -> str | None:
    """What stands against changing worlds with this torch; None where nothing does."""
    try:
        worlds.check()
    except HostMismatch as error:
        return str(error)
    return None
