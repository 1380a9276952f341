"""What a switch does not support yet: one table, asked before anything is changed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A host feature under which a switch is refused; ``seen`` says whether a run uses it."""

    flag: str
    seen: Callable[[Namespace], Any]
    why: str


def _set(name: str, off: Any = None) -> Callable[[Namespace], Any]:
    def seen(args: Namespace) -> Any:
        value = getattr(args, name, off)
        return None if value in (off, None, False) else value

    return seen


_OTHER_STATE = "its state lies in places this version does not read"
_RESTARTS = "it keeps state in Megatron's training loop, which a switch re-enters"

UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported("--yaml-cfg", _set("yaml_cfg"), "arguments are rebuilt from command-line flags"),
    Unsupported("--use-megatron-fsdp", _set("use_megatron_fsdp"), _OTHER_STATE),
    Unsupported("--use-torch-fsdp2", _set("use_torch_fsdp2"), _OTHER_STATE),
    Unsupported("--optimizer", _set("optimizer", "adam"), _OTHER_STATE),
    Unsupported(
        "--use-precision-aware-optimizer", _set("use_precision_aware_optimizer"), _OTHER_STATE
    ),
    Unsupported("--optimizer-cpu-offload", _set("optimizer_cpu_offload"), _OTHER_STATE),
    Unsupported(
        "--use-layer-wise-distributed-optimizer",
        _set("use_layer_wise_distributed_optimizer"),
        _OTHER_STATE,
    ),
    Unsupported("--fp8-format", _set("fp8"), _OTHER_STATE),
    Unsupported("--fp4-format", _set("fp4"), _OTHER_STATE),
    Unsupported(
        "--tensor-parallel-num-weight-shards",
        lambda args: getattr(args, "gtp_weight_remat_size", 1) > 1 or None,
        _OTHER_STATE,
    ),
    Unsupported("--moe-use-upcycling", _set("moe_use_upcycling"), "it builds a second model"),
    Unsupported("--perform-rl-step", _set("perform_rl_step"), _RESTARTS),
    Unsupported("--inprocess-restart", _set("inprocess_restart"), _RESTARTS),
    Unsupported("--cuda-graph-impl", _set("cuda_graph_impl", "none"), "graphs hold old memory"),
    Unsupported("--optimizer-cuda-graph", _set("optimizer_cuda_graph"), "graphs hold old memory"),
    Unsupported("--tp-comm-overlap", _set("tp_comm_overlap"), "user buffers hold old groups"),
    Unsupported("--use-nccl-ub", _set("nccl_ub"), "user buffers hold old groups"),
    Unsupported("--profile", _set("profile"), _RESTARTS),
    Unsupported("--log-straggler", _set("log_straggler"), _RESTARTS),
    Unsupported("--log-energy", _set("log_energy"), _RESTARTS),
    Unsupported("--moe-routing-trace-path", _set("moe_routing_trace_path"), _RESTARTS),
    Unsupported(
        "--run-workload-inspector-server", _set("run_workload_inspector_server"), _RESTARTS
    ),
    Unsupported("--fault-injector-ranks", _set("fault_injector_ranks"), _RESTARTS),
    Unsupported("--fault-injector-num-ranks", _set("fault_injector_num_ranks"), _RESTARTS),
    Unsupported(
        "--non-persistent-ckpt-type",
        lambda args: (
            "local" if getattr(args, "non_persistent_ckpt_type", None) == "local" else None
        ),
        "its manager is bound to the launch's groups",
    ),
    Unsupported(
        "--dataloader-type",
        lambda args: "external" if args.dataloader_type == "external" else None,
        "this version cannot move another program's loader to a new position",
    ),
)


def check_supported(args: Namespace, source: ParallelLayout, target: ParallelLayout) -> None:
    """Raise :class:`SwitchRefused` naming the first feature in use that a switch cannot carry."""
    for row in UNSUPPORTED:
        value = row.seen(args)
        if value is not None:
            shown = "" if value is True else f" {value}"
            raise SwitchRefused(
                f"{row.flag}{shown} is not supported in a switch: {row.why}",
                f"run without {row.flag}, or stay in layout {source}",
            )
    if target.cp > 1 and args.transformer_impl == "local":
        raise SwitchRefused(
            f"cp={target.cp} needs Transformer Engine's attention, and --transformer-impl is local",
            "run with --transformer-impl transformer_engine on GPUs, or ask for cp=1",
        )
    if args.dataloader_type == "cyclic" and source.dp * source.mbs != target.dp * target.mbs:
        raise SwitchRefused(
            "--dataloader-type cyclic deals samples to data-parallel ranks in buckets, so another "
            f"dp or micro-batch size (dp{source.dp} mbs{source.mbs} -> dp{target.dp} "
            f"mbs{target.mbs}) would change which samples a step sees",
            "use --dataloader-type single",
        )
