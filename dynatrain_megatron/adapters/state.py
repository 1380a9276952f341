"""Model and optimizer as fragments of the Virtual Parameter Space.

Where a parameter lies in its logical tensor comes from Megatron's own checkpoint description
(``sharded_state_dict``); which part of it a rank's optimizer owns comes from the distributed
optimizer's flat ranges. Both are joined by parameter identity::

    param (local box)        flat range [s, e) owned here      fragments, in logical coordinates
    +-----------+            . . . # #                          up to 2 * ndim - 1 regions for
    |           |     x      # # # # #              ->          each piece of the parameter
    +-----------+            # . . . .

A parameter in the optimizer is one logical tensor with the states main parameter and moments; its
bf16 copy is not moved but rebuilt from the main parameter. Frozen parameters and buffers are
moved as they are.
"""

from __future__ import annotations

import itertools
import pickle
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dynatrain_megatron.engine.fragments import Fragments, FragmentsBuilder, dtype_name
from dynatrain_megatron.engine.memory import release
from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.vps.region import Region, flat_range_regions
from dynatrain_megatron.vps.tensors import LogicalTensor, State, StateKind

_NOTHING: tuple[object, ...] = (None, {})
_PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
_PICKLED_NOTHING = {pickle.dumps(nothing, p) for nothing in _NOTHING for p in _PROTOCOLS}

Steps = dict[str, float]
"""The optimizer's step count by logical tensor name (torch's Adam counts per parameter)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The flat range [start, stop) of a local parameter that this rank's optimizer owns.

    ``states`` are tensors of ``stop - start`` elements each, by kind; ``inner`` and ``key`` find
    the optimizer's own entry.
    """

    param: torch.nn.Parameter
    start: int
    stop: int
    states: dict[StateKind, torch.Tensor]
    inner: torch.optim.Optimizer
    key: torch.Tensor
    group: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Part:
    """One box of a local parameter and the region of a logical tensor that it is."""

    name: str
    shape: tuple[int, ...]  # of the logical tensor
    local: Region  # in the local parameter's coordinates
    start: tuple[int, ...]  # where it begins in the logical tensor


