"""The independent oracle: Megatron's own checkpoint, saved in one layout and loaded in the other.

Before a switch the job saves a fully reshardable checkpoint. After it, everything the switch
produced is set aside and the live model is filled with NaN; then Megatron itself loads the
checkpoint into it under the new layout, and every parameter, main parameter, moment and step must
be equal to what was set aside, bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import queue
import shutil
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.adapters.state import HostState

# What a run needs for the oracle's checkpoints; it saves nothing by itself.
ORACLE_FLAGS = [
    "--dist-ckpt-optim-fully-reshardable",
    "--ckpt-fully-parallel-save",
    "--no-save-rng",
    "--no-load-rng",
]

Difference = dict[str, Any]


def attach(directory: Path, *, poison: bool = True) -> None:
    """Check every switch of this process against the oracle; call on each rank before training.

    Differences go to ``directory``/differences-<rank>.jsonl, one line a switch.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from dynatrain_megatron.plugin import session

    # Saves here run in this process; the host would start another one for their results alone.
    filesystem_async._results_queue = queue.Queue()
    real = session.switch
    old_params: list[weakref.ref[torch.Tensor]] = []

    def checked(job: Job, target: Any, options: Any) -> Any:
        where = directory / f"iteration-{job.iteration}"
        save(job, where)
        gc.collect()
        alive = sum(ref() is not None for ref in old_params)
        old_params[:] = [weakref.ref(p) for chunk in job.model for p in chunk.parameters()]
        old_state = list(HostState(job.model, job.optimizer, job.args).tensors())
        report = real(job, target, options)
        held = sum(t.untyped_storage().nbytes() for t in old_state)
        differences = compare(job, where, poison=poison)
        line = {
            "source": report.source,
            "target": report.target,
            "moved": report.bytes["moved"],
            "lower_bound": report.bytes["lower_bound"],
            "compared": len(_state(job)),
            "differences": differences,
            "held_bytes": held,
            "alive_params": alive,
            "groups": len(distributed_c10d._world.pg_map),
        }
        with (directory / f"differences-{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(where)
        return report

    session.switch = checked  # type: ignore[assignment]


def attach_in(directory: Path) -> Callable[[], None]:
    """:func:`attach` as the ``inside`` of a run."""
    return lambda: attach(directory)


def results(directory: Path) -> Iterator[dict[str, Any]]:
    """What every rank found, switch by switch."""
    for path in sorted(directory.glob("differences-*.jsonl")):
        for line in path.read_text().splitlines():
            yield {"rank": int(path.stem.split("-")[1]), **json.loads(line)}


def check_nothing_is_left_behind(found: list[dict[str, Any]]) -> None:
    """Old memory is freed, old parameters are gone a switch later, groups do not add up."""
    groups: dict[tuple[int, str], set[int]] = defaultdict(set)
    for line in found:
        assert line["held_bytes"] == 0, line
        assert line["alive_params"] == 0, line
        groups[line["rank"], line["target"]].add(line["groups"])
    for (rank, layout), counts in groups.items():
        assert len(counts) == 1, f"rank {rank} had {counts} process groups in layout {layout}"


def save(job: Job, where: Path) -> None:
    """Collective: Megatron saves the job as it stands."""
    from megatron.training.checkpointing import save_checkpoint

    with _checkpoint_args(job, save=str(where)):
        save_checkpoint(job.iteration, job.model, job.optimizer, job.scheduler, job.num_flops, {})


def compare(job: Job, where: Path, *, poison: bool = True) -> list[str]:
    """Collective: names of this rank's tensors that differ from what Megatron loads."""
    from megatron.training.checkpointing import load_checkpoint

    ours = {name: tensor.clone() for name, tensor in _state(job).items()}
    if poison:
        for tensor in _state(job).values():
            if tensor.is_floating_point() and tensor.dim():  # the host compares steps as a set
                tensor.fill_(float("nan"))
    args = job.args
    counters = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
    before = {name: getattr(args, name) for name in counters}
    scheduler = job.scheduler.state_dict()
    vars(args).update(dict.fromkeys(counters, 0))
    job.scheduler.num_steps = 0  # loading adds the saved steps to those it has
    with _checkpoint_args(job, load=str(where)):
        iteration, _ = load_checkpoint(job.model, job.optimizer, job.scheduler)
    different = [name for name, tensor in _state(job).items() if not _bit_equal(ours[name], tensor)]
    after = {name: getattr(args, name) for name in counters}
    if iteration != job.iteration or after != before:
        different.append(f"position {iteration} {after} against {job.iteration} {before}")
    if job.scheduler.state_dict() != scheduler:
        different.append("scheduler")
    with torch.no_grad():  # the run goes on from what the switch produced
        for name, tensor in _state(job).items():
            tensor.copy_(ours[name])
    vars(args).update(before)
    return different


def _state(job: Job) -> dict[str, torch.Tensor]:
    """Live tensors by name: parameters, and for owned shards main parameter, moments, step."""
    host = HostState(job.model, job.optimizer, job.args)
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(job.model):
        for name, param in chunk.named_parameters():
            names[id(param)] = f"{number}.{name}"
            tensors[f"{number}.{name} param"] = param.detach()
        for name, buffer in chunk.module.named_buffers():
            tensors[f"{number}.{name} buffer"] = buffer
    for shard in host.shards():
        for kind, tensor in shard.states.items():
            tensors[f"{names[id(shard.param)]} {kind}"] = tensor
        tensors[f"{names[id(shard.param)]} step"] = shard.inner.state[shard.key]["step"]
    return tensors


def _bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dim() == 0:
        a, b = a.reshape(1), b.reshape(1)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextlib.contextmanager
def _checkpoint_args(job: Job, **values: Any) -> Iterator[None]:
    kept = {name: getattr(job.args, name) for name in values}
    vars(job.args).update(values)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        vars(job.args).update(kept)
