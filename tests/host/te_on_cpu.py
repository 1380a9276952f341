"""Transformer Engine's modules and optimizer on CPU ranks: all of theirs but the kernels.

Parameters, their names and order, what is kept beside them (``_extra_state``), how Megatron wraps,
builds, saves and loads them, and what the optimizer keeps are what they are on a GPU. Only what
runs CUDA kernels is done by torch here: the forward passes, Adam's step, scaling and norms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

FLAGS = ["--transformer-impl", "transformer_engine"]

Tensors = list[list[torch.Tensor]]


def use() -> None:
    """Put the imitations in place, and let the CPU platform have the modules; once a process."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as kernels
    from megatron.core.transformer.moe import moe_utils

    from dynatrain_megatron.platform import flags

    flags.CPU_REFUSED = tuple(
        row for row in flags.CPU_REFUSED if row.flag not in ("--transformer-impl", "--cp-comm-type")
    )
    for module, forward in (
        (te.Linear, _linear),
        (te.LayerNormLinear, _norm_and_linear),
        (te.GroupedLinear, _grouped),
        (te.LayerNorm, _norm),
        (te.RMSNorm, _norm),
        (te.DotProductAttention, _attention),
    ):
        module.forward = forward
    moe_utils.te_general_gemm = None  # the router does without
    for name, imitation in (
        ("multi_tensor_adam", _adam),
        ("multi_tensor_sgd", _sgd),
        ("multi_tensor_scale", _scale),
        ("multi_tensor_scale_tensor", _scale),
        ("multi_tensor_l2norm", _l2norm),
    ):
        _replace(getattr(kernels, name), imitation)


def _replace(kernel: Any, imitation: Callable[..., Any]) -> None:
    """Wherever it was imported to."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is kernel:
                setattr(module, name, imitation)


# ------------------------------------------------------------------------------ modules


def _linear(self: Any, inp: torch.Tensor, is_first_microbatch: Any = None, **_: Any) -> Any:
    return _project(self, _enter(self, inp))


def _norm_and_linear(self: Any, inp: torch.Tensor, is_first_microbatch: Any = None) -> Any:
    bias = getattr(self, "layer_norm_bias", None)
    normed = _normed(self, inp, self.layer_norm_weight, bias, self.normalization == "RMSNorm")
    return _project(self, _enter(self, normed))


def _enter(self: Any, inp: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import mappings

    if self.parallel_mode != "column" or self.tp_size == 1:
        return inp
    if self.sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(inp, group=self.tp_group)
    return mappings.copy_to_tensor_model_parallel_region(inp, group=self.tp_group)


def _project(self: Any, inp: torch.Tensor) -> Any:
    from megatron.core.tensor_parallel import mappings

    out = F.linear(inp, self.weight)
    if self.parallel_mode == "row" and self.tp_size > 1:
        if self.sequence_parallel:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        else:
            out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
    if self.apply_bias:
        out = out + self.bias
    return (out, self.bias) if self.return_bias else out


def _grouped(self: Any, inp: torch.Tensor, m_splits: Any, is_first_microbatch: Any = None) -> Any:
    parts = inp.split([int(count) for count in m_splits])
    weights = [getattr(self, f"weight{n}") for n in range(self.num_gemms)]
    out = torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])
    assert not self.use_bias
    return out


def _norm(self: Any, inp: torch.Tensor) -> torch.Tensor:
    bias = getattr(self, "bias", None)
    return _normed(self, inp, self.weight, bias, bias is None)


def _normed(
    self: Any,
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    root_mean_square: bool,
) -> torch.Tensor:
    if self.zero_centered_gamma:
        weight = weight + 1
    shape = tuple(weight.shape)
    if root_mean_square:
        return F.rms_norm(inp, shape, weight, self.eps)
    return F.layer_norm(inp, shape, weight, bias, self.eps)


def _attention(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    attn_mask_type: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Shapes as Megatron has them, [sequence, batch, heads, channels], with a causal mask."""
    from dynatrain_megatron.platform.core_attention import causal_mask, gather_sequence

    assert attn_mask_type in (None, "causal")
    group = getattr(self, "cp_group", None)
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    if size > 1:
        key, value = gather_sequence(key, group), gather_sequence(value, group)
    sees = ~causal_mask(query.size(0), size, rank, query.device)
    repeats = query.size(2) // key.size(2)
    heads = [
        part.permute(1, 2, 0, 3)
        for part in (
            query,
            key.repeat_interleave(repeats, dim=2),
            value.repeat_interleave(repeats, dim=2),
        )
    ]
    out = F.scaled_dot_product_attention(*heads, attn_mask=sees, scale=self.softmax_scale)
    return out.permute(2, 0, 1, 3).flatten(2)


# ---------------------------------------------------------------------------- optimizer


def _adam(
    chunk_size: int,
    overflow: torch.Tensor,
    tensors: Tensors,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """AdamW, as the fused kernel has it."""
    assert mode == 1 and bias_correction == 1
    for grad, param, first, second in zip(*tensors, strict=True):
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        divisor = (second / (1 - beta2**step)).sqrt_().add_(eps)
        update = first / (1 - beta1**step) / divisor + weight_decay * param
        param.sub_(update, alpha=lr)


def _sgd(
    chunk_size: int,
    overflow: torch.Tensor,
    tensors: Tensors,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    assert momentum and not (dampening or nesterov or wd_after_momentum) and scale == 1
    for grad, param, momenta in zip(*tensors, strict=True):
        step = grad + weight_decay * param
        if first_run:
            momenta.copy_(step)
        else:
            momenta.mul_(momentum).add_(step)
        param.sub_(momenta, alpha=lr)


def _scale(chunk_size: int, overflow: torch.Tensor, tensors: Tensors, scale: Any) -> None:
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * scale)


def _l2norm(
    chunk_size: int, overflow: torch.Tensor, tensors: Tensors, per: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    norms = torch.stack([tensor.float().norm() for tensor in tensors[0]])
    return norms.norm().reshape(1), norms if per else None
