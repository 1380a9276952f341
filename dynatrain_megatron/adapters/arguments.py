"""Megatron's arguments for a target layout.

Dozens of fields derive from the layout in Megatron's ``validate_args``. The target's arguments are
made by the same code: the launch flags as parsed, with the layout's fields replaced, validated by
Megatron. That also says, in the host's own words, whether the layout is possible.
"""

from __future__ import annotations

import contextlib
import copy
import io
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynatrain_megatron.adapters.batches import constant_batch_size
from dynatrain_megatron.adapters.hybrid import pattern_of
from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ModelShape, ParallelLayout
from dynatrain_megatron.shapes.flags import RANK_ORDERS, rank_order


@dataclass(frozen=True)
class LaunchArguments:
    """What the user asked for: the parsed flags before validation, and the script's defaults."""

    parsed: Namespace
    defaults: Mapping[str, Any]

    @classmethod
    def capture(cls, parsed: Namespace, defaults: Mapping[str, Any]) -> LaunchArguments:
        """Keep a copy of ``parsed`` as it is before Megatron's ``validate_args`` changes it."""
        return cls(copy.deepcopy(parsed), dict(defaults))

    def validated(
        self, layout: ParallelLayout, live: Namespace, rank: int | None = None
    ) -> Namespace:
        """Fresh arguments for ``rank`` of ``layout``, by default the ``live`` one; local.

        Batch sizes stay those of the ``live`` arguments. Raises :class:`LayoutError` with
        Megatron's reason where it refuses the layout.
        """
        from megatron.training import arguments as host

        if layout.order not in RANK_ORDERS:
            raise LayoutError(
                f"order={layout.order} is not a rank order of Megatron's training script; it has "
                f"{' and '.join(RANK_ORDERS)} (--use-tp-pp-dp-mapping)"
            )
        args = copy.deepcopy(self.parsed)
        vars(args).update(_layout_fields(layout, args))
        args.rank = live.rank if rank is None else rank
        args.world_size = layout.world
        if args.step_batch_size_schedule is None:  # Megatron takes only one of the two
            args.global_batch_size = live.global_batch_size
        if args.full_validation or args.eval_iters != 0:
            args.eval_global_batch_size = getattr(live, "eval_global_batch_size", None)
        said = io.StringIO()
        validate = getattr(host.validate_args, "__wrapped__", host.validate_args)
        try:
            with contextlib.redirect_stdout(said):
                validate(args, dict(self.defaults))
        except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
            reason = str(error) or said.getvalue().strip() or type(error).__name__
            raise LayoutError(f"Megatron refuses layout {layout}: {reason}") from error
        # Left out, it is the launch's mbs * dp: sizes of datasets and of schedules come from it.
        args.global_batch_size = live.global_batch_size
        if args.full_validation:
            _check_full_validation(layout, args)
        return args


_UNEVEN_PIPELINE = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Flags that place layers on stages, and their values when off. They mean nothing where there is
one stage, and give way to a pipeline layout string."""


def _layout_fields(layout: ParallelLayout, parsed: Namespace) -> dict[str, Any]:
    uneven = {} if layout.pp > 1 and layout.pipeline is None else _UNEVEN_PIPELINE
    fields = uneven | {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp if parsed.num_experts else None,
        "num_virtual_stages_per_pipeline_rank": None if layout.pipeline else layout.vpp,
        "num_layers_per_virtual_pipeline_stage": None,
        "pipeline_model_parallel_layout": layout.pipeline,
        "sequence_parallel": layout.sp,
        "use_distributed_optimizer": layout.dist_opt,
        "overlap_param_gather": parsed.overlap_param_gather and layout.dist_opt,
        "num_distributed_optimizer_instances": layout.instances,
        "micro_batch_size": layout.mbs,
        "use_tp_pp_dp_mapping": RANK_ORDERS[layout.order],
    }
    pattern = parsed.hybrid_layer_pattern or parsed.hybrid_override_pattern
    if pattern is not None:
        fields |= {
            "num_virtual_stages_per_pipeline_rank": None,  # Megatron counts the pattern's stages
            "pipeline_model_parallel_layout": None,
            "hybrid_layer_pattern": pattern_of(
                layout,
                pattern,
                parsed.pipeline_model_parallel_size,
                host_cuts=parsed.decoder_first_pipeline_num_layers is not None
                or parsed.decoder_last_pipeline_num_layers is not None,
            ),
            "hybrid_override_pattern": None,  # the older name of the same flag
        }
    return fields


def _check_full_validation(layout: ParallelLayout, args: Namespace) -> None:
    """Refuse layouts in which Megatron cannot go through whole validation sets."""
    if layout.pp * (layout.vpp or 1) > 2:
        raise LayoutError(
            f"--full-validation asks each pipeline stage how many samples it has, but in layout "
            f"{layout} those between the first and the last read none"
        )
    if args.eval_micro_batch_size != 1 and layout.tp * layout.pp > 1:
        raise LayoutError(
            f"--full-validation reads single samples, but in layout {layout} ranks expect "
            f"micro-batches of {args.eval_micro_batch_size}; add --eval-micro-batch-size 1"
        )


def layout_of(args: Namespace, launch: LaunchArguments) -> ParallelLayout:
    """The layout that validated arguments describe.

    A Hybrid model's own pattern is what no ``pipeline`` means.
    """
    return ParallelLayout(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        dp=args.data_parallel_size,
        sp=args.sequence_parallel,
        dist_opt=args.use_distributed_optimizer,
        instances=args.num_distributed_optimizer_instances,
        mbs=args.micro_batch_size,
        order=rank_order(args),
        pipeline=launch.parsed.pipeline_model_parallel_layout,
    )


def model_shape(args: Namespace, launch: LaunchArguments) -> ModelShape:
    """The sizes a layout must divide."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return ModelShape(
        num_layers=args.num_layers,
        num_heads=args.num_attention_heads,
        num_query_groups=groups,
        num_experts=args.num_experts,
        padded_vocab_size=getattr(args, "padded_vocab_size", None),
        global_batch_size=constant_batch_size(args),
        ffn_hidden_size=args.ffn_hidden_size,
        hidden_size=args.hidden_size,
        moe_ffn_hidden_size=getattr(args, "moe_ffn_hidden_size", None),
        seq_length=args.seq_length,
        uneven_pipeline=args.hybrid_layer_pattern is not None  # which has rules of its own
        or any(getattr(launch.parsed, name) != off for name, off in _UNEVEN_PIPELINE.items()),
    )


def differences(live: Namespace, baseline: Namespace) -> dict[str, Any]:
    """What the run has set in ``live`` since its own validation, by name.

    ``baseline`` is a shallow copy of the live arguments as validated: whatever differs from it
    (iteration, consumed samples, padded vocabulary, …) is the run's, everything else the layout's.
    """
    found = {}
    for name, value in vars(live).items():
        before = getattr(baseline, name, _MISSING)
        if before is value:
            continue
        if before is _MISSING or type(before) is not type(value) or before != value:
            found[name] = value
    return found


def carry_over(target: Namespace, live: Namespace, baseline: Namespace) -> None:
    """Give ``target`` what the run has set in ``live``: their :func:`differences`."""
    vars(target).update(differences(live, baseline))


_MISSING = object()


def replace_in_place(args: Namespace, new: Namespace) -> None:
    """Make ``args``, which Megatron holds everywhere, equal to ``new``."""
    vars(args).clear()
    vars(args).update(vars(new))