def hyperparameters(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each group of an optimizer's parameters goes by, but for what the schedule sets anew."""
    own = ("params", "lr", "weight_decay", "step")
    plain = (int, float, str, tuple, list, type(None))
    return [
        {k: value for k, value in group.items() if k not in own and isinstance(value, plain)}
        for group in groups
    ]


def take_hyperparameters(groups: Sequence[dict[str, Any]], given: list[dict[str, Any]]) -> None:
    """Set those of ``groups`` as ``given`` for the group of the same kind.

    Kinds are Megatron's, as it tells groups of a checkpoint apart. Several of one kind, and all
    others where none was given of it, say only what they agree on.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    def kind(group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(group.get(key) for key in param_group_identifier_keys)

    for group in groups:
        same = [each for each in given if kind(each) == kind(group)]
        found = _agreed(same or given)
        if not same:
            found = {k: v for k, v in found.items() if k not in param_group_identifier_keys}
        group.update({name: value for name, value in found.items() if name in group})


def _agreed(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What all of them say alike."""
    first, *others = groups or [{}]
    return {
        name: value
        for name, value in first.items()
        if all(name in each and each[name] == value for each in others)
    }


class HostState:
    """A model and its optimizer under the layout whose groups are installed.

    ``model`` is the list of model chunks, each wrapped in Megatron's DistributedDataParallel.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any, args: Namespace) -> None:
        self.model = model
        self.optimizer = optimizer
        self.args = args

    @cached_property
    def _placed(self) -> dict[int, tuple[torch.Tensor, list[_Part]]]:
        """(live tensor, its parts) by identity; made once, while the own groups are installed."""
        entries = _checkpoint_entries(self.model, self.args)
        return {id(data): (data, _parts(entry, data)) for entry, data in entries}

    def inner_optimizers(self) -> list[Any]:
        """Megatron's optimizers that own parameters here (dense, expert)."""
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [opt for opt in chained if not opt.is_stub_optimizer]

    def allocate_moments(self) -> None:
        """Give every owned parameter its moments (zeros) where it has none yet."""
        for opt in self.inner_optimizers():
            inner = opt.optimizer
            if opt.init_state_fn is not None:
                opt.init_state_fn(inner, opt.config)
            for group in inner.param_groups:
                for param in group["params"]:
                    state = inner.state[param]
                    if "step" not in state and _steps_per_param(inner):
                        state["step"] = torch.zeros((), dtype=torch.float32)
                    for kind in _moments(inner):
                        if kind.value not in state:
                            state[kind.value] = torch.zeros_like(param.detach())

    def fragments(self) -> Fragments:
        """Every fragment this rank holds; local, but its own groups must be installed.

        Raises :class:`SwitchRefused` naming the parameter where one cannot be placed.
        """
        managed = {id(p) for opt in self.inner_optimizers() for p in _managed_params(opt)}
        self._check_places(managed)
        builder = FragmentsBuilder()
        for shard in self.shards():
            _add_shard(builder, shard, self._placed[id(shard.param)][1])
        for data, parts in self._placed.values():
            if id(data) not in managed:
                _add_whole(builder, data, parts)
        return builder.build()

    def weights(self) -> Fragments:
        """Every parameter and buffer as the model holds it, without the optimizer; local.

        What goes from one model to another that is not trained. Its own groups must be installed.
        """
        self._check_places({id(p) for opt in self.inner_optimizers() for p in _managed_params(opt)})
        builder = FragmentsBuilder()
        for data, parts in self._placed.values():
            _add_whole(builder, data, parts)
        return builder.build()

    def memory(self) -> tuple[object, ...]:
        """What a description rests on: which tensors there are, where they lie, what is trained.

        Equal where :meth:`fragments` would describe the same memory, as long as the former
        description is alive.
        """
        live = (
            (id(tensor), *_place(tensor), tensor.requires_grad)
            for chunk in self.model
            for tensor in itertools.chain(chunk.parameters(), chunk.module.buffers())
        )
        owned = (
            (id(shard.param), shard.start, shard.stop, kind, *_place(state))
            for shard in self.shards()
            for kind, state in shard.states.items()
        )
        return (*live, *owned)

    def _check_places(self, managed: set[int]) -> None:
        """All that lives on has a place, and all that has a place lives in the model."""
        for name, tensor in _persistent_tensors(self.model):
            if id(tensor) not in self._placed:
                raise SwitchRefused(
                    f"{name} has no entry in Megatron's sharded_state_dict that views its memory, "
                    "so its place in the unsharded model is unknown",
                    "such a module is not supported yet",
                )
            if tensor.requires_grad and id(tensor) not in managed:
                raise SwitchRefused(
                    f"trainable parameter {name} is in no optimizer of this rank",
                    "freeze it, or let the optimizer manage it",
                )
        live = {
            id(tensor)
            for chunk in self.model
            for tensor in itertools.chain(chunk.parameters(), chunk.module.buffers())
        }
        for data, parts in self._placed.values():
            if id(data) not in live:
                raise SwitchRefused(
                    f"{parts[0].name} in Megatron's sharded_state_dict is no tensor of the model "
                    "but one made for the checkpoint",
                    "such a module is not supported yet",
                )
        assert managed <= live, "an optimizer manages parameters outside the model"

    def shards(self) -> Iterator[Shard]:
        """The parts of parameters this rank's optimizer owns."""
        for opt in self.inner_optimizers():
            for param, start, stop, key, group in _owned(opt):
                if stop > start:
                    states = {StateKind.MAIN_PARAM: key.detach()}
                    for kind in _moments(opt.optimizer):
                        states[kind] = opt.optimizer.state[key][kind.value]
                    yield Shard(param, start, stop, states, opt.optimizer, key, group)

    def steps(self) -> Steps:
        """Step counts of the parameters this rank owns a part of.

        Raises :class:`SwitchRefused` where layers of one logical tensor contradict each other.
        """
        return merge_steps(
            {part.name: float(shard.inner.state[shard.key].get("step", shard.group.get("step", 0)))}
            for shard in self.shards()
            for part in self._placed[id(shard.param)][1]
        )

    def restore_steps(self, steps: Steps) -> None:
        """Set the step counts, of the parameters and of the optimizer's groups."""
        for shard in self.shards():
            if _steps_per_param(shard.inner):
                step = steps[self._placed[id(shard.param)][1][0].name]
                shard.inner.state[shard.key]["step"].fill_(step)
        last = int(max(steps.values(), default=0))
        for opt in self.inner_optimizers():
            if last and not _steps_per_param(opt.optimizer):
                for group in opt.optimizer.param_groups:
                    group["step"] = last

    def rebuild_params(self) -> int:
        """Collective: copy main parameters to the parameters and gather them over data parallel.

        Returns the bytes this rank did not have and got this way.
        """
        for opt in self.inner_optimizers():
            if hasattr(opt, "_copy_main_params_to_model_params"):
                opt._copy_main_params_to_model_params()
        owned = {id(s.param): s.stop - s.start for s in self.shards()}
        rebuilt = 0
        for opt in self.inner_optimizers():
            for param in _managed_params(opt):
                missing = param.numel() - owned.get(id(param), 0)
                rebuilt += missing * param.element_size()
        for chunk in self.model:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        return rebuilt

    def rebuilt(self) -> Iterator[torch.Tensor]:
        """The parameters that :meth:`rebuild_params` makes anew from main parameters elsewhere."""
        for opt in self.inner_optimizers():
            mains = {main.untyped_storage()._cdata for _, _, _, main, _ in _owned(opt)}
            for param in _managed_params(opt):
                # A float32 parameter, or the buffer it lies in, is the main parameter itself.
                if param.dtype != torch.float32 and param.untyped_storage()._cdata not in mains:
                    yield param.detach()

    def clear_gradients(self) -> None:
        """Free the gradients of the optimizer's last step, and let it forget them."""
        for opt in self.inner_optimizers():
            for group in opt.optimizer.param_groups:
                for param in group["params"]:
                    grad = _grad(param)
                    if grad is not None:
                        release([grad])
                        param.grad = None

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradient buffers; between two steps they hold nothing."""
        for chunk in self.model:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor with memory of its own: parameters, buffers, gradients, optimizer state."""
        for chunk in self.model:
            for param in chunk.parameters():
                yield param.detach()
                for name in ("main_grad", "grad", "main_param"):
                    extra = getattr(param, name, None)
                    if isinstance(extra, torch.Tensor):
                        yield extra.detach()
            yield from chunk.module.buffers()
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                for data in (buffer.param_data, buffer.grad_data):
                    if data is not None:
                        yield data
        for opt in self.inner_optimizers():
            for group in opt.optimizer.param_groups:
                for param in group["params"]:
                    yield param.detach()
                    grad = _grad(param)
                    if grad is not None:
                        yield grad
                    for value in opt.optimizer.state[param].values():
                        if isinstance(value, torch.Tensor):
                            yield value


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """The storage of a tensor, and where in it the tensor begins."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient Megatron has set; torch warns where a main parameter that is a view has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        return param.grad


def merge_steps(all_steps: Iterable[Steps]) -> Steps:
    """One table of step counts out of all ranks'.

    Raises :class:`SwitchRefused` where two ranks contradict each other.
    """
    merged: Steps = {}
    for steps in all_steps:
        for name, step in steps.items():
            if merged.setdefault(name, step) != step:
                raise SwitchRefused(
                    f"optimizer step of {name} is {merged[name]} in one place and {step} in another"
                )
    return merged


def _persistent_tensors(model: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and buffers that a checkpoint keeps (the others are made anew), with names."""
    for chunk in model:
        yield from chunk.named_parameters()
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer


def _checkpoint_entries(model: Sequence[Any], args: Namespace) -> list[tuple[Any, torch.Tensor]]:
    """(sharded entry, its live tensor) for everything Megatron's checkpoint would hold.

    Raises :class:`SwitchRefused` naming the entry where an object that is no tensor holds state.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from megatron.core.utils import unwrap_model
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = _build_sharded_state_dict_metadata(args, group)
    entries: dict[int, tuple[Any, torch.Tensor]] = {}
    for chunk in model:
        for value in nested_values(unwrap_model(chunk).sharded_state_dict(metadata=metadata)):
            if isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None:
                entries.setdefault(id(value.data), (value, value.data))
            if isinstance(value, ShardedObject) and not _is_empty(value.data):
                raise SwitchRefused(
                    f"{value.key} in Megatron's sharded_state_dict is no tensor but a "
                    f"{type(value.data).__name__}, which cannot be cut for another layout "
                    "(FP8 keeps its scales so)",
                    "such a module is not supported yet; run without FP8",
                )
    return list(entries.values())


def _is_empty(extra_state: Any) -> bool:
    """Whether what a module keeps beside its tensors says nothing.

    Transformer Engine's modules always have such an object: in bf16 an empty byte tensor, or one
    with a pickled empty dictionary.
    """
    if isinstance(extra_state, torch.Tensor):
        data = extra_state.cpu().numpy().tobytes()
        return not data or data in _PICKLED_NOTHING
    return not extra_state


def _parts(entry: Any, data: torch.Tensor) -> list[_Part]:
    """The boxes of a local tensor that Megatron describes as parts of logical tensors."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(entry, ShardedTensorFactory):
        built = entry.build()
        pieces = list(nested_values(built)) if isinstance(built, (dict, list)) else [built]
    else:
        pieces = [entry]
    parts = [_part(piece, data) for piece in pieces]
    if sum(part.local.numel for part in parts) != data.numel():
        raise SwitchRefused(
            f"{entry.key}: Megatron's checkpoint description covers "
            f"{sum(part.local.numel for part in parts)} of {data.numel()} elements"
        )
    return parts


def _part(piece: Any, data: torch.Tensor) -> _Part:
    view = piece.data
    shares = view.untyped_storage()._cdata == data.untyped_storage()._cdata
    if not shares or view.stride() != data.stride() or piece.flattened_range is not None:
        raise SwitchRefused(
            f"{piece.key}: Megatron's checkpoint description does not view the live tensor "
            f"(shape {tuple(data.shape)}, strides {data.stride()} against {view.stride()})"
        )
    offset = view.storage_offset() - data.storage_offset()
    start = []
    for stride, size in zip(data.stride(), data.shape, strict=True):
        index, offset = divmod(offset, stride) if size > 1 else (0, offset)
        start.append(index)
    return _Part(
        piece.key,
        tuple(piece.global_shape),
        Region(tuple(start), tuple(a + n for a, n in zip(start, view.shape, strict=True))),
        tuple(piece.global_offset),
    )


def _add_shard(builder: FragmentsBuilder, shard: Shard, parts: Sequence[_Part]) -> None:
    shape, strides = tuple(shard.param.shape), shard.param.stride()
    kinds = list(shard.states)
    for part in parts:
        tensor = LogicalTensor(
            part.name,
            part.shape,
            tuple(State(kind, dtype_name(shard.states[kind].dtype)) for kind in kinds),
        )
        extra = len(part.shape) - len(shape)  # leading axes of the logical tensor (layer, expert)
        for owned in flat_range_regions(shape, shard.start, shard.stop):
            common = owned.intersect(part.local)
            if common is None:
                continue
            position = sum(a * s for a, s in zip(common.start, strides, strict=True))
            views = []
            for kind in kinds:
                state = shard.states[kind].reshape(-1)
                views.append(
                    state.as_strided(
                        (1,) * extra + common.shape,
                        (1,) * extra + strides,
                        state.storage_offset() + position - shard.start,
                    )
                )
            builder.add(tensor, _logical(common, part, extra), views)


def _add_whole(builder: FragmentsBuilder, data: torch.Tensor, parts: Sequence[_Part]) -> None:
    kind = StateKind.PARAM if isinstance(data, torch.nn.Parameter) else StateKind.BUFFER
    for part in parts:
        # Layers share a key, and one of them may be frozen while others are trained: those are
        # logical tensors of their own, with other states.
        name = f"{part.name} {kind}"
        tensor = LogicalTensor(name, part.shape, (State(kind, dtype_name(data.dtype)),))
        extra = len(part.shape) - data.dim()
        cut = tuple(slice(a, b) for a, b in zip(part.local.start, part.local.stop, strict=True))
        view = data.detach()[cut]
        region = _logical(part.local, part, extra)
        builder.add(tensor, region, [view.reshape(region.shape)])


def _logical(local: Region, part: _Part, extra: int) -> Region:
    """A box of the local parameter, in the logical tensor's coordinates."""
    inside = local.relative_to(part.local.start)
    lead = part.start[:extra]
    return Region(
        (*lead, *(a + o for a, o in zip(inside.start, part.start[extra:], strict=True))),
        (
            *(x + 1 for x in lead),
            *(b + o for b, o in zip(inside.stop, part.start[extra:], strict=True)),
        ),
    )


def _steps_per_param(inner: torch.optim.Optimizer) -> bool:
    """torch's optimizers count steps for each parameter; fused ones for each group."""
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def _moments(inner: torch.optim.Optimizer) -> tuple[StateKind, ...]:
    """What an optimizer keeps of each element beside the main parameter."""
    if "betas" in inner.defaults:
        return StateKind.EXP_AVG, StateKind.EXP_AVG_SQ
    return (StateKind.MOMENTUM_BUFFER,) if inner.defaults["momentum"] else ()


def _owned(
    opt: Any,
) -> Iterator[tuple[torch.nn.Parameter, int, int, torch.Tensor, dict[str, Any]]]:
    """(parameter, start, stop, the inner optimizer's tensor, its group) of one optimizer."""
    groups = opt.optimizer.param_groups
    if hasattr(opt, "model_param_group_index_map"):  # distributed optimizer
        # That map counts wrong where a group has parameters of both float32 and less; the lists
        # from which the groups were made do not.
        for number, group in enumerate(groups):
            models = (*opt.model_fp32_groups[number], *opt.model_float16_groups[number])
            mains = (*opt.shard_fp32_groups[number], *opt.shard_fp32_from_float16_groups[number])
            for param, main in zip(models, mains, strict=True):
                owned = opt._get_model_param_range_map(param)["param"]
                yield param, owned.start, owned.end, main, group
        return
    own = {id(main): (main, group) for group in groups for main in group["params"]}
    for param in _managed_params(opt):
        # float32 parameters are their own main parameters; others carry theirs as an attribute
        main, group = own[id(param if id(param) in own else getattr(param, "main_param", None))]
        yield param, 0, param.numel(), main, group


def _managed_params(opt: Any) -> list[torch.nn.Parameter]:
    """The model's parameters an optimizer updates, wholly or in part."""
    if hasattr(opt, "model_param_group_index_map"):
        return [param for buffer in opt.buffers for param in buffer.params]
    if hasattr(opt, "float16_groups"):
        groups = itertools.chain(opt.float16_groups, opt.fp32_from_fp32_groups)
        return list(itertools.chain.from_iterable(groups))
    return [p for group in opt.optimizer.param_groups for p in group["params"]]
