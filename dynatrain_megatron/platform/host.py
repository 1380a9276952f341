"""Faults of Megatron that show on any machine without Transformer Engine or Apex, repaired.

These are not about the CPU: a GPU machine with only the released wheels has them too. Each row says
what goes wrong; a row whose fault does not apply (the better libraries are there) leaves the name
as it is.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from dynatrain_megatron.platform.replace import Replacement
from dynatrain_megatron.platform.versions import Releases


def _compile_helpers(original: Callable[[], None]) -> Callable[[], None]:
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return original

    def compile_helpers() -> None:
        """Do nothing: the compiled helpers are installed."""

    return compile_helpers


def _torch_norm(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        # Megatron's own norms carry this mark; gradients of marked parameters are summed over the
        # tensor-parallel ranks, each of which has seen a part of the sequence only.
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        return norm

    return staticmethod(new)


def _core_attention(original: Callable[..., type]) -> Callable[..., type]:
    from dynatrain_megatron.platform.core_attention import CoreAttention

    def core_attention(self: object) -> type:
        """The module that attends, given queries, keys and values."""
        return CoreAttention

    return core_attention


def _mla_down_projection(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core import tensor_parallel

    @functools.wraps(original)
    def down_projection(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, combined = original(self, hidden_states)
        latent, rotary = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        if combined.size(-1) == latent + rotary:  # whole on every rank: not a local module's
            return query, combined
        combined = tensor_parallel.gather_from_tensor_model_parallel_region(combined)
        if self.config.sequence_parallel:
            # The host gathers the rotary part over the sequence again, and then sums its gradient.
            return query, tensor_parallel.scatter_to_sequence_parallel_region(combined)
        parts = combined.split([latent, rotary], dim=-1)
        summed = tensor_parallel.copy_to_tensor_model_parallel_region(parts[1])
        return query, torch.cat([parts[0], summed], dim=-1)

    return down_projection


def _mla_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if not config.sequence_parallel and hasattr(self, "q_layernorm"):
            for parameter in self.q_layernorm.parameters():
                # Each rank has seen the whole latent query: the gradients are equal already.
                parameter.average_gradients_across_tp_domain = True

    return init


def _hybrid_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    @functools.wraps(original, updated=())
    def norm(config: Any, **kwargs: Any) -> Any:
        kind = WrappedTorchNorm if config.transformer_impl == "local" else original
        return kind(config=config, **kwargs)

    return norm


def _uses_torch_adam() -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def _state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    if not _uses_torch_adam():
        return original

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, torch.optim.Adam) and not adam.state:
            for group in adam.param_groups:
                for param in group["params"]:
                    adam.state[param] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return original(self)

    return state_dict


def _load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    if not _uses_torch_adam():
        return original

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    return load_state_dict


def _set_states(original: Callable[..., None]) -> Callable[..., None]:
    without_step = {"step": None} if _uses_torch_adam() else {}

    @functools.wraps(original)
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            original(self, model_param, {**tensors, **without_step})

    return set_states


_LATENT = "megatron.core.transformer.multi_latent_attention.MLASelfAttention"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"

# Every name of Megatron that the platforms replace.
HOST_TABLE: tuple[Replacement, ...] = (
    Replacement(
        "megatron.core.datasets.utils.compile_helpers",
        "runs make in the installed package, which has the compiled helpers but no Makefile",
        _compile_helpers,
    ),
    Replacement(
        "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__",
        "refuses sequence parallel, although torch's norms need only their parameters marked",
        _torch_norm,
    ),
    Replacement(
        "megatron.core.models.backends.LocalSpecProvider.core_attention",
        "names an attention without multi-latent heads and without context parallelism",
        _core_attention,
    ),
    Replacement(
        f"{_LATENT}._qkv_down_projection",
        "with local modules and tensor parallelism, gives the rotary part of the keys, which all "
        "heads share, the gradient of one rank's heads only",
        _mla_down_projection,
        Releases(since=(0, 17)),
    ),
    Replacement(
        f"{_LATENT}.__init__",
        "without sequence parallelism, lets the gradient of the query's norm be summed over the "
        "tensor-parallel ranks, as if each had seen a part of it",
        _mla_init,
    ),
    Replacement(
        "megatron.core.models.hybrid.hybrid_block.TENorm",
        "is the last norm of every Hybrid model, also of one made of local modules",
        _hybrid_norm,
        Releases(since=(0, 18)),
    ),
    Replacement(
        f"{_DISTRIBUTED}.state_dict",
        "fails before the first step with torch's Adam, which keeps the step in its state; "
        "loading a checkpoint calls it on a fresh optimizer",
        _state_dict,
    ),
    Replacement(
        f"{_DISTRIBUTED}.load_state_dict",
        "gives all parameters one and the same step tensor, so that torch's Adam counts one step "
        "for each parameter",
        _load_state_dict,
    ),
    Replacement(
        f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",
        "looks for a loaded tensor for torch Adam's step, which was restored already and is not "
        "among the loaded tensors, or is the one from before loading; and writes into float32 "
        "parameters without no_grad in the dp_reshardable format",
        _set_states,
    ),
)
