"""Model-parallel process groups of a layout, as one value.

Megatron keeps them in module globals of ``megatron.core.parallel_state``. What another layout's are
is asked of a private second copy of that module, in a world whose groups move nothing; so they can
be made later, in any thread, and are installed by assigning all values at once.
"""

from __future__ import annotations

import importlib.util
import inspect
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dynatrain_megatron.elastic.fake import fake_world
from dynatrain_megatron.shapes.flags import rank_order

RanksFunction = Callable[[list[int]], list[int]] | None
"""Which ranks of a pipeline hold the (position) embedding; ``None`` for Megatron's default."""


@dataclass(frozen=True, slots=True)
class Groups:
    """All values of ``parallel_state``'s private globals under one layout."""

    values: dict[str, Any]

    def process_groups(self) -> list[dist.ProcessGroup]:
        """The distinct process groups this rank is a member of, by name."""
        found = {id(g): g for g in _find(list(self.values.values()))}
        world = dist.group.WORLD
        return sorted((g for g in found.values() if g is not world), key=lambda g: g.group_name)

    def forget_scratch(self) -> None:
        """Free the memory that Megatron reuses from step to step; it allocates what it needs."""
        scratch = self.values.get("_GLOBAL_MEMORY_BUFFER")
        if scratch is not None:
            scratch.buffer.clear()


def capture() -> Groups:
    """The groups in force."""
    from megatron.core import parallel_state

    return Groups(_state_of(parallel_state))


def options(args: Namespace) -> dict[str, object]:
    """What validated ``args`` ask of ``initialize_model_parallel``, by its parameters' names."""
    return {
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": args.virtual_pipeline_model_parallel_size,
        "pipeline_model_parallel_comm_backend": args.pipeline_model_parallel_comm_backend,
        "use_sharp": args.use_sharp,
        "context_parallel_size": args.context_parallel_size,
        "hierarchical_context_parallel_sizes": args.hierarchical_context_parallel_sizes,
        "hybrid_context_parallel": getattr(args, "hybrid_context_parallel", False),
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "num_distributed_optimizer_instances": args.num_distributed_optimizer_instances,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "distributed_timeout_minutes": args.distributed_timeout_minutes,
        "nccl_communicator_config_path": args.nccl_communicator_config_path,
        "order": rank_order(args),
        "create_gloo_process_groups": _uses_gloo(args),
        "high_priority_stream_groups": args.high_priority_stream_groups,
        "sharp_enabled_group": args.sharp_enabled_group,
    }


def _uses_gloo(args: Namespace) -> bool:
    if "use_gloo_process_groups" in args:
        return bool(args.use_gloo_process_groups)
    return bool(args.enable_gloo_process_groups)  # as Megatron 0.16 has it


CreateGroup = Callable[..., dist.ProcessGroup | int]
"""Called as ``parallel_state.create_group`` is."""


@dataclass(frozen=True, slots=True)
class WantedGroups:
    """The groups of a layout before they are made, as one of its ranks asks for them.

    ``calls`` are the arguments of each, in Megatron's order, which is the same on all ranks;
    ``values`` are ``parallel_state``'s globals with a stand-in for each group.
    """

    calls: tuple[dict[str, Any], ...]
    values: dict[str, Any]
    stand_ins: tuple[dist.ProcessGroup | int, ...]

    def make(self, create: CreateGroup) -> Groups:
        """Collective over the world entered: let ``create`` make them, in any thread."""
        made = [create(**call) for call in self.calls]
        # Equal stand-ins are those of groups that this rank is not in: all are torch's mark.
        by_stand_in = dict(zip(map(id, self.stand_ins), made, strict=True))
        return Groups(_replaced(self.values, by_stand_in))


def wanted(
    args: Namespace, embedding: RanksFunction, position: RanksFunction, rank: int
) -> WantedGroups:
    """What ``rank`` of validated ``args``'s world asks for; local, nothing is made.

    ``args`` must be Megatron's live arguments meanwhile, since the functions that name embedding
    ranks read those. Main thread only.
    """
    private = _private_parallel_state()
    signature = inspect.signature(private.create_group)
    calls: list[dict[str, Any]] = []
    stand_ins: list[dist.ProcessGroup | int] = []
    own: list[Any] = [None]  # Megatron's list of a rank's groups begins with the default one

    def note(*given: Any, **named: Any) -> Any:
        call = signature.bind(*given, **named).arguments
        calls.append({name: value for name, value in call.items() if value is not None})
        stand_ins.append(dist.new_group(call["ranks"], backend="fake"))
        if rank in call["ranks"]:
            own.append(stand_ins[-1])
        return stand_ins[-1]

    private.create_group = note
    asked = options(args) | {
        "get_embedding_ranks": embedding,
        "get_position_embedding_ranks": position,
    }
    known = inspect.signature(private.initialize_model_parallel).parameters
    with fake_world(rank, args.world_size):
        private.initialize_model_parallel(**{k: v for k, v in asked.items() if k in known})
    private._global_process_group_list = own
    return WantedGroups(tuple(calls), _state_of(private), tuple(stand_ins))


def _private_parallel_state() -> Any:
    """A second copy of Megatron's module, so that the one in force stays whole."""
    spec = importlib.util.find_spec("megatron.core.parallel_state")
    assert spec is not None and spec.loader is not None
    private = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(private)
    return private


def install(groups: Groups) -> None:
    """Put ``groups`` in force; local assignments only."""
    from megatron.core import parallel_state

    vars(parallel_state).update(groups.values)


def _state_of(module: types.ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name.startswith("_")
        and not name.startswith("__")
        and not isinstance(value, (types.FunctionType, types.ModuleType, type))
    }


def _find(value: object) -> Iterator[dist.ProcessGroup]:
    if isinstance(value, dist.ProcessGroup):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _find(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find(item)


def _replaced(value: Any, by_stand_in: Mapping[int, Any]) -> Any:
    """``value`` with other groups in place of stand-ins, whatever containers they are in."""
    if isinstance(value, dist.ProcessGroup):
        return by_stand_in[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, by_stand_in) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, by_stand_in) for key, item in value.items()}
    return value
