"""Whether a wanted layout is possible; asked before anything is built, freed or overwritten."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynatrain_megatron.adapters.arguments import LaunchArguments, model_shape
from dynatrain_megatron.adapters.batches import check_batches
from dynatrain_megatron.adapters.support import check_supported
from dynatrain_megatron.errors import LayoutError, SwitchRefused
from dynatrain_megatron.layout import ParallelLayout, derive


@dataclass(frozen=True)
class Target:
    """A layout that passed every check, and Megatron's arguments for it."""

    layout: ParallelLayout
    args: Namespace


def check_request(
    wanted: Mapping[str, Any] | str,
    *,
    launch: LaunchArguments,
    launch_layout: ParallelLayout,
    source: ParallelLayout,
    args: Namespace,
    consumed_samples: int | None,
    world: int | None = None,
    rank: int | None = None,
) -> Target:
    """Check a request against everything it needs; local, the same answer on every rank.

    ``consumed_samples`` is how many the run will have trained on when the layout changes; a process
    that has no part in the run yet does not know (None), and leaves batches to the others.
    ``world`` is the number of ranks it will have, ``rank`` this process's there, by default those
    it has.
    Raises :class:`SwitchRefused` with the rule that stands against it and both values.
    """
    try:
        layout = derive(launch_layout, wanted, args.world_size if world is None else world)
        layout.check(model_shape(args, launch))
        if consumed_samples is not None:
            check_batches(args, source, layout, consumed_samples)
    except LayoutError as error:
        raise SwitchRefused(str(error), f"the job stays in layout {source}") from error
    check_supported(args, source, layout)
    try:
        target = Target(layout, launch.validated(layout, args, rank))
    except LayoutError as error:
        raise SwitchRefused(str(error), f"the job stays in layout {source}") from error
    # What a flag means may depend on the layout: weight shards beyond tp are none in a larger tp.
    check_supported(target.args, source, layout)
    return target
