"""A job's model and layout read from its Megatron flags, without Megatron.

Only flags that shape parameters, layout or batch are looked at; all others are passed over. What
this package cannot make rosters of is refused by name. Defaults are Megatron's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynatrain_megatron.errors import ConfigError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.shapes import Model
from dynatrain_megatron.shapes.flags import FlagParser, flag_of, rank_order, sizes

_COUNTS = {
    "max_position_embeddings": None,
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}
_SWITCHES = ("disable_bias_linear", "qk_layernorm")
_TEXTS = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}
_REFUSED = (
    "--hybrid-layer-pattern", "--hybrid-override-pattern", "--mtp-num-layers", "--add-qkv-bias",
    "--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split", "--use-megatron-fsdp", "--use-torch-fsdp2",
    "--yaml-cfg",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobFlags:
    """What a job's flags say: model, layout, and the batch that layouts must divide."""

    model: Model
    layout: ParallelLayout
    global_batch_size: int | None
    seq_length: int | None


def read_flags(flags: Sequence[str], world: int) -> JobFlags:
    """Read the flags of a job of ``world`` ranks.

    Raises ConfigError for what is missing, wrong or refused, LayoutError for a layout that
    contradicts itself.
    """
    args = _parse(flags)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp = args.context_parallel_size
    if world % (tp * pp * cp):
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} * --pipeline-model-parallel-size {pp} * "
            f"--context-parallel-size {cp} must divide --world {world}"
        )
    layout = ParallelLayout(
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=_virtual_stages(args),
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        dp=world // (tp * pp * cp),
        sp=args.sequence_parallel and tp > 1,
        dist_opt=args.use_distributed_optimizer,
        instances=args.num_distributed_optimizer_instances,
        mbs=args.micro_batch_size,
        order=rank_order(args),
    )
    return JobFlags(_model(args), layout, args.global_batch_size, args.seq_length)


def _parse(flags: Sequence[str]) -> Namespace:
    parser = FlagParser(_COUNTS, _SWITCHES, _TEXTS)
    for flag in _REFUSED:
        if any(given == flag or given.startswith(f"{flag}=") for given in flags):
            raise ConfigError(
                f"{flag}: what it does to a model's parameters is not known without a job; leave "
                f"it out for an estimate, or plan with a preset (model=…)"
            )
    args, _ = parser.parse_known_args(list(flags))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(args, name) is None:
            raise ConfigError(f"Megatron flags: {flag_of(name)} is missing, which shapes the model")
    return args


def _virtual_stages(args: Namespace) -> int | None:
    per_stage = args.num_layers_per_virtual_pipeline_stage
    if args.pipeline_model_parallel_size == 1:
        return None
    if per_stage is None:
        chunks = args.num_virtual_stages_per_pipeline_rank
        return None if chunks is None else int(chunks)
    chunks = args.pipeline_model_parallel_size * per_stage
    if args.num_layers % chunks:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} * --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} must divide --num-layers {args.num_layers}"
        )
    return int(args.num_layers // chunks)


def model_of_job(args: Namespace) -> Model:
    """The model of a running job's own arguments, as validated at launch.

    Raises ConfigError where they say something of it that is not known without the job.
    """
    for flag in _REFUSED:
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value:
            raise ConfigError(f"{flag} {value}: what it does to the parameters is not known")
    read = Namespace(**vars(args))
    read.disable_bias_linear = not args.add_bias_linear
    return _model(read)


def _model(args: Namespace) -> Model:
    latent = args.multi_latent_attention
    if latent and (args.q_lora_rank is None or not args.qk_layernorm):
        raise ConfigError(
            "--multi-latent-attention is known with --q-lora-rank and --qk-layernorm only; add "
            "them for an estimate"
        )
    learned = args.position_embedding_type == "learned_absolute"
    if learned and args.max_position_embeddings is None:
        raise ConfigError("Megatron flags: --max-position-embeddings is missing")
    return replace(
        sizes(args),
        biases=not args.disable_bias_linear,
        norm_biases=args.normalization == "LayerNorm",
        positions=args.max_position_embeddings if learned else 0,
        qk_norm=args.qk_layernorm and not latent,
    )
