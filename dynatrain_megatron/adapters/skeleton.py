"""Builds what a layout needs of the model side: modules, DDP buffers, optimizer, scheduler, data.

Runs on the main thread at a step boundary, with the target's arguments and groups in force.
Nothing is initialised at random: every element is written by the transfer afterwards. What depends
on the run's position is set apart, by :func:`take_position`: a skeleton may have been built when
the run was elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from dynatrain_megatron.adapters import groups
from dynatrain_megatron.adapters.arguments import replace_in_place
from dynatrain_megatron.adapters.job import Iterators, Job
from dynatrain_megatron.adapters.samplers import replaying
from dynatrain_megatron.adapters.state import HostState, hyperparameters, take_hyperparameters
from dynatrain_megatron.engine.unwritten import Unwritten


@dataclass(frozen=True)
class Skeleton:
    """A layout's objects, empty of state until the transfer has run.

    They are not those that Megatron's frames hold, which share the attributes of the ones in force.
    ``datasets`` are those its iterators read, by what they were asked for with.
    """

    model: list[Any]
    optimizer: Any
    scheduler: Any
    config: Any
    container: Any
    datasets: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_launch(cls, job: Job) -> Skeleton:
        """The objects ``job`` was launched with, as others that share their attributes."""
        optimizer, scheduler = _alias(job.optimizer), _alias(job.scheduler)
        if scheduler is not None:
            scheduler.optimizer = optimizer
        return cls(list(job.model), optimizer, scheduler, _alias(job.config), _alias(job.container))


def become(old: Any, new: Any) -> None:
    """``old`` takes ``new``'s class and shares its attribute dictionary."""
    if old is new or old is None:
        return
    object.__setattr__(old, "__class__", type(new))
    object.__setattr__(old, "__dict__", new.__dict__)


def _alias(given: Any) -> Any:
    if given is None:
        return None
    alias = object.__new__(type(given))
    become(alias, given)
    return alias


@contextlib.contextmanager
def host_context(job: Job) -> Iterator[None]:
    """Put all that is global back as it was if the body raises: args, groups, batches, streams.

    The model's config counts as global, since the launch's modules read the very object that
    Megatron's frames hold.
    """
    from megatron.core import num_microbatches_calculator as batches
    from megatron.core.tensor_parallel import random as streams

    args, config = Namespace(**vars(job.args)), _alias(job.config)
    in_force = groups.capture()
    calculator = batches._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    tracker = streams.get_cuda_rng_tracker().get_states()
    generators = _generator_states()
    try:
        yield
    except BaseException:
        replace_in_place(job.args, args)
        become(job.config, config)
        groups.install(in_force)
        batches._GLOBAL_NUM_MICROBATCHES_CALCULATOR = calculator
        streams.get_cuda_rng_tracker().set_states(tracker)
        _restore_generators(generators)
        raise


def build(job: Job, unwritten: Unwritten) -> Skeleton:
    """Collective over the world in force; args, groups and batches of the target must be in force.

    Model and optimizer are made in the ``unwritten`` context: what is large has no memory yet.
    Random streams are undefined afterwards.
    """
    from megatron.core.utils import get_model_config

    args = job.args
    run = {
        name: getattr(args, name)
        for name in (
            *("iteration", "num_floating_point_operations_so_far", "consumed_train_samples"),
            "lr_decay_iters",  # set by the schedule made for iterations, also in a run of samples
        )
        if hasattr(args, name)
    }
    with _without_loading(args):
        container = _container(job)
        kwargs = dict(job.recipe.setup_kwargs)
        if "cfg_container" in kwargs:
            kwargs["cfg_container"] = container
        if kwargs.get("pg_collection") is not None:
            from megatron.core.process_groups_config import ProcessGroupCollection

            kwargs["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
        with unwritten:
            model, optimizer, scheduler = job.recipe.setup(*job.recipe.setup_args, **kwargs)
    vars(args).update(run)
    for chunk in model:
        for module in chunk.modules():
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "perform_initialization"):
                config.perform_initialization = args.perform_initialization
    return Skeleton(model, optimizer, scheduler, get_model_config(model[0]), container)


def build_nothing(setup: Callable[[], Any]) -> Any:
    """What Megatron's ``setup`` makes of model and optimizer, without memory for what is large.

    For a process that joins a job: its prologue needs the objects, and nobody their contents.
    """
    from megatron.training import get_args

    with _without_loading(get_args()), Unwritten():
        return setup()


def take_position(job: Job, skeleton: Skeleton) -> Iterators:
    """Bring a skeleton, built or kept, to where the run is; returns iterators from there on.

    Collective over the world in force; its args, groups and batches must be in force.
    """
    seed_streams(job)
    generators = _generator_states()
    _carry_optimizer(job, skeleton.optimizer)
    _carry_schedule(job.scheduler, skeleton.scheduler)
    iterators = build_iterators(job, skeleton)
    _restore_generators(generators)
    return iterators


