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
from dynatrain_megatron.plugin.session import Session


class Hook(NamedTuple):
    """One host function: where it lives, the session's method that gets the call, and why."""

    module: str
    name: str
    handler: str
    why: str


HOOKS: tuple[Hook, ...] = (
    Hook(
        "megatron.training.arguments",
        "validate_args",
        "on_validate_args",
        "keeps the launch flags as parsed, from which a target's arguments are made",
    ),
    Hook(
        "megatron.training.training",
        "pretrain",
        "on_pretrain",
        "names the dataset provider and the embedding ranks",
    ),
    Hook(
        "megatron.training",
        "pretrain",
        "on_pretrain",
        "the same function, as scripts import it",
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
    ),
    Hook(
        "megatron.training.training",
        "checkpoint_and_decide_exit",
        "on_step_end",
        "is the last call of each iteration: the step boundary",
    ),
    Hook(
        "megatron.training.training",
        "training_log",
        "on_training_log",
        "counts the step after a switch as the first one otherwise, and sees each step's loss",
    ),
    Hook(
        "megatron.training.training",
        "evaluate_and_print_results",
        "on_evaluate",
        "is given the launch's iterators by pretrain, after train has returned",
    ),
    Hook(
        "megatron.training.training",
        "save_checkpoint_and_time",
        "on_save",
        "is given the launch's iterator by pretrain, after train has returned",
    ),
)

_originals: dict[Hook, Callable[..., Any]] = {}


def attach(config: DynaTrainConfig) -> Session:
    """Hook into Megatron for this process; before its arguments are parsed. Not a collective.

    Attaching twice replaces the session. Raises :class:`HostMismatch` naming what the installed
    Megatron lacks; nothing is replaced then.
    """
    detach()
    found = {hook: _find(hook) for hook in HOOKS}
    session = Session(config)
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
    module = importlib.import_module(hook.module)
    found = getattr(module, hook.name, None)
    if not callable(found):
        raise HostMismatch(
            f"{hook.module}.{hook.name} is missing in the installed Megatron; the plugin needs it "
            f"because it {hook.why}; install a megatron-core version named in the README"
        )
    return found


def _wrap(original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the original's signature; the handler gets its arguments by name."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        return handler(original, call)

    return hooked
