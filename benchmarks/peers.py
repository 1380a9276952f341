"""What a user would do instead of a switch, done by Megatron itself and measured.

``Checkpoint``     saves the job in one layout and loads it in the other, same processes
``restart``        stops the job with a save, starts it in the other layout, until it could train
``Resharding``     ``megatron.core.resharding``: weights from one model to another, over gloo
``Uncoalesced``    a transport of our own that sends each piece by itself, as peers do
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import RANKS

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.engine import TorchTransport
from dynatrain_megatron.engine.transport import Terms
from dynatrain_megatron.layout import ParallelLayout

STOPPED_JOB = Path(__file__).parent / "stopped_job.py"


class Uncoalesced(TorchTransport):
    """Every part of the state is a message."""

    _TERMS = Terms(part_bytes=1)


# ----------------------------------------------------------------------- checkpoints


def format_flags(source: ParallelLayout, target: ParallelLayout) -> dict[str, bool]:
    """Megatron's fastest settings with which it can load in ``target`` what ``source`` saved.

    All ranks take part in saving and loading. Where more than data parallelism changes, the
    optimizer's state has to be saved in a form that can be cut anew.
    """
    same = all(
        getattr(source, axis) == getattr(target, axis)
        for axis in ("tp", "pp", "vpp", "ep", "etp", "pipeline", "dist_opt", "instances")
    )
    return {
        "ckpt_fully_parallel_save": True,
        "ckpt_fully_parallel_load": True,
        "dist_ckpt_optim_fully_reshardable": not same,
    }


class Checkpoint:
    """A checkpoint in a folder of its own below ``directory``; all methods are collective.

    Seconds are those until the slowest rank is done.
    """

    def __init__(self, directory: Path, settings: dict[str, bool]) -> None:
        self._where = directory / "checkpoint"
        self._settings = settings

    def save(self, job: Job) -> float:
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.training.checkpointing import save_checkpoint

        # Results of writing are kept in this process; Megatron would start another one for them.
        filesystem_async._results_queue = queue.Queue()
        with _arguments(job, save=str(self._where), **self._settings), _Seconds() as seconds:
            save_checkpoint(
                job.iteration, job.model, job.optimizer, job.scheduler, job.num_flops, {}
            )
        return seconds.value

    def load(self, job: Job) -> float:
        from megatron.training.checkpointing import load_checkpoint

        counters = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
        before = {name: getattr(job.args, name) for name in counters}
        vars(job.args).update(dict.fromkeys(counters, 0))  # Megatron insists on a fresh job
        steps, job.scheduler.num_steps = job.scheduler.num_steps, 0
        with _arguments(job, load=str(self._where), **self._settings), _Seconds() as seconds:
            load_checkpoint(job.model, job.optimizer, job.scheduler)
        job.scheduler.num_steps = steps
        vars(job.args).update(before)
        return seconds.value

    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self._where.rglob("*") if file.is_file())

    def remove(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._where)
        dist.barrier()


class _Seconds:
    """Seconds from all ranks' begin to all ranks' end."""

    value = 0.0

    def __enter__(self) -> _Seconds:
        dist.barrier()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        self.value = time.perf_counter() - self._begin


@contextlib.contextmanager
def _arguments(job: Job, **values: Any) -> Iterator[None]:
    kept = {name: getattr(job.args, name) for name in values}
    vars(job.args).update(values)
    try:
        yield
    finally:
        vars(job.args).update(kept)


# --------------------------------------------------------------------------- restart


def restart(
    directory: Path, source: Sequence[str], target: Sequence[str], settings: dict[str, bool]
) -> dict[str, float]:
    """Stop a job of the flags ``source``, start one of ``target``; seconds by phase.

    Both are torchrun's. ``save`` begins at a step boundary, ``end`` is until torchrun has
    returned, ``start`` from there until the first step could run, with the checkpoint loaded.
    """
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        at = Path(folder) / "checkpoint"
        flags = ["--ckpt-fully-parallel-load"]
        if settings["dist_ckpt_optim_fully_reshardable"]:
            flags.append("--dist-ckpt-optim-fully-reshardable")
        stopped = _torchrun(Path(folder) / "stopped", ["--save", folder], [*source, *flags])
        ended = time.time()
        started = _torchrun(Path(folder) / "started", [], [*target, *flags, "--load", str(at)])
    return {
        "save": stopped[1] - stopped[0],
        "end": ended - stopped[1],
        "start": started[0] - ended,
        "total": started[0] - stopped[0],
    }


def _torchrun(times: Path, own: Sequence[str], flags: Sequence[str]) -> list[float]:
    """Run ``stopped_job.py`` with its own arguments and Megatron's; returns the times it noted."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(STOPPED_JOB), str(times), *own, "--", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"the restarted job failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [float(word) for word in times.read_text().split()]


# ------------------------------------------------------------------------ resharding


class Resharding:
    """Weights from one live model to another by Megatron; ``group`` has all ranks and is gloo's.

    ``plan_s`` is the time for the plan, made once. Raises what Megatron raises where it cannot.
    """

    def __init__(self, source: HostState, target: HostState, group: dist.ProcessGroup) -> None:
        from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
        from megatron.core.resharding.refit import clear_plan_cache, prepare_swap_model_weights

        class Counted(GlooCopyService):
            """Counts what leaves this rank."""

            sent_bytes = 0

            def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, *args: Any, **kw: Any):
                self.sent_bytes += src_tensor.nbytes * (dest_rank != self.rank)
                return super().submit_send(src_tensor, dest_rank, *args, **kw)

        self._models = source.model, target.model
        self._group = group
        self._service = Counted(group=group)
        clear_plan_cache()
        with _Seconds() as seconds:
            prepare_swap_model_weights(*self._models, group=group)
        self.plan_s = seconds.value

    def run(self) -> tuple[float, int]:
        """(seconds, bytes this rank sent) of one transfer."""
        from megatron.core.resharding.refit import swap_model_weights

        self._service.sent_bytes = 0
        with _Seconds() as seconds:
            swap_model_weights(*self._models, self._service, group=self._group)
        return seconds.value, self._service.sent_bytes
