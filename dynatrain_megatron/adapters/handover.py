"""Lets the objects Megatron's frames hold become the new layout's.

``pretrain`` keeps the model list, optimizer, scheduler and configs in its own frame and goes on
using them after ``train`` returns. They cannot be reassigned from outside, so each old object
takes the new one's class and shares its attributes: both names are one state from then on.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from dynatrain_megatron.adapters import groups
from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.adapters.skeleton import Skeleton, close_iterators
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.engine.memory import release
from dynatrain_megatron.layout import ParallelLayout


def finish_in_flight() -> None:
    """Wait for asynchronous saves: they hold tensors and groups of the layout in force."""
    from megatron.training.async_utils import maybe_finalize_async_save

    maybe_finalize_async_save(blocking=True)


def sync_functions(config: Any) -> dict[str, Any]:
    """What ``train`` binds to the model in its config, and insists on finding unbound."""
    names = ("no_sync_func", "grad_sync_func", "param_sync_func")
    return {name: getattr(config, name, None) for name in names}


def stay(job: Job, functions: dict[str, Any]) -> None:
    """Make ``train`` enterable again with the objects it had; collective over the layout in force.

    ``functions`` are the :func:`sync_functions` from before it was entered. It begins without
    gathering parameters, of which the last step may have left only this rank's shards up to date.
    """
    from megatron.training.training import should_disable_forward_pre_hook

    for name, function in functions.items():
        setattr(job.config, name, function)
    if should_disable_forward_pre_hook(job.args):
        prepare = getattr(job.optimizer, "prepare_model_params_for_param_sync", None)
        if prepare is not None:  # since megatron-core 0.19
            prepare()
        for chunk in job.model:
            chunk.start_param_sync(force_sync=True)


def become(old: Any, new: Any) -> None:
    """``old`` takes ``new``'s class and shares its attribute dictionary."""
    if old is new or old is None:
        return
    object.__setattr__(old, "__class__", type(new))
    object.__setattr__(old, "__dict__", new.__dict__)


def hand_over(
    job: Job,
    skeleton: Skeleton,
    source: HostState,
    old_groups: groups.Groups,
    layout: ParallelLayout,
    baseline: Namespace,
) -> int:
    """Commit: the job goes on in ``layout``; returns how many process groups were destroyed.

    The target's args and groups are in force already. Runs on every rank; destroying groups may
    be collective on NCCL. Memory is freed at once; the empty objects of the old model are left to
    Python's collector, which would take longer than the rest of a commit if it were run here.
    """
    from megatron.core.utils import get_model_config

    old_memory, old_model = list(source.tensors()), list(job.model)
    old_iterators = job.iterators
    job.model[:] = skeleton.model
    become(job.optimizer, skeleton.optimizer)
    become(job.scheduler, skeleton.scheduler)
    become(job.config, get_model_config(skeleton.model[0]))
    become(job.container, skeleton.container)
    job.iterators = skeleton.iterators
    job.checkpointing_context.clear()  # caches the old layout's groups and save plans
    _reset_trackers()
    job.layout, job.baseline = layout, baseline
    release(old_memory)
    _take_apart(old_model)
    del old_memory, old_model
    destroyed = groups.destroy(old_groups)
    close_iterators(old_iterators)
    return destroyed


def _take_apart(model: list[Any]) -> None:
    """Let go of all that the old modules hold, process groups with threads and sockets above all.

    The collector cannot free them by itself: modules such as token dispatchers keep tensors of
    their last step, whose graph reaches, out of its sight, the gradient hooks that hold the model.
    """
    for chunk in model:
        for module in list(chunk.modules()):
            vars(module).clear()


def _reset_trackers() -> None:
    """Metric trackers keep the groups they reduce over; each step's values are logged and gone.

    What the MTP tracker counts over the whole run stays: the rank that writes it keeps its place.
    """
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    get_moe_metrics_tracker()._metrics.clear()
    tracker = MTPLossLoggingHelper.tracker
    for name in [name for name in tracker if not name.startswith("cumulative_")]:
        del tracker[name]
