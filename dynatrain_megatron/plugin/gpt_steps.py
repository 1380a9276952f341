"""What Megatron's training loop asks of a GPT pre-training script: data, forward step and loss.

Imports Megatron, so the platform has to be installed before. Written for megatron-core 0.19.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_model_config,
)
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split

# A loss that much above the largest one seen counts as a spike (--check-for-spiky-loss).
_SPIKE_FACTOR = 10

# What the first and the last pipeline stage take from a sample, with the type of each.
_INPUTS = {"tokens": torch.int64, "position_ids": torch.int64}
_TARGETS = {"labels": torch.int64, "loss_mask": torch.float32}

# Tensors by name; None where this rank does not need one.
Batch = dict[str, Any]
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]

_straggler = StragglerDetector()


def forward_step(
    data_iterator: Iterator[Any] | None, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, LossFunction]:
    """One microbatch through this rank's model chunk; returns its output and the loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler(bdata=True):
        batch = get_batch(data_iterator, model)
    timers("batch-generator").stop()

    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with _straggler:
        if return_schedule_plan:
            plan = get_attr_wrapped_model(model, "build_schedule_plan")(*inputs, **targets)
            return plan, partial(loss_func, batch["loss_mask"])
        return model(*inputs, **targets), partial(loss_func, batch["loss_mask"])


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of one microbatch over its tokens; only the last stage calls it.

    Returns:
        The summed loss, the number of tokens that count, and both as the report "lm loss", which
        Megatron adds up over microbatches and data-parallel ranks.
    """
    losses = output.reshape(-1).float()
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses * mask)
    _check_loss(loss)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def _check_loss(loss: torch.Tensor) -> None:
    args = get_args()
    machine = get_rerun_state_machine()
    # A forward pass repeated on the same data gives the same loss to the last bit.
    validate = partial(machine.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            message = f"found {what} in the local forward loss"
            validate(rejection_func=rejects, message=message, fatal=True)
    if args.check_for_spiky_loss:
        spikes = partial(machine.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss")
        validate(rejection_func=spikes, message="the loss spikes", fatal=False)


def get_batch(data_iterator: Iterator[Any] | None, model: torch.nn.Module) -> Batch:
    """The part of the next microbatch that this rank's model chunk needs; None for the rest.

    The first tensor-parallel rank reads the data and sends it to the others of its group: a
    collective over that group. The sequence is then cut for the context-parallel rank.
    """
    config = get_model_config(model)
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    needed = _needed(config, vp_stage)
    batch: Batch = dict.fromkeys((*_INPUTS, *_TARGETS, "attention_mask"))
    if not needed:
        return batch
    args = get_args()
    size = args.micro_batch_size
    if not model.training:
        size = getattr(args, "eval_micro_batch_size", size)  # older hosts have one size
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        key: ((size, args.seq_length), dtype) for key, dtype in needed.items()
    }
    if args.create_attention_mask_in_dataloader:
        mask_shape = (size, 1, args.seq_length, args.seq_length)
        shapes["attention_mask"] = (mask_shape, torch.bool)
    batch.update(_read_on_first_tensor_rank(data_iterator, shapes))
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def _needed(config: Any, vp_stage: int | None) -> dict[str, torch.dtype]:
    """Names and types of what this model chunk takes from a sample; empty in between."""
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    # Multi-token prediction embeds tokens and compares with labels, wherever it is placed.
    mtp = mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )
    needed: dict[str, torch.dtype] = {}
    if mtp or mpu.is_pipeline_first_stage(**stage):
        needed |= _INPUTS
    if mtp or mpu.is_pipeline_last_stage(**stage):
        needed |= _TARGETS
    return needed


def _read_on_first_tensor_rank(
    data_iterator: Iterator[Any] | None, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, torch.Tensor]:
    group = mpu.get_tensor_model_parallel_group()
    source = mpu.get_tensor_model_parallel_src_rank()
    if mpu.get_tensor_model_parallel_rank() == 0:
        if data_iterator is None:
            raise RuntimeError("the first tensor-parallel rank of this stage has no data iterator")
        sample = next(data_iterator)
        tensors = {key: sample[key].cuda(non_blocking=True) for key in shapes}
    else:
        tensors = {
            key: torch.empty(shape, dtype=dtype, device="cuda")
            for key, (shape, dtype) in shapes.items()
        }
    if mpu.get_tensor_model_parallel_world_size() > 1:
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, source, group=group)
    return tensors


def datasets_provider(
    num_samples: Sequence[int | None], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Build the training, validation and test datasets; a collective, each rank takes part."""
    args = get_args()
    transformer = core_transformer_config_from_args(args)

    def reads_data() -> bool:
        first = mpu.get_tensor_model_parallel_rank() == 0
        return first and bool(_needed(transformer, vp_stage))

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation and test datasets for GPT ...")
    config = _dataset_config(args)
    builder = BlendedMegatronDatasetBuilder(dataset, num_samples, reads_data, config)
    datasets = builder.build()
    print_rank_0("> finished building GPT datasets ...")
    return datasets


# Megatron builds the datasets on all ranks, and not on the first tensor-parallel one only.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequences_per_dataset=sequences_per_dataset,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """The ranks of one pipeline that hold a copy of the word embeddings, in order."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(list(pp_ranks), core_transformer_config_from_args(args)))
    return sorted(ranks)
