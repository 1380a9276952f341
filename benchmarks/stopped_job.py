"""A rank of a job that ends at its first step boundary; run by torchrun for :mod:`peers`.

    torchrun … stopped_job.py TIMES [--save DIRECTORY] -- MEGATRON FLAGS…

The first rank writes to the file TIMES when the first step could have run and, with ``--save``,
when the checkpoint was written: seconds since the epoch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from jobs import fill, run_job
from peers import Checkpoint

from dynatrain_megatron.adapters.job import Job


def stop(job: Job, save: Path | None) -> list[float]:
    """The times to note."""
    if save is None:
        dist.barrier()
        return [time.time()]
    fill(job)
    dist.barrier()
    begin = time.time()
    settings = ("dist_ckpt_optim_fully_reshardable", "ckpt_fully_parallel_save")
    Checkpoint(save, {name: getattr(job.args, name) for name in settings}).save(job)
    return [begin, time.time()]


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("times", type=Path)
    parser.add_argument("--save", type=Path)
    at = sys.argv.index("--")
    args = parser.parse_args(sys.argv[1:at])
    times = run_job(sys.argv[at + 1 :], lambda job: stop(job, args.save))
    if os.environ["RANK"] == "0":
        args.times.write_text(" ".join(map(str, times)))


if __name__ == "__main__":
    main()