def set_microbatches(args: Namespace) -> None:
    """Make Megatron's microbatch calculator for validated ``args``, at the run's position."""
    from megatron.core import num_microbatches_calculator as batches

    batches.unset_num_microbatches_calculator()
    batches.init_num_microbatches_calculator(
        rank=args.rank,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    batches.update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def seed_streams(job: Job) -> None:
    """Start all random streams of the new layout by Megatron's own formula.

    There is no bit-exact meaning of a stream across layouts, and ranks that come together in one
    tensor-parallel group must draw alike. So python's, NumPy's, torch's and the model-parallel
    streams begin anew, with a base seed derived from the launch's and the iteration so that none
    repeats an earlier one. With dropout off nothing draws from them.
    """
    from megatron.training.initialize import _set_random_seed

    args = job.args
    _set_random_seed(
        base_seed(args.seed, job.iteration),
        args.data_parallel_random_init,
        args.te_rng_tracker,
        args.inference_rng_tracker,
        use_cudagraphable_rng=args.cuda_graph_impl != "none",
    )


def base_seed(seed: int, iteration: int) -> int:
    """What stands for ``--seed`` after a switch at ``iteration``."""
    return (seed + 1_000_003 * iteration) % (2**31 - 1) + 1


def build_iterators(job: Job, skeleton: Skeleton) -> Iterators:
    """Data iterators at the run's position, as ``pretrain`` builds them, over kept datasets."""
    provider, args = job.recipe.dataset_provider, job.args

    def make(stage: int | None) -> tuple[Any, Any, Any]:
        if args.full_validation:  # set to the length of the loaders, but sizes the test dataset
            args.eval_iters = job.baseline.eval_iters
        with replaying(job.recipe.data, args):
            return job.recipe.build_iterators(_keeping(provider, stage, skeleton.datasets))

    if args.virtual_pipeline_model_parallel_size is None:
        return Iterators(*make(None))
    rows = [make(stage) for stage in range(len(skeleton.model))]
    return Iterators(*(list(column) for column in zip(*rows, strict=True)))


def _keeping(provider: Any, stage: int | None, kept: dict[str, Any]) -> Any:
    """A dataset provider for one stage of a virtual pipeline that asks the real one once.

    Which samples a dataset has depends on how many are asked for, and never on the position.
    """
    given = {} if stage is None else {"vp_stage": stage}

    def provide(num_samples: Any) -> Any:
        key = f"{stage} {num_samples}"
        if key not in kept:
            kept[key] = provider(num_samples, **given)
        return kept[key]

    provide.is_distributed = getattr(provider, "is_distributed", False)  # type: ignore[attr-defined]
    return provide


def close_iterators(iterators: Iterators) -> None:
    """Shut down the loader workers behind iterators that are no longer read."""
    for each in (iterators.train, iterators.valid, iterators.test):
        for iterator in each if isinstance(each, list) else [each]:
            inner = getattr(iterator, "iterable", iterator)
            for method in ("_shutdown_workers", "close"):
                stop = getattr(inner, method, None)
                if callable(stop):
                    stop()


def _container(job: Job) -> Any:
    """A fresh config container; Megatron sets fields of the one in use, so it is never reused."""
    return None if job.container is None else _like(job.container, job.args)


def edits_of(container: Any, args: Namespace) -> str:
    """What a script has set in its config container after making it from ``args``; or nothing.

    The first field that differs, with both values: it would be lost where the container of another
    layout is made.
    """
    return "" if container is None else _difference(container, _like(container, args), "")


def _difference(given: Any, made: Any, where: str) -> str:
    for each in dataclasses.fields(made):
        here, there = (getattr(side, each.name, None) for side in (given, made))
        if dataclasses.is_dataclass(there) and type(here) is type(there):
            if found := _difference(here, there, f"{where}{each.name}."):
                return found
        elif _is_plain(here) and _is_plain(there) and here != there:
            return f"{where}{each.name} is {here!r}, and {there!r} by the flags"
    return ""


def _is_plain(value: Any) -> bool:
    """Whether two of it that are the same are equal; functions and partial ones need not be."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Enum | torch.dtype)


def _like(container: Any, args: Namespace) -> Any:
    """A container of the same kind, made from ``args`` as Megatron's scripts make theirs."""
    from megatron.training import argument_utils as host

    model = container.model
    if model is not None:  # from 0.19 on, Hybrid ones from 0.18; else a provider function builds it
        hybrid = "Hybrid" in type(model).__name__
        make = host.hybrid_config_from_args if hybrid else host.gpt_config_from_args
        takes_kind = "model_config_cls" in inspect.signature(make).parameters
        model = make(args, **({"model_config_cls": type(model)} if takes_kind else {}))
    return host.pretrain_cfg_container_from_args(args, model)


@contextlib.contextmanager
def _without_loading(args: Namespace) -> Iterator[None]:
    """No checkpoint is read and no weight drawn at random while the skeleton is built."""
    kept = {name: getattr(args, name) for name in ("load", "pretrained_checkpoint")}
    kept["perform_initialization"] = args.perform_initialization
    args.load = args.pretrained_checkpoint = None
    args.perform_initialization = False
    try:
        yield
    finally:
        vars(args).update(kept)


def _carry_optimizer(job: Job, optimizer: Any) -> None:
    """Loss scaler and its counters, which every chained optimizer shares; and what the groups of
    parameters go by, which may be a checkpoint's and not the flags'."""
    old = HostState(job.model, job.optimizer, job.args).inner_optimizers()
    scalers = [o.grad_scaler for o in old if getattr(o, "grad_scaler", None)]
    given = [group for o in old for group in hyperparameters(o.optimizer.param_groups)]
    for new in HostState(job.model, optimizer, job.args).inner_optimizers():
        if scalers and getattr(new, "grad_scaler", None):
            new.grad_scaler.load_state_dict(scalers[0].state_dict())
        take_hyperparameters(new.optimizer.param_groups, given)


def _carry_schedule(old: Any, new: Any) -> None:
    """The schedule goes on as it is, and sets the new optimizer's learning rates.

    Megatron's own way, to make it anew from the arguments and load its position, is not taken: in a
    run counted in samples the arguments have a number of iterations by now, and would be read so.
    """
    vars(new).update({key: value for key, value in vars(old).items() if key != "optimizer"})
    new.step(0)


def _generator_states() -> tuple[Any, ...]:
    return (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    )


def _restore_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3])
