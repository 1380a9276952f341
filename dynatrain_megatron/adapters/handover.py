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

    old_memory = list(source.tensors())
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
    del old_memory
    destroyed = groups.destroy(old_groups)
    close_iterators(old_iterators)
    return destroyed


def _reset_trackers() -> None:
    """Metric trackers keep the groups they reduce over; they are empty right after a log line."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    get_moe_metrics_tracker()._metrics.clear()
    MTPLossLoggingHelper.tracker.clear()
