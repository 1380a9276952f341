"""Seconds of a switch as Megatron's timers: in its log, and where its timers go besides."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

import torch
import torch.distributed as dist

from dynatrain_megatron.platform import current as current_platform


def stop_all() -> None:
    """Stop every timer that runs: no step does until the switch is over. Local."""
    from megatron.training import get_timers

    for timer in get_timers()._timers.values():
        if timer._started:
            timer.stop()


def longest(seconds: float) -> float:
    """The largest of what the ranks of the world in force measured; collective over it."""
    found = torch.tensor([seconds], dtype=torch.float64, device=current_platform().device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def log(args: Namespace, iteration: int, seconds: Mapping[str, float], *, level: int) -> None:
    """Show this rank's ``seconds`` among all ranks', as Megatron shows those of a save.

    Of timers that ``--timing-log-level`` shows at this ``level``; names must be the same on all
    ranks. Collective over the world in force.
    """
    from megatron.training import get_timers, global_vars

    timers = get_timers()
    names = [f"dynatrain-{name}" for name in seconds]
    for name, value in zip(names, seconds.values(), strict=True):
        timer = timers(name, log_level=level)
        if name in timers._timers:  # of a level that is shown
            timer.reset()
            timer._elapsed = value
    if args.log_timers_to_tensorboard:
        board, wandb = global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER
        for writer in (board, wandb):
            timers.write(names, writer, iteration, reset=False)
    timers.log(names)
