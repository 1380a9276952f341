"""Lets the objects Megatron's frames hold become the new layout's.

``pretrain`` keeps the model list, optimizer, scheduler and configs in its own frame and goes on
using them after ``train`` returns. They cannot be reassigned from outside, so each old object
takes the new one's class and shares its attributes: both names are one state from then on, until
the next switch. The new object itself, in the target's skeleton, keeps its attributes for good.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from dynatrain_megatron.adapters import writers
from dynatrain_megatron.adapters.built import Built
from dynatrain_megatron.adapters.job import Iterators, Job
from dynatrain_megatron.adapters.skeleton import become, close_iterators


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
        _hook(job.model)


def _hook(model: Sequence[Any]) -> None:
    """Put the hooks back that gather parameters.

    ``train`` takes them off as it begins, and leaves them off after a first step that it skips.
    """
    for chunk in model:
        if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def hand_over(
    job: Job, target: Built, iterators: Iterators, baseline: Namespace, sizes: Mapping[int, int]
) -> int:
    """Commit: the job goes on in ``target``; returns how many process groups were ended.

    The target's args, config and world are in force already. The layout left, whose storages had
    these ``sizes``, falls asleep, or ends where one of its processes is not in the target's world;
    others may have to go for it. Runs on every rank of the target.
    """
    left, new = job.built, target.skeleton
    old_iterators = job.iterators
    _hook(new.model)
    job.model[:] = new.model
    become(job.optimizer, new.optimizer)
    become(job.scheduler, new.scheduler)
    become(job.container, new.container)
    job.iterators = iterators
    job.checkpointing_context.clear()  # caches the old layout's groups and save plans
    _reset_trackers()
    job.layout, job.baseline, job.built = target.key.layout, baseline, target
    ended = job.dormant.drop(target.key.processes)
    if left is not None:
        left.sleep(sizes)
        if set(left.key.processes) <= set(target.key.processes):
            ended += job.dormant.put(left)
        else:
            ended.append(left)
    num_ended = sum(built.end(target.world.held.values()) for built in ended)
    close_iterators(old_iterators)
    return num_ended


def let_go(job: Job) -> int:
    """Commit on a process that has no part in the target: all it held goes.

    Returns how many process groups were ended. The job's objects are dead then; a switch back into
    the job fills them anew.
    """
    ended = [*job.dormant.drop(()), *([] if job.built is None else [job.built])]
    job.built = None
    writers.close()
    num_ended = sum(built.end() for built in ended)
    job.checkpointing_context.clear()
    _reset_trackers()
    close_iterators(job.iterators)
    job.iterators = Iterators(None, None, None)
    return num_ended


def renumber(args: Namespace) -> None:
    """Let what goes by this process's rank go by its new one: environment, writers; local.

    Whichever process has the last rank now takes the writers up by :func:`writers.follow`.
    """
    os.environ.update(RANK=str(args.rank), WORLD_SIZE=str(args.world_size))
    if not writers.is_last(args):
        writers.close()


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
