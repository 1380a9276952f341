"""What becomes of the options of Megatron that a switch could break: one table.

An option is here if it holds state across iterations outside the model and its optimizer, or if its
state lies where a switch cannot read it. Each is carried through a switch, restarted by it, or a
reason to refuse it; the refused ones are asked for before anything is changed.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.layout import ParallelLayout


class Fate(StrEnum):
    """What a switch does to an option's state."""

    carried = "carried"
    restarted = "restarted"
    refused = "refused"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its flag, its fate and how or why.

    Of a refused option ``seen`` tells what a run's arguments have of it, None if nothing, and
    ``instead`` what to do, if that is not to leave the flag out.
    """

    what: str
    flag: str
    fate: Fate
    how: str
    seen: Callable[[Namespace], Any] | None = None
    instead: str = ""


def _set(name: str, off: Any = None) -> Callable[[Namespace], Any]:
    def seen(args: Namespace) -> Any:
        value = getattr(args, name, off)
        return None if value in (off, None, False) else value

    return seen


def _flex_buffers(args: Namespace) -> Any:
    """What the flexible dispatcher keeps its buffers with, if it is not the default that idles."""
    backend = getattr(args, "moe_flex_dispatcher_backend", None)
    in_use = getattr(args, "moe_token_dispatcher_type", None) == "flex"
    return backend if in_use or backend in ("hybridep", "ncclep") else None


def _is(name: str, wrong: str) -> Callable[[Namespace], Any]:
    return lambda args: wrong if getattr(args, name, None) == wrong else None


def _other_optimizer(args: Namespace) -> Any:
    return None if args.optimizer in ("adam", "sgd") else args.optimizer


def _one_logger(args: Namespace) -> Any:
    # On by default, but the package is NVIDIA's own, and without it Megatron goes on without.
    found = importlib.util.find_spec("one_logger") is not None
    return True if args.enable_one_logger and found else None


def _weight_shards(args: Namespace) -> Any:
    shards = getattr(args, "tensor_parallel_num_weight_shards", None) or 0
    return shards if shards > args.tensor_model_parallel_size else None


def _expert_weight_shards(args: Namespace) -> Any:
    shards = getattr(args, "expert_tensor_parallel_num_weight_shards", None) or 0
    cut = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return shards if shards > cut else None


def _ramp(args: Namespace) -> Any:
    ramp = args.rampup_batch_size
    return None if ramp is None else " ".join(map(str, ramp))


def _carried(what: str, flag: str, how: str) -> Option:
    return Option(what, flag, Fate.carried, how)


def _restarted(what: str, flag: str, how: str) -> Option:
    return Option(what, flag, Fate.restarted, how)


def _refused(
    what: str, flag: str, why: str, seen: Callable[[Namespace], Any] | None = None
) -> Option:
    return Option(what, flag, Fate.refused, why, seen or _set(flag[2:].replace("-", "_")))


_OTHER_STATE = "its state lies in places this version does not read"
_GRAPHS = "graphs hold the old layout's memory"
_SHARED_PARAMETER = "its checkpoint entries cut one parameter in a way this version does not read"
_OLD_GROUPS = "its buffers hold the old layout's process groups"
_DISTILLS = "its loss keeps ranks and groups of the launch, and the position in its files"
_IN_LOOP = "Megatron sets it up when it enters its training loop, so once more after a switch"

OPTIONS: tuple[Option, ...] = (
    # First, for then Megatron's arguments have none of the names that other rows look at.
    _refused("YAML arguments", "--yaml-cfg", "arguments are made again from command-line flags"),
    # What is logged.
    _carried("log totals", "--log-interval", "loss sums and counts go into the next train() call"),
    _carried("timers", "--timing-log-level", "stopped for the time of the switch, not reset"),
    _carried("throughput", "--log-throughput", "from the same timer and the count of operations"),
    _carried("TensorBoard", "--tensorboard-dir", "same writer, on the last rank of the world"),
    _carried("Weights & Biases", "--wandb-project", "same run, on the last rank of the world"),
    _carried("progress log", "--log-progress", "count of operations and start time go on"),
    _restarted(
        "MoE metrics", "--num-experts", "empty after each step; the groups they hold are dropped"
    ),
    _carried(
        "MTP metrics",
        "--mtp-num-layers",
        "acceptance counts stay; the groups they hold are dropped",
    ),
    _restarted(
        "memory report",
        "--log-memory-interval",
        "Megatron's report of the first steps is printed once more, for the new layout",
    ),
    # Evaluation, saving, ends.
    _carried("evaluation", "--eval-interval", "the consumed validation samples are the position"),
    _carried("skipped iterations", "--iterations-to-skip", "counted in the arguments"),
    _restarted("checkpoints", "--save-interval", "cached save plans are dropped"),
    _carried(
        "asynchronous saves",
        "--async-save",
        "finished before the switch begins (Megatron 0.19 saves so with a persistent worker only)",
    ),
    _carried("exit at an iteration", "--exit-interval", "the iteration goes on"),
    _carried("exit after a time", "--exit-duration-in-mins", "the clock of the process goes on"),
    _carried("exit on a signal", "--exit-signal-handler", "the handler stays; an exit comes first"),
    _refused("autoresume", "--adlr-autoresume", "its package could not be had for a test"),
    # What watches the run.
    _carried(
        "rerun state machine",
        "--rerun-mode",
        "its counters stay; a rank new to the last stage starts its own statistics of losses",
    ),
    _restarted(
        "weight hashes",
        "--check-weight-hash-across-dp-replicas-interval",
        "compared once more, right after the switch",
    ),
    _restarted("manual garbage collection", "--manual-gc", "collects once more after the switch"),
    _restarted(
        "time limit of groups",
        "--distributed-timeout-seconds-after-init",
        "set on the new groups after their first step",
    ),
    _restarted("loader workers", "--num-workers", "the old layout's are ended, new ones started"),
    # Which samples a step has.
    _carried(
        "order of samples",
        "--dataloader-type",
        "`single` reads in order; `cyclic` goes on in the order of the launch layout, cut for the "
        "layout in force. A checkpoint does not hold that order: Megatron goes on in the order of "
        "the layout it is loaded in, so load it in the launch layout for the same samples",
    ),
    _carried(
        "batch sizes that grow",
        "--step-batch-size-schedule",
        "the consumed samples are the position; mbs*dp must divide all batch sizes to come",
    ),
    _carried(
        "batch sizes cut to fit",
        "--decrease-batch-size-if-needed",
        "a layout that would cut to another size is refused",
    ),
    _refused(
        "batch size ramp",
        "--rampup-batch-size",
        "its place is taken by --step-batch-size-schedule; Megatron ignores it from 0.19 on",
        _ramp,
    ),
    _carried(
        "whole validation sets",
        "--full-validation",
        "how often Megatron goes through a set depends on dp, which must divide the set's length "
        "for the same loss",
    ),
    _refused("profiler", "--profile", _IN_LOOP),
    _refused("straggler detector", "--log-straggler", _IN_LOOP),
    _refused("energy monitor", "--log-energy", _IN_LOOP),
    Option("one-logger", "one-logger", Fate.refused, _IN_LOOP, _one_logger, "add --no-one-logger"),
    _refused("fault tolerance package", "--enable-ft-package", "a switch may exceed its limits"),
    _refused("fault injector", "--fault-injector-ranks", _IN_LOOP),
    _refused("fault injector", "--fault-injector-num-ranks", _IN_LOOP),
    _refused("router tracer", "--moe-routing-trace-path", _IN_LOOP),
    _refused("workload inspector", "--run-workload-inspector-server", _IN_LOOP),
    _refused("in-process restart", "--inprocess-restart", "it restarts ranks in the old layout"),
    _refused("RL step", "--perform-rl-step", "it has a second model and loads checkpoints"),
    # What holds memory or groups.
    _refused("CUDA graphs", "--cuda-graph-impl", _GRAPHS, _set("cuda_graph_impl", "none")),
    _refused("CUDA graph of the optimizer", "--optimizer-cuda-graph", _GRAPHS),
    _refused("userbuffers", "--tp-comm-overlap", _OLD_GROUPS),
    _refused("NCCL userbuffers", "--use-nccl-ub", _OLD_GROUPS, _set("nccl_ub")),
    _refused("paged stash", "--moe-expert-rank-capacity-factor", "it is bound to the old model"),
    _refused(
        "local checkpoints",
        "--non-persistent-ckpt-type",
        "their manager is bound to the launch's groups",
        _is("non_persistent_ckpt_type", "local"),
    ),
    _refused(
        "persistent checkpoint worker",
        "--use-persistent-ckpt-worker",
        "it starts on GPUs only, where no switch has run with it yet",
    ),
    _refused(
        "experts' DeepEP, HybridEP or NCCL EP buffers",
        "--moe-flex-dispatcher-backend",
        _OLD_GROUPS,
        _flex_buffers,
    ),
    _refused(
        "activations offloaded one by one",
        "--fine-grained-activation-offloading",
        "what it learns in its first step is of the old layout's layers",
    ),
    _refused("distillation", "--logits-load-dir", _DISTILLS),
    _refused("saved logits", "--logits-save-dir", _DISTILLS),
    _refused("indexer loss", "--dsa-indexer-loss-coeff", "its metrics hold the old groups"),
    # What keeps its state elsewhere.
    _refused("FSDP", "--use-megatron-fsdp", _OTHER_STATE),
    _refused("FSDP", "--use-torch-fsdp2", _OTHER_STATE),
    _refused("optimizers but Adam and SGD", "--optimizer", _OTHER_STATE, _other_optimizer),
    _refused("precision-aware optimizer", "--use-precision-aware-optimizer", _OTHER_STATE),
    _refused("optimizer on the CPU", "--optimizer-cpu-offload", _OTHER_STATE),
    _refused("FP8", "--fp8-format", _OTHER_STATE, _set("fp8")),
    _refused("FP4", "--fp4-format", _OTHER_STATE, _set("fp4")),
    _refused("weight shards", "--tensor-parallel-num-weight-shards", _OTHER_STATE, _weight_shards),
    _refused(
        "expert weight shards",
        "--expert-tensor-parallel-num-weight-shards",
        _OTHER_STATE,
        _expert_weight_shards,
    ),
    _refused("experts in one parameter", "--moe-single-grouped-weight", _SHARED_PARAMETER),
    _refused("expert biases in one parameter", "--moe-single-grouped-bias", _SHARED_PARAMETER),
    _refused("fused MLA down-projection", "--mla-down-proj-fusion", _SHARED_PARAMETER),
    _refused("upcycling", "--moe-use-upcycling", "it builds a second model"),
    _refused(
        "external loader",
        "--dataloader-type",
        "Megatron gives another program's loader no position to go on from",
        _is("dataloader_type", "external"),
    ),
)


def check_supported(args: Namespace, source: ParallelLayout, target: ParallelLayout) -> None:
    """Raise :class:`SwitchRefused` naming the first feature in use that a switch cannot carry."""
    for row in OPTIONS:
        value = None if row.seen is None else row.seen(args)
        if value is not None:
            shown = "" if value is True else f" {value}"
            raise SwitchRefused(
                f"{row.flag}{shown} is not supported in a switch: {row.how}",
                f"{row.instead or f'run without {row.flag}'}, or stay in layout {source}",
            )
    if args.optimizer == "sgd" and target.dist_opt:
        raise SwitchRefused(
            "--optimizer sgd has no distributed optimizer in Megatron, which layout "
            f"{target} asks for",
            f"ask for a layout with noopt (dist_opt: false), or stay in layout {source}",
        )
    tied = not args.untie_embeddings_and_output_weights
    if args.mtp_num_layers and tied and max(source.pp, target.pp) > 1:
        raise SwitchRefused(
            f"--mtp-num-layers {args.mtp_num_layers} with tied embeddings and more than one "
            f"pipeline stage (pp={source.pp} -> pp={target.pp}) cannot be described: Megatron's "
            "checkpoints fail there too",
            "run with --untie-embeddings-and-output-weights, or keep pp at 1",
        )
    size = getattr(args, "moe_mlp_glu_interleave_size", None)
    if size is not None and source.expert_tp != target.expert_tp:
        raise SwitchRefused(
            f"--moe-mlp-glu-interleave-size {size} mixes the rows of gated projections, which "
            "Megatron describes as halves, so that they cannot be cut anew: "
            f"etp={source.expert_tp} -> etp={target.expert_tp}",
            f"keep etp at {source.expert_tp}, or run without --moe-mlp-glu-interleave-size",
        )
    if target.cp > 1 and args.transformer_impl == "local":
        _check_local_attention(args, source, target)


def _check_local_attention(args: Namespace, source: ParallelLayout, target: ParallelLayout) -> None:
    """What our attention in :mod:`..platform` cannot do with a sequence in pieces."""
    ways = [way for way in args.cp_comm_type if way not in ("p2p", "allgather", "all_gather")]
    for flag, value in (
        ("--window-size", args.window_size),
        ("--cp-comm-type", " ".join(ways) or None),
    ):
        if value is not None:
            raise SwitchRefused(
                f"cp={target.cp} with {flag} {value} needs Transformer Engine's attention, and "
                "--transformer-impl is local",
                f"run without {flag}, on GPUs with --transformer-impl transformer_engine, or stay "
                f"in layout {source}",
            )
