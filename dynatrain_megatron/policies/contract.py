"""What a policy is given, what it may answer, and how one is loaded and asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from dynatrain_megatron.advisor import Machine, Workload
from dynatrain_megatron.config import ScheduleStep
from dynatrain_megatron.errors import ConfigError, LayoutError, SwitchRefused, did_you_mean
from dynatrain_megatron.layout import ParallelLayout, read_changes


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """A job at a step boundary, as plain data; everything a policy may decide by.

    ``iteration`` counts the steps done, ``previous_iteration`` those done when this process asked
    the policy before, or began to train. ``time_s`` is the time of day in seconds since 1970,
    ``step_s`` the mean time of a step since then, with all that came between. ``layout`` is the one
    in force, ``launch_layout`` that of the launch, from which missing keys of a layout come.
    ``waiting`` is the number of processes that are ready to join, ``leaving`` are the ranks that
    gave notice. ``metrics`` are the last step's, by the names of Megatron's log: ``learning rate``,
    ``grad norm`` where there is one, and losses (``lm loss``, …) where rank 0 has them, which with
    pipeline stages it has not. ``schedule`` is the configured one. ``refused`` are answers that
    were refused since processes last came or went. ``workload`` and ``machine`` are what the
    advisor needs; the first is None for models it does not know.
    """

    iteration: int
    layout: ParallelLayout
    launch_layout: ParallelLayout
    previous_iteration: int = 0
    time_s: float = 0.0
    step_s: float | None = None
    waiting: int = 0
    leaving: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    schedule: tuple[ScheduleStep, ...] = ()
    refused: tuple[Mapping[str, object] | str, ...] = ()
    workload: Workload | None = None
    machine: Machine = field(default_factory=Machine)

    @property
    def world(self) -> int:
        """Number of ranks now."""
        return self.layout.world

    @property
    def capacity(self) -> int:
        """Number of ranks there could be: those that stay and those that wait."""
        return self.world - len(self.leaving) + self.waiting


Answer = ParallelLayout | Mapping[str, object] | str | None
"""A layout, as a schedule has it or as a value; None where the job should go on as it is."""

Policy = Callable[[PolicyContext], Answer]
"""Called on rank 0 at every step boundary, while all ranks wait: it should take no time."""


def load_policy(text: str) -> Policy:
    """The policy that ``package.module:function`` names; any callable object will do.

    Raises ConfigError, also where the module itself fails.
    """
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise ConfigError(f"policy={text} is not of the form package.module:function")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"policy={text}: module {error.name!r} is not found; it must be where Python looks for "
            f"modules (add its folder to PYTHONPATH)"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"policy={text}: module {module_name!r} fails with {_told(error)}"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            hint = did_you_mean(name, [known for known in dir(found) if known[0] != "_"])
            raise ConfigError(f"policy={text}: {module_name!r} has no {name!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(
            f"policy={text} is {type(found).__name__}, which cannot be called; name a function"
        )
    policy: Policy = found
    return policy


def ask_policy(policy: Policy, context: PolicyContext) -> dict[str, object] | str | None:
    """What a policy wants, in the form of a schedule's layouts; None where it wants nothing.

    Raises SwitchRefused where it fails or answers with something else: the job can go on.
    """
    try:
        answer = policy(context)
    except SwitchRefused:
        raise
    except Exception as error:
        raise SwitchRefused(
            f"the policy failed at iteration {context.iteration} with {_told(error)}",
            f"the job stays in layout {context.layout}",
        ) from error
    if answer is None:
        return None
    if isinstance(answer, ParallelLayout):
        return as_changes(answer)
    try:
        read_changes(answer)
    except LayoutError as error:
        raise SwitchRefused(
            f"the policy's answer at iteration {context.iteration} is not a layout: {error}",
            f"the job stays in layout {context.layout}",
        ) from error
    return answer if isinstance(answer, str) else dict(answer)


def as_changes(layout: ParallelLayout) -> dict[str, object]:
    """All that a layout says, as changes: nothing is left to follow from the launch's."""
    named: dict[str, object] = {one.name: getattr(layout, one.name) for one in fields(layout)}
    return named | {"world": layout.world}


def first_of(*policies: Policy) -> Policy:
    """Asks one policy after the other; the first that wants a layout decides."""

    def ask(context: PolicyContext) -> Answer:
        for policy in policies:
            answer = policy(context)
            if answer is not None:
                return answer
        return None

    return ask


def _told(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
