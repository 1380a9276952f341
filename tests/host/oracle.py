"""The independent oracle: Megatron's own checkpoint, saved in one layout and loaded in the other.

Before a switch the job saves a fully reshardable checkpoint. After it, everything the switch
produced is set aside and the live model is filled with NaN; then Megatron itself loads the
checkpoint into it under the new layout, and every parameter, main parameter, moment and step must
be equal to what was set aside, bit for bit.

Some checkpoints Megatron can save in both layouts and not load in the other: where the optimizers
are others there (experts with an optimizer of their own or without, the optimizer distributed or
not), and momentum of SGD. Then it saves once more after the switch, and the two checkpoints must
hold the same unsharded tensors, and data-parallel replicas the same parameters.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import queue
import re
import shutil
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dynatrain_megatron.adapters.built import Built
from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.engine.memory import storage_sizes
from tests.host import tours
from tests.ranks import run_megatron

# What a run needs for the oracle's checkpoints; it saves nothing by itself.
ORACLE_FLAGS = [
    "--dist-ckpt-optim-fully-reshardable",
    "--ckpt-fully-parallel-save",
    "--no-save-rng",
    "--no-load-rng",
]


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

    def checked(job: Job, target: Any, options: Any, *worlds: Any) -> Any:
        where = directory / f"iteration-{job.iteration}"
        save(job, where)
        gc.collect()
        kept = {id(param) for each in _kept(job) for param in _params(each.skeleton.model)}
        alive = sum(id(ref()) not in kept for ref in old_params if ref() is not None)
        old_params.extend(weakref.ref(param) for param in _params(job.model))
        old_state = list(HostState(job.model, job.optimizer, job.args).tensors())
        optimizers = _optimizers(job)
        try:
            report = real(job, target, options, *worlds)
        except BaseException:
            old_params.clear()  # the job keeps its model
            raise
        held = sum(t.untyped_storage().nbytes() for t in old_state)
        loads = _optimizers(job) == optimizers and job.args.optimizer == "adam"
        differences = compare(job, where, poison=poison) if loads else compare_saved(job, where)
        line = {
            "source": report.source,
            "target": report.target,
            "moved": report.bytes["moved"],
            "lower_bound": report.bytes["lower_bound"],
            "loaded": loads,
            "compared": len(_state(job)),
            "differences": differences,
            "held_bytes": held,
            "alive_params": alive,
            "other_groups": len(distributed_c10d._world.pg_map) - _kept_groups(job),
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
            "dormant_bytes": [
                sum(storage_sizes(each.state.tensors()).values()) for each in job.dormant
            ],
            **asdict(report)["groups"],
        }
        with (directory / f"differences-{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(where)
        return report

    session.switch = checked  # type: ignore[assignment]


def run_tour(
    world: int,
    flags: Sequence[str],
    tour: Sequence[str],
    directory: Path,
    *,
    first: int = 2,
    least: int = 20,
    overrides: Sequence[str] = (),
    inside: Callable[[], None] | None = None,
) -> list[tuple[str, str]]:
    """Train along a tour of layouts, every switch checked; what must hold of each is asserted.

    ``flags`` launch the job in ``tour[0]``; from iteration ``first`` on it switches at each. At
    least ``least`` tensors must be compared on every rank. ``inside`` runs on each rank before.
    Returns the pairs of layouts it switched between, in order.
    """

    def attached() -> None:
        attach(directory)
        if inside is not None:
            inside()

    run_megatron(
        world,
        [
            *(*flags, *ORACLE_FLAGS, "--data-cache-path", str(directory / "cache")),
            *("--train-iters", str(first + len(tour))),
        ],
        [tours.schedule(tour, first=first), *overrides],
        directory,
        timeout_s=560,
        inside=attached,
    )
    found = list(results(directory))
    assert len(found) == world * (len(tour) - 1)
    for line in found:
        assert line["compared"] >= least, line
        assert line["differences"] == [], line
        assert line["moved"] == line["lower_bound"], line
    check_nothing_is_left_behind(found)
    pairs = [(line["source"], line["target"]) for line in found if line["rank"] == 0]
    assert all(before[1] == after[0] for before, after in pairwise(pairs))
    return pairs


def results(directory: Path) -> Iterator[dict[str, Any]]:
    """What every rank found, switch by switch."""
    for path in sorted(directory.glob("differences-*.jsonl")):
        for line in path.read_text().splitlines():
            yield {"rank": int(path.stem.split("-")[1]), **json.loads(line)}


def check_nothing_is_left_behind(found: list[dict[str, Any]]) -> None:
    """Old memory is freed; parameters and groups there are no more than those of kept layouts."""
    others: dict[int, set[int]] = defaultdict(set)
    for line in found:
        assert line["held_bytes"] == 0, line
        assert line["alive_params"] == 0, line
        others[line["rank"]].add(line["other_groups"])
    for rank, counts in others.items():
        assert len(counts) == 1, f"rank {rank} had {counts} process groups of no kept layout"


def _kept(job: Job) -> list[Built]:
    assert job.built is not None
    return [job.built, *job.dormant]


def _kept_groups(job: Job) -> int:
    assert job.built is not None
    return len(job.built.world.process_groups())


def _params(model: Sequence[Any]) -> Iterator[torch.nn.Parameter]:
    for chunk in model:
        yield from chunk.parameters()


def save(job: Job, where: Path) -> None:
    """Collective: Megatron saves the job as it stands."""
    from megatron.training.checkpointing import save_checkpoint
    from megatron.training.training import force_param_sync, should_disable_forward_pre_hook

    if should_disable_forward_pre_hook(job.args):  # as Megatron's loop does before it saves
        force_param_sync(job.model)
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


def compare_saved(job: Job, where: Path) -> list[str]:
    """Collective: names of unsharded tensors that Megatron saves otherwise than in ``where``."""
    from megatron.core.dist_checkpointing import load_common_state_dict, load_plain_tensors

    again = where / "again"
    save(job, again)
    directories = [str(next(at.glob("iter_*"))) for at in (where, again)]
    before, after = (_unsharded(load_plain_tensors(directory)) for directory in directories)
    assert len(before) > 10
    different = [f"only on one side: {key}" for key in before.keys() ^ after.keys()]
    different += [k for k in before.keys() & after.keys() if not _bit_equal(before[k], after[k])]
    common = [load_common_state_dict(directory) for directory in directories]
    for name in ("iteration", "opt_param_scheduler", "num_floating_point_operations_so_far"):
        if common[0][name] != common[1][name]:
            different.append(f"{name}: {common[0][name]} and {common[1][name]}")
    for name in ("step", "common_step", "grad_scaler"):
        values = [_found(state["optimizer"], name) for state in common]
        if values[0] and values[1] and values[0] != values[1]:
            different.append(f"{name}: {values[0]} and {values[1]}")
    return sorted(different + _diverged_replicas(job))


def _diverged_replicas(job: Job) -> list[str]:
    """Collective: parameters that differ between data-parallel ranks.

    Megatron has a check of its own, but that looks at memory through NumPy, which pins it.
    """
    from megatron.core import parallel_state

    diverged = []
    for number, chunk in enumerate(job.model):
        for name, param in chunk.named_parameters():
            if getattr(param, "allreduce", True):
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            else:
                group = parallel_state.get_expert_data_parallel_group()
            copies = [torch.empty_like(param) for _ in range(group.size())]
            dist.all_gather(copies, param.detach(), group=group)
            if not all(_bit_equal(copy, param.detach()) for copy in copies):
                diverged.append(f"{number}.{name} differs between data-parallel ranks")
    return diverged


def _unsharded(loaded: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, with main parameters under one name whatever optimizer saved them."""
    tensors = {key: value for key, value in loaded.items() if torch.is_tensor(value)}
    moments = re.compile(r"optimizer\.state\.(exp_avg|momentum_buffer)\.(.*)")
    for name in [found[2] for found in map(moments.match, tensors) if found]:
        main = f"optimizer.state.fp32_param.{name}"
        distributed = tensors.pop(f"optimizer.state.param.{name}", None)
        if main not in tensors:  # a float32 parameter is its own main parameter
            tensors[main] = tensors[name] if distributed is None else distributed
    return tensors


