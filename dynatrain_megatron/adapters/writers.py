"""Megatron's writers live on the last rank: they follow to whichever process has that rank.

A switch that has been made is not lost to a log that cannot be written: what goes wrong here is a
warning.
"""

from __future__ import annotations

import logging
import os
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

_FINISH_S = 30.0
"""How long what is still to be uploaded may hold up a switch."""


def run_name() -> str:
    """The id of the Weights & Biases run that this process writes; empty where it writes none."""
    from megatron.training import global_vars

    wandb = global_vars._GLOBAL_WANDB_WRITER
    return "" if wandb is None else str(wandb.run.id)


def close() -> None:
    """Write no more: the last rank is another process's, or this one has left. Local.

    Before any process calls :func:`follow`, so that one Weights & Biases run has one writer at a
    time.
    """
    from megatron.training import global_vars

    board, wandb = global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER
    global_vars._GLOBAL_TENSORBOARD_WRITER = global_vars._GLOBAL_WANDB_WRITER = None
    if board is not None:
        _try(board.close, "TensorBoard's last figures could not be written")
    if wandb is not None:
        what = "the Weights & Biases run could not be closed here"
        closing = threading.Thread(target=_try, args=(wandb.finish, what), daemon=True)
        closing.start()
        closing.join(_FINISH_S)
        if closing.is_alive():
            logger.warning("%s within %g s; it goes on beside training", what, _FINISH_S)


def follow(args: Namespace, run_id: str) -> None:
    """Write from now on, where this process has the last rank of ``args`` and did not before.

    ``run_id`` is that of the job's Weights & Biases run, where it has one: it stays one run. Local.
    """
    from megatron.training import global_vars

    if not is_last(args):
        return
    if global_vars._GLOBAL_TENSORBOARD_WRITER is None:
        _try(lambda: global_vars._set_tensorboard_writer(args), "TensorBoard gets no more figures")
    if global_vars._GLOBAL_WANDB_WRITER is None and run_id:
        os.environ.update(WANDB_RUN_ID=run_id, WANDB_RESUME="allow")
        _try(lambda: global_vars._set_wandb_writer(args), "Weights & Biases gets no more figures")


def is_last(args: Namespace) -> bool:
    """Whether this process has the rank that writes."""
    return bool(args.rank == args.world_size - 1)


def write(iteration: int, scalars: Mapping[str, float], texts: Mapping[str, str]) -> None:
    """Show these at ``iteration`` in TensorBoard and in Weights & Biases; local, on the last rank.

    Weights & Biases takes nothing for a step before its last one. Where its run was taken up here,
    and so counts from the next step on, that is the step.
    """
    from megatron.training import global_vars

    board, wandb = global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER

    def to_board() -> None:
        for tag, value in scalars.items():
            board.add_scalar(tag, value, iteration)
        for tag, text in texts.items():
            board.add_text(tag, text, iteration)

    def to_wandb() -> None:
        wandb.log({**scalars, **texts}, max(iteration, wandb.run.step))

    if board is not None:
        _try(to_board, "TensorBoard could not be told of the layout or a switch")
    if wandb is not None:
        _try(to_wandb, "Weights & Biases could not be told of the layout or a switch")


def _try(do: Callable[[], object], otherwise: str) -> None:
    try:
        do()
    except Exception:
        logger.warning("%s", otherwise, exc_info=True)
