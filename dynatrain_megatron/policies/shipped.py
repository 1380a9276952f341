"""The policies that come with the package; pure functions of their context."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from dynatrain_megatron.advisor import Advised, Machine, Workload, advise, estimate_memory
from dynatrain_megatron.errors import ConfigError, LayoutError, SwitchRefused
from dynatrain_megatron.layout import ParallelLayout, read_changes
from dynatrain_megatron.policies.contract import Answer, Policy, PolicyContext, as_changes

FOLLOWED_AXES = ("tp", "pp", "ep")
"""What follow_capacity varies beside dp; other degrees are the launch's where possible."""


def schedule(context: PolicyContext) -> Answer:
    """The configured schedule: of the steps due since the policy was last asked, the last."""
    due = [
        step.layout_changes
        for step in context.schedule
        if context.previous_iteration < step.iteration <= context.iteration
    ]
    return due[-1] if due else None


def alternate(
    one: str | Mapping[str, object], other: str | Mapping[str, object], *, every: int
) -> Policy:
    """A policy of two phases in turn, each ``every`` steps long, in two layouts.

    For jobs that generate in one layout and train in another, say. The job is launched in the
    first. Raises ConfigError for a wrong layout or number.
    """
    if type(every) is not int or every < 1:
        raise ConfigError(f"every={every!r} must be a whole number of steps of at least 1")
    for layout in (one, other):
        try:
            read_changes(layout)
        except LayoutError as error:
            raise ConfigError(f"alternate: {layout!r} is not a layout: {error}") from error

    def policy(context: PolicyContext) -> Answer:
        now, before = (at // every % 2 for at in (context.iteration, context.previous_iteration))
        return (one, other)[now] if now != before else None

    return policy


def follow_capacity(context: PolicyContext) -> Answer:
    """Always as many processes as there are, in the layout that the advisor finds best for them.

    Where nobody waits and nobody leaves, nothing changes. Numbers of ranks that no layout allows
    are passed over for the next smaller one; processes beyond that go on waiting. Where as many
    come as go, the layout in force is kept. Layouts that were refused are not asked for again.

    Memory is a limit, or the estimate for the layout in force where that is above it. Raises
    SwitchRefused where ranks leave and no layout is left, or the model is unknown to the advisor.
    """
    if not (context.waiting or context.leaving) or context.capacity < 1:
        return None
    for world in range(context.capacity, 0, -1):
        if world == context.world and not context.leaving:
            return None  # those who wait are of no use yet
        found = _best(context, world)
        if found is not None:
            return found
    if not context.leaving:
        return None
    raise SwitchRefused(
        f"no layout of {context.capacity} ranks or fewer fits model, batch and memory",
        "let fewer ranks leave, or save a checkpoint before they do",
    )


def _best(context: PolicyContext, world: int) -> dict[str, object] | None:
    """What to ask for on so many ranks; None where there is nothing."""
    if world == context.world:
        kept = as_changes(context.layout)
        if kept not in context.refused:
            return kept
    if context.workload is None:
        raise SwitchRefused(
            "follow_capacity needs the sizes of the model, which the advisor does not know",
            "name layouts yourself, by a schedule or a policy of your own",
        )
    machine = _relaxed(context.machine, context.workload, context.layout)
    for advice in _advised(context.workload, world, machine, context.launch_layout).fitting:
        changes = as_changes(advice.layout)
        if changes not in context.refused:
            return changes
    return None


@lru_cache(maxsize=128)
def _advised(workload: Workload, world: int, machine: Machine, base: ParallelLayout) -> Advised:
    """The same question comes at every boundary for as long as somebody waits in vain."""
    return advise(workload, world, machine, base=base, axes=FOLLOWED_AXES)


def _relaxed(machine: Machine, workload: Workload, layout: ParallelLayout) -> Machine:
    """The machine with room for a layout that runs on it, whatever that is estimated at."""
    return machine.with_room_for(estimate_memory(workload, layout).total)
