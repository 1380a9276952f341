"""How a process joins a running job: it starts as one of its ranks would, in a world by itself.

The job's card in the store says how it was launched. Megatron's whole prologue then runs in a world
of the launch's size whose groups move nothing, so that it waits for nobody; it reads no checkpoint
and no data, and what it builds has no memory. What it learned there by a collective is taken from
the job when it enters.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from dynatrain_megatron.adapters.arguments import LaunchArguments
from dynatrain_megatron.config import DynaTrainConfig, from_json, to_json
from dynatrain_megatron.elastic import fake
from dynatrain_megatron.elastic.directory import JobCard
from dynatrain_megatron.elastic.store import StoreAddress
from dynatrain_megatron.platform import current as current_platform

_OWN = ("rank", "world_size", "local_rank")
"""Arguments that differ among the processes of a job."""
_LIBRARIES = ("dynatrain-megatron", "megatron-core", "torch")


def card_of(name: str, launch: LaunchArguments, config: DynaTrainConfig) -> JobCard:
    """What a process must know, and have alike, to join this job."""
    flags = {
        name: repr(value)
        for name, value in vars(launch.parsed).items()
        if name not in _OWN and " at 0x" not in repr(value)
    }
    return JobCard(name, launch.parsed.world_size, flags, _versions(), to_json(config))


def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "absent"
    return found


class Joining:
    """A process that is to join the job whose store is at ``address``."""

    def __init__(self, config: DynaTrainConfig, *, timeout_s: float) -> None:
        """Read the job's card; raises :class:`WorldError` where no job answers."""
        assert config.elastic.join is not None
        self.address = StoreAddress.parse(config.elastic.join)
        self.card = JobCard.read(self.address, timeout_s=timeout_s)
        job = from_json(self.card.config)
        own = replace(job.elastic, join=config.elastic.join, on_leave=config.elastic.on_leave)
        self.config = replace(job, elastic=own, platform=config.platform, faults=config.faults)

    def enter_fake_world(self) -> None:
        """Be the last rank of the launch's world, before Megatron looks; once a process.

        Megatron takes this process's GPU only where it starts the world itself.
        """
        current_platform().take_device(int(os.environ.get("LOCAL_RANK", "0")))
        world = self.card.world
        os.environ.update(RANK=str(world - 1), WORLD_SIZE=str(world))
        fake.enter(world - 1, world)

    def refusals(self, launch: LaunchArguments) -> list[str]:
        """What this process was started with that differs from the job."""
        return self.card.differences(card_of(self.card.name, launch, self.config))

    @staticmethod
    def keep_quiet(args: Namespace) -> None:
        """Let the prologue write nothing and make no real groups; all this the job gives later."""
        args.use_gloo_process_groups = False
        args.tensorboard_dir = None
        args.wandb_project = ""

    @staticmethod
    def expect_to_train() -> None:
        """What Megatron learns by a broadcast that moves nothing here; the job knows better."""
        from megatron.training import get_args

        args = get_args()
        args.do_train = True
        args.do_valid = args.do_test = False
