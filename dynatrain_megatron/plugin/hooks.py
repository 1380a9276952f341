"""The names of Megatron's training loop that a switch needs to see, replaced and put back.

Each hook wraps one function of ``megatron.training`` and hands the call to the session; nothing
is patched at import, and a missing name raises instead of being made up.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from dynatrain_megatron.config import DynaTrainConfig
from dynatrain_megatron.errors import HostMismatch
from dynatrain_megatron.platform.versions import (
    ALL,
    Releases,
    megatron_release,
    megatron_version,
    problem_of,
)
from dynatrain_megatron.plugin.session import Session


class Hook(NamedTuple):
    """One host function: where it lives, the session's method that gets the call, and why.

    ``parameters`` are those of its parameters that the session reads or sets by name.
    """

    module: str
    name: str
    handler: str
    why: str
    parameters: tuple[str, ...] = ()
    releases: Releases = ALL


HOOKS: tuple[Hook, ...] = (
    Hook(
        "megatron.training.arguments",
        "validate_args",
        "on_validate_args",
        "keeps the launch flags as parsed, from which a target's arguments are made",
        ("args", "defaults"),
    ),
    Hook(
        "megatron.training.initialize",
        "validate_args",
        "on_validate_args",
        "is where older releases call it",
        ("args", "defaults"),
        Releases(before=(0, 18)),
    ),
    Hook(
        "megatron.training.training",
        "pretrain",
        "on_pretrain",
        "names the dataset provider and the embedding ranks",
        ("train_valid_test_dataset_provider", "get_embedding_ranks"),
    ),
    Hook(
        "megatron.training",
        "pretrain",
        "on_pretrain",
        "the same function, as scripts import it",
        ("train_valid_test_dataset_provider", "get_embedding_ranks"),
    ),
    Hook(
        "megatron.training.training",
        "setup_model_and_optimizer",
        "on_setup",
        "is called again, as the first time, to build the target",
    ),
    Hook(
        "megatron.training.training",
        "build_train_valid_test_data_iterators",
        "on_build_iterators",
        "is called again; the test iterator is seen nowhere else",
    ),
    Hook(
        "megatron.training.training",
        "train",
        "on_train",
        "is left and entered again around a switch",
        (
            *("model", "optimizer", "opt_param_scheduler", "config", "checkpointing_context"),
            *("train_data_iterator", "valid_data_iterator"),
        ),
    ),
    Hook(
        "megatron.training.training",
        "checkpoint_and_decide_exit",
        "on_step_end",
        "is the last call of each iteration: the step boundary",
        ("iteration", "num_floating_point_operations_so_far"),
    ),
    Hook(
        "megatron.training.training",
        "training_log",
        "on_training_log",
        "counts the step after a switch as the first one otherwise, and sees each step's loss",
        ("total_loss_dict", "loss_dict", "iteration", "grad_norm", "learning_rate"),
    ),
    Hook(
        "megatron.training.training",
        "evaluate_and_print_results",
        "on_evaluate",
        "is given the launch's iterators by pretrain, after train has returned",
        ("prefix", "data_iterator"),
    ),
    Hook(
        "megatron.training.training",
        "save_checkpoint_and_time",
        "on_save",
        "is given the launch's iterator by pretrain, after train has returned",
        ("iteration", "train_data_iterator"),
    ),
)

SWITCHES = Releases(since=(0, 18))
"""Where layouts can change; on older releases the plugin attaches and records."""

_originals: dict[Hook, Callable[..., Any]] = {}


def attach(config: DynaTrainConfig) -> Session:
    """Hook into Megatron for this process; before its arguments are parsed. Not a collective.

    Attaching twice replaces the session. Raises :class:`HostMismatch` naming what the installed
    Megatron lacks; nothing is replaced then.
    """
    detach()
    release = megatron_release()
    cannot_switch = ""
    if release not in SWITCHES:
        here = megatron_version()
        cannot_switch = f"layouts change from megatron-core 0.18 on, and this is {here}"
        if config.steps():
            raise HostMismatch(
                f"{cannot_switch}; take a newer one, or leave out schedule and target: the run is "
                "then only recorded"
            )
    found = {hook: _find(hook) for hook in HOOKS if release in hook.releases}
    session = Session(config)
    session.cannot_switch = cannot_switch
    for hook, original in found.items():
        handler = getattr(session, hook.handler)
        setattr(importlib.import_module(hook.module), hook.name, _wrap(original, handler))
        _originals[hook] = original
    return session


def detach() -> None:
    """Put every hooked name back; harmless when nothing is attached."""
    for hook, original in _originals.items():
        setattr(importlib.import_module(hook.module), hook.name, original)
    _originals.clear()


def _find(hook: Hook) -> Callable[..., Any]:
    problem = problem_of(f"{hook.module}.{hook.name}", hook.parameters)
    if problem is not None:
        raise HostMismatch(
            f"{problem}; the plugin needs it because it {hook.why}; "
            "install a megatron-core version named in the README"
        )
    found: Callable[..., Any] = getattr(importlib.import_module(hook.module), hook.name)
    return found


def _wrap(original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the original's signature; the handler gets its arguments by name."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        return handler(original, call)

    return hooked
