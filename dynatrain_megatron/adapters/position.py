"""Where a run is, besides its tensors: what a process that joins has to be told.

Iteration and counters, what the run has set in Megatron's arguments since they were validated, the
learning rate schedule, the loss scaler, and sums of the log interval under way. All of it is equal
on the job's ranks, or nobody's but the last rank's; random streams and data iterators follow from
it and the layout.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import asdict, replace
from typing import Any

import torch

from dynatrain_megatron.adapters.arguments import differences
from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.adapters.samplers import LaunchData
from dynatrain_megatron.adapters.state import HostState, hyperparameters, take_hyperparameters
from dynatrain_megatron.engine.fragments import dtype_name
from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.layout import ParallelLayout

_TENSOR = "tensor"


def position_of(job: Job) -> bytes:
    """The run's position as one process of the job sees it.

    Raises :class:`SwitchRefused` where the run holds a value that cannot be told.
    """
    optimizers = HostState(job.model, job.optimizer, job.args).inner_optimizers()
    scalers = [o.grad_scaler.state_dict() for o in optimizers if getattr(o, "grad_scaler", None)]
    schedule = {} if job.scheduler is None else vars(job.scheduler)
    told = {
        "iteration": job.iteration,
        "layout": str(job.layout),
        "num_flops": job.num_flops,
        "arguments": differences(job.args, job.baseline),
        "schedule": {name: value for name, value in schedule.items() if name != "optimizer"},
        "scaler": scalers[0] if scalers else None,
        "hyperparameters": [
            group for opt in optimizers for group in hyperparameters(opt.optimizer.param_groups)
        ],
        "totals": job.totals,
        "secret": job.secret,
        "next_step": job.next_step,
        "stopped_for_s": time.perf_counter() - job.stopped_s,  # clocks of hosts differ
        "data": asdict(job.recipe.data),
    }
    try:
        return json.dumps(told, default=_as_json).encode()
    except (TypeError, ValueError) as error:
        raise SwitchRefused(
            f"the run's position cannot be told to a process that joins: {error}",
            "switch without new processes",
        ) from error


def take_over(job: Job, told: bytes) -> None:
    """Put a process that joins to the job's position."""
    position = json.loads(told, object_hook=_from_json)
    job.iteration, job.num_flops = position["iteration"], position["num_flops"]
    job.layout = ParallelLayout.parse(position["layout"])
    vars(job.args).update(position["arguments"])
    if job.scheduler is not None:
        vars(job.scheduler).update(position["schedule"])
    for opt in HostState(job.model, job.optimizer, job.args).inner_optimizers():
        if position["scaler"] is not None and getattr(opt, "grad_scaler", None):
            opt.grad_scaler.load_state_dict(position["scaler"])
        take_hyperparameters(opt.optimizer.param_groups, position["hyperparameters"])
    job.totals, job.secret = position["totals"], position["secret"]
    job.next_step = position["next_step"]
    job.stopped_s = time.perf_counter() - position["stopped_for_s"]
    job.recipe = replace(job.recipe, data=LaunchData(**position["data"]))


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() <= 1:
        kind = dtype_name(value.dtype)
        return {_TENSOR: value.tolist(), "dtype": kind, "device": value.device.type}
    if isinstance(value, Namespace):
        return vars(value)
    raise TypeError(f"{type(value).__name__} {str(value)[:60]!r}")


def _from_json(value: dict[str, Any]) -> Any:
    if set(value) != {_TENSOR, "dtype", "device"}:
        return value
    dtype = getattr(torch, value["dtype"])
    return torch.tensor(value[_TENSOR], dtype=dtype, device=value["device"])