def _found(tree: Any, name: str) -> set[str]:
    """The different values under ``name`` anywhere in a tree of dicts and lists."""
    if isinstance(tree, list | tuple):
        return set().union(*(_found(item, name) for item in tree))
    if not isinstance(tree, dict):
        return set()
    inside = [_found(value, name) for key, value in tree.items() if key != name]
    return set().union(*inside, {str(tree[name])} if name in tree else set())


def _optimizers(job: Job) -> list[str]:
    """What kinds of optimizer the job has; an agreed answer is not needed, each rank has it."""
    chained = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
    return [type(optimizer).__name__ for optimizer in chained]


def _state(job: Job) -> dict[str, torch.Tensor]:
    """Live tensors by name: parameters, and for owned shards main parameter, moments, step."""
    host = HostState(job.model, job.optimizer, job.args)
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(job.model):
        for name, param in chunk.named_parameters():
            names[id(param)] = f"{number}.{name}"
            tensors[f"{number}.{name} param"] = param.detach()
        for prefix, module in chunk.module.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                # What a module computes for itself is in no checkpoint.
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    tensors[f"{number}.{name} buffer"] = buffer
    for shard in host.shards():
        for kind, tensor in shard.states.items():
            tensors[f"{names[id(shard.param)]} {kind}"] = tensor
        if "step" in shard.inner.state[shard.key]:
            tensors[f"{names[id(shard.param)]} step"] = shard.inner.state[shard.key]["step"]
    for number, opt in enumerate(host.inner_optimizers()):
        if getattr(opt, "grad_scaler", None) is not None:
            scaler = opt.grad_scaler.state_dict()
            values = [float(value) for _, value in sorted(scaler.items())]
            tensors[f"scaler {number}"] = torch.tensor(values, dtype=torch.float64)
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
