"""The advisor against Megatron itself: its validation, its defaults, its parsed arguments."""

from __future__ import annotations

import sys

import pytest

from dynatrain_megatron import platform
from dynatrain_megatron.adapters.arguments import LaunchArguments
from dynatrain_megatron.advisor import (
    Workload,
    feasible,
    layout_options,
    read_flags,
    workload_of,
)
from dynatrain_megatron.errors import LayoutError
from tests.adapters.test_layouts import LLAMA, MOE, SHARED
from tests.ranks import run_ranks
from tests.shapes.test_rosters import LATENT


@pytest.mark.host
@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        (LLAMA, (6, 8)),
        (MOE, (8, 12)),
        ([*SHARED, "--decoder-first-pipeline-num-layers", "1"], (4,)),
        (LATENT, (6,)),
    ],
    ids=["llama", "experts", "a first stage of its own", "latent"],
)
def test_megatron_takes_every_layout(flags: list[str], worlds: tuple[int, ...]) -> None:
    def worker(rank: int) -> tuple[int, list[str], Workload, Workload]:
        from megatron.training.arguments import parse_args

        sys.argv = ["pretrain", *flags, *platform.current().default_flags(flags)]
        launch = LaunchArguments.capture(parse_args(), {})
        read = read_flags(sys.argv[1:])
        workload, base = workload_of(read), layout_options(read)
        refused, count = [], 0
        for world in worlds:
            for layout in feasible(workload, world, gpus_per_node=4, base=base):
                count += 1
                try:
                    validated = launch.validated(layout, launch.parsed)
                except LayoutError as error:
                    refused.append(str(error))
        return count, refused, workload, workload_of(validated, launch.parsed)

    ((count, refused, workload, of_job),) = run_ranks(1, worker)
    assert count > 10 and refused == []
    assert of_job == workload
