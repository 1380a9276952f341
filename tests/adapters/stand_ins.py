"""Modules whose kernels exist for GPUs only, reduced to their parameters and real sharding.

Each takes the place of a whole model: its parameters lie and are cut as Megatron's own module has
them, and where the wheel has that module's ``sharded_state_dict`` without its kernels, it is the
one that runs. Nothing here can be called forward. Imports Megatron when a provider is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

HIDDEN = 16
HEADS, HEAD_DIM, GROUPS, STATE = 4, 6, 2, 5
"""Of a Mamba layer: four heads of six channels, two groups of a state of five."""

NUM_EXPERTS, EXPERT_WIDTH = 4, 10


def mamba(**build: Any) -> Any:
    """A Mamba layer: ``in_proj`` is z, x, B, C and dt in one matrix, ``conv1d`` x, B and C."""
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.module import MegatronModule

    group = build["pg_collection"].tp
    tp = group.size()
    inner, state = HEADS * HEAD_DIM, GROUPS * STATE

    class Mixer(MambaMixer):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            MegatronModule.__init__(self, config)
            self.tp_group = group
            self.d_inner_local_tp, self.d_state = inner // tp, STATE
            self.ngroups_local_tp, self.nheads_local_tp = GROUPS // tp, HEADS // tp
            common = {"config": config, "init_method": nn.init.zeros_, "bias": False}
            self.in_proj = ColumnParallelLinear(
                HIDDEN,
                2 * inner + 2 * state + HEADS,
                gather_output=False,
                tp_group=group,
                **common,
            )
            self.out_proj = RowParallelLinear(
                inner,
                HIDDEN,
                input_is_parallel=True,
                skip_bias_add=False,
                tp_group=group,
                **common,
            )
            channels = (inner + 2 * state) // tp
            self.conv1d_weight = _cut(channels, 1, 4)
            self.conv1d_bias = _cut(channels)
            self.dt_bias, self.D = _cut(HEADS // tp), _cut(HEADS // tp)
            self.A_log = _cut(HEADS // tp, dtype=torch.float32)

    return _stage(mixer=Mixer, norm=lambda config: nn.LayerNorm(HIDDEN))


def mamba_segments(name: str, size: int) -> Sequence[int]:
    """The parts of ``in_proj`` and ``conv1d`` that are cut each by itself."""
    inner, state = HEADS * HEAD_DIM, GROUPS * STATE
    parts: Sequence[int] = (1,)
    if "in_proj" in name:
        parts = (inner, inner, state, state, HEADS)
    elif "conv1d" in name:
        parts = (inner, state, state)
    return [part * size // sum(parts) for part in parts]


def grouped_experts(**build: Any) -> Any:
    """Experts in one module, as with Transformer Engine's grouped matrix products.

    The outer ``sharded_state_dict`` (SwiGLU, experts) is Megatron's, that of a linear layer ours,
    since the wheel has it together with Transformer Engine only.
    """
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    groups = build["pg_collection"]
    local, etp = NUM_EXPERTS // groups.ep.size(), groups.expt_tp.size()

    class Linear(nn.Module):
        def __init__(self, rows: int, columns: int, cut_dim: int) -> None:
            super().__init__()
            self.cut_dim = cut_dim
            for i in range(local):
                weight = _cut(rows, columns, dim=cut_dim)
                weight.allreduce = groups.ep.size() == 1  # type: ignore[attr-defined]
                self.register_parameter(f"weight{i}", weight)

        def sharded_state_dict(
            self, prefix: str, sharded_offsets: Sequence[Any], metadata: dict[str, Any]
        ) -> dict[str, Any]:
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            found = {}
            for i in range(local):
                expert = groups.ep.rank() * local + i
                (entry,) = make_sharded_tensors_for_checkpoint(
                    {"weight": getattr(self, f"weight{i}")},
                    prefix,
                    {"weight": self.cut_dim},
                    (*sharded_offsets, (len(sharded_offsets), expert, NUM_EXPERTS)),
                    tp_group=groups.expt_tp,
                    dp_cp_group=metadata["dp_cp_group"],
                ).values()
                found[f"{prefix}weight{i}"] = entry
            return found

    class Experts(TEGroupedMLP):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            MegatronModule.__init__(self, config)
            self.num_local_experts = local
            self.ep_group, self.tp_group = groups.ep, groups.expt_tp
            self.linear_fc1 = Linear(2 * EXPERT_WIDTH // etp, HIDDEN, 0)
            self.linear_fc2 = Linear(HIDDEN, EXPERT_WIDTH // etp, 1)

    return _stage(experts=Experts, norm=lambda config: nn.LayerNorm(HIDDEN))


def frozen(**_: Any) -> Any:
    """A frozen and a trained parameter, a buffer that is saved and one that is not."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
            self.trained = nn.Parameter(torch.zeros(5, 4))
            self.register_buffer("expert_bias", torch.zeros(3))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    return _stage(layer=lambda config: Layer())


def with_extra_state(extra_state: Any) -> Callable[..., Any]:
    """A layer that keeps an object beside its tensors, as Transformer Engine's do."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))

        def get_extra_state(self) -> Any:
            return extra_state

        def set_extra_state(self, state: Any) -> None:
            pass

    return lambda **_: _stage(layer=lambda config: Layer())


def with_entries(
    entries: Callable[[Any], dict[str, torch.Tensor]], *, trained: bool = True
) -> Callable[..., Any]:
    """A layer with a weight, [4, 6], and a saved buffer, [3], that describes itself by ``entries``.

    They get the layer, with ``weight`` and ``count``.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=trained)
            self.register_buffer("count", torch.zeros(3))

        def sharded_state_dict(
            self, prefix: str, sharded_offsets: Sequence[Any], metadata: dict[str, Any]
        ) -> dict[str, Any]:
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            return make_sharded_tensors_for_checkpoint(
                entries(self), prefix, {}, sharded_offsets, **_groups(metadata)
            )

    # The other layer is there for the optimizer, which cannot be empty.
    return lambda **_: _stage(layer=lambda config: Layer(), other=lambda config: nn.Linear(2, 2))


def half_described(**_: Any) -> Any:
    """A layer of one weight, [4, 6], of which a factory describes the first two rows."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6))

        def sharded_state_dict(self, prefix: str, *_: Any, **__: Any) -> dict[str, Any]:
            from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

            def build(key: str, weight: torch.Tensor, replica_id: Any, flattened: Any) -> Any:
                return [ShardedTensor.from_rank_offsets(key, weight[:2], replica_id=replica_id)]

            key = f"{prefix}weight"
            return {key: ShardedTensorFactory(key, self.weight, build, merge_fn=None)}

    return _stage(layer=lambda config: Layer())


def _groups(metadata: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "dp_cp_group": metadata["dp_cp_group"],
    }


def _stage(**parts: Callable[[Any], nn.Module]) -> Any:
    """A model of the given parts, each made from Megatron's config."""
    from megatron.core.transformer.module import MegatronModule
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(get_args())
    stage = MegatronModule(config)
    for name, make in parts.items():
        stage.add_module(name, make(config))
    return stage


def _cut(*shape: int, dim: int = 0, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter of a rank's own shape, cut over tensor parallelism in ``dim``."""
    param = nn.Parameter(torch.zeros(*shape, dtype=dtype))
    param.tensor_model_parallel, param.partition_dim = True, dim  # type: ignore[attr-defined]
    param.partition_stride = 1  # type: ignore[attr-defined]
    return param
