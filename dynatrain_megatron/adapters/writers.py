"""Megatron's writers live on the last rank: they follow to whichever process has that rank."""

from __future__ import annotations

import os
from argparse import Namespace


def run_name() -> str:
    """The id of the Weights & Biases run that this process writes; empty where it writes none."""
    from megatron.training import global_vars

    wandb = global_vars._GLOBAL_WANDB_WRITER
    return "" if wandb is None else str(wandb.run.id)


def follow(args: Namespace, run_id: str) -> None:
    """Write on the last rank of ``args`` and nowhere else; one run stays one curve.

    ``run_id`` is that of the job's Weights & Biases run, where it has one. Local.
    """
    from megatron.training import global_vars

    is_last = args.rank == args.world_size - 1
    board, wandb = global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER
    if not is_last:
        if board is not None:
            board.close()
            global_vars._GLOBAL_TENSORBOARD_WRITER = None
        if wandb is not None:
            wandb.finish()
            global_vars._GLOBAL_WANDB_WRITER = None
        return
    if board is None:
        global_vars._set_tensorboard_writer(args)
    if wandb is None and run_id:
        os.environ.update(WANDB_RUN_ID=run_id, WANDB_RESUME="allow")
        global_vars._set_wandb_writer(args)
