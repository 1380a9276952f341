"""A rank of a job that ends at its first step boundary; run by torchrun for :mod:`peers`.

    torchrun … stopped_job.py TIMES MEGATRON FLAGS…

The first rank writes to the file TIMES when the first step could have run and, with ``--save``,
when the checkpoint was written: seconds since the epoch.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from jobs import fill, run_job
from peers import Checkpoint

from dynatrain_megatron.adapters.job import Job


def stop(job: Job) -> list[float]:
    """The times to note."""
    args = job.args
    if args.save is None:
        dist.barrier()
        return [time.time()]
    fill(job)
    dist.barrier()
    settings = ("dist_ckpt_optim_fully_reshardable", "ckpt_fully_parallel_save")
    directory, args.save = Path(args.save).parent, None  # pretrain would save once more
    begin = time.time()
    Checkpoint(directory, {name: getattr(args, name) for name in settings}).save(job)
    return [begin, time.time()]


def main() -> None:
    """Run one rank."""
    file, *flags = sys.argv[1:]
    times = run_job(flags, stop)
    if os.environ["RANK"] == "0":
        Path(file).write_text(" ".join(map(str, times)))


if __name__ == "__main__":
    main()
