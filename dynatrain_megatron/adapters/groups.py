"""Model-parallel process groups of a layout, as one value.

Megatron keeps them in module globals of ``megatron.core.parallel_state``. Another layout's are
built in a private second copy of that module, so that the one in force stays whole, and are
installed by assigning all values at once.
"""

from __future__ import annotations

import importlib.util
import inspect
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dynatrain_megatron.adapters.arguments import rank_order

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
        "create_gloo_process_groups": args.use_gloo_process_groups,
        "high_priority_stream_groups": args.high_priority_stream_groups,
        "sharp_enabled_group": args.sharp_enabled_group,
    }


def build(args: Namespace, embedding: RanksFunction, position: RanksFunction) -> Groups:
    """Collective over the world in force: make the groups for validated ``args``.

    Nothing is installed. ``args`` must already be Megatron's live arguments, since the functions
    that name embedding ranks read those.
    """
    spec = importlib.util.find_spec("megatron.core.parallel_state")
    assert spec is not None and spec.loader is not None
    private = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(private)
    wanted = options(args) | {
        "get_embedding_ranks": embedding,
        "get_position_embedding_ranks": position,
    }
    known = inspect.signature(private.initialize_model_parallel).parameters
    private.initialize_model_parallel(**{k: v for k, v in wanted.items() if k in known})
    return Groups(_state_of(private))


def install(groups: Groups) -> None:
    """Put ``groups`` in force; local assignments only."""
    from megatron.core import parallel_state

    vars(parallel_state).update(groups.values)


def destroy(groups: Groups) -> int:
    """Destroy the process groups one by one, in the same order on every rank; returns how many.

    Never all at once: that would unregister the names of every other world too.
    """
    doomed = groups.process_groups()
    for group in reversed(doomed):
        dist.destroy_process_group(group)
    return len(doomed)


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
