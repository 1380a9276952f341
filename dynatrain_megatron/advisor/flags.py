"""A job's workload from Megatron's flags, or from its arguments while it runs.

:func:`read_flags` reads the few flags that memory and time depend on, with Megatron's names and
defaults but without Megatron; all others are passed over. :func:`workload_of` takes what it returns
or a running job's own arguments. Biases, norms' biases and learned positions, a few parameters in
ten thousand, are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from dynatrain_megatron.advisor.workload import ElementBytes, Recompute, Workload
from dynatrain_megatron.errors import ConfigError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes.flags import FlagParser, flag_of, rank_order, sizes

_FLOAT32, _HALF = 4, 2

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")
_COUNTS = dict.fromkeys(
    ("mtp_num_layers", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
)
_SWITCHES = (
    *("bf16", "fp16", "grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "recompute_activations",
)
_TEXTS = {
    "optimizer": "adam",
    "recompute_granularity": None,
    "transformer_impl": "transformer_engine",
    "attention_backend": "auto",
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
}
_SGD_MOMENTUM = 0.9


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags that count, under Megatron's names; raises ConfigError for values of no use."""
    parser = FlagParser(_COUNTS, _SWITCHES, _TEXTS)
    parser.add_argument(flag_of("sgd_momentum"), type=float, default=_SGD_MOMENTUM)
    args, _ = parser.parse_known_args(list(argv))
    missing = [flag_of(name) for name in _NEEDED if getattr(args, name) is None]
    if missing:
        raise ConfigError(
            f"Megatron flags: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; "
            f"memory cannot be estimated without. The flags of the job follow --"
        )
    if args.recompute_activations and args.recompute_granularity is None:
        args.recompute_granularity = "selective"
    return args


def layout_options(args: Any) -> ParallelLayout:
    """The options of the flags' layout that its degrees do not change, on as few ranks as have tp.

    For :func:`advisor.feasible` as ``base``.
    """
    tp, instances = args.tensor_model_parallel_size, args.num_distributed_optimizer_instances
    return ParallelLayout(
        tp=tp,
        dp=instances,
        sp=args.sequence_parallel and tp > 1,
        dist_opt=args.use_distributed_optimizer,
        instances=instances,
        mbs=args.micro_batch_size,
        order=rank_order(args),
    )


def workload_of(args: Any, launched: Any = None) -> Workload:
    """The workload of arguments as Megatron names them, of :func:`read_flags` or of a job.

    A job's own may have lost the flags that place layers on stages, which mean nothing in some
    layouts: they are then those of ``launched``, the flags as parsed at launch. Raises ConfigError
    for sizes that do not divide each other, and for models whose memory is not estimated: Hybrid
    ones, multi-token prediction, dense layers between expert layers, latent attention without a
    query rank, optimizers but Adam and SGD.
    """
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_num_layers"):
        value = getattr(args, name, None)
        if value:
            raise ConfigError(
                f"{flag_of(name)} {value}: the memory of such a model is not estimated; leave it "
                f"out for an estimate without it, or name layouts yourself"
            )
    return Workload(
        model=sizes(args),
        seq_length=args.seq_length,
        global_batch_size=args.global_batch_size,
        recompute=Recompute(_granularity(args)),
        keeps_scores=_unfused(args),
        element_bytes=_element_bytes(args),
        uneven_pipeline=_uneven(args if launched is None else launched),
    )


def _granularity(args: Any) -> str:
    text = args.recompute_granularity or Recompute.none
    if text not in tuple(Recompute):
        raise ConfigError(f"--recompute-granularity {text!r:.100} must be selective or full")
    return str(text)


def _unfused(args: Any) -> bool:
    backend = getattr(args, "attention_backend", "auto")
    unfused = str(getattr(backend, "name", backend)) in ("local", "unfused")
    return unfused or getattr(args, "transformer_impl", None) == "local"


def _element_bytes(args: Any) -> ElementBytes:
    optimizers = {"adam": 2 * _FLOAT32, "sgd": _FLOAT32 if args.sgd_momentum else 0}
    if args.optimizer not in optimizers:
        raise ConfigError(
            f"--optimizer {args.optimizer!r:.100}: its memory is not estimated; adam and sgd are"
        )
    moments = optimizers[args.optimizer]
    if not (args.bf16 or args.fp16):  # the optimizer updates the parameters themselves
        return ElementBytes(param=_FLOAT32, grad=_FLOAT32, optimizer=moments)
    accumulates = args.accumulate_allreduce_grads_in_fp32 or args.bf16
    half = not accumulates or (args.bf16 and args.grad_reduce_in_bf16)
    return ElementBytes(param=_HALF, grad=_HALF if half else _FLOAT32, optimizer=_FLOAT32 + moments)


def _uneven(args: Any) -> bool:
    """Whether the launch's flags place layers; a string of its own is of its own pp and vpp."""
    return any(
        getattr(args, name, None)
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    )
