"""Any rank of any layout, built by Megatron itself in one process, without its neighbours.

torch's ``fake`` process groups know how many ranks there are and which of them this is, and move
nothing. In such a world Megatron makes its groups, model, gradient buffers and optimizer for one
rank in some milliseconds, then the world is thrown away and the next rank's is made::

    job = DryJob([*TINY_LLAMA, "--bf16"])
    source, target = job.world("tp4-pp2-cp2"), job.world("tp2-cp4")

What was built keeps its memory, so the state of all ranks of two layouts can be described, planned
and moved (:func:`move`) within one process. Collectives answer with what they were given: nothing
may depend on their results.

All of it runs inside a forked rank, ``run_ranks(1, …)``, so that the tests' own process stays
clean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from dynatrain_megatron import platform
from dynatrain_megatron.adapters import groups, skeleton
from dynatrain_megatron.adapters.arguments import LaunchArguments
from dynatrain_megatron.adapters.state import HostState, merge_steps
from dynatrain_megatron.engine import Fragments, FragmentsBuilder, Transport, execute
from dynatrain_megatron.engine.fingerprint import check_received, fingerprint
from dynatrain_megatron.engine.replicas import check_replicas
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Plan, PlanOptions, Topology, make_plan
from dynatrain_megatron.vps import RosterSet
from dynatrain_megatron.vps.roster import union_of_tensors
from tests.engine.test_transport import on_threads

PADDED_VOCAB_SIZE = 1024

ModelProvider = Callable[..., Any]
"""What Megatron's ``get_model`` asks for a stage of the model."""


@dataclasses.dataclass(frozen=True)
class DryRank:
    """What one rank holds in a layout: Megatron's objects, and our description of their state."""

    rank: int
    layout: ParallelLayout
    args: Namespace
    model: list[Any]
    optimizer: Any
    state: HostState
    fragments: Fragments


class DryJob:
    """A job's flags, and through them any rank of it in any layout.

    ``provider`` builds the model; by default Megatron does, from its arguments. Call inside a
    forked rank.
    """

    def __init__(self, flags: Sequence[str], provider: ModelProvider | None = None) -> None:
        from megatron.training.arguments import parse_args

        argv = [*flags, "--disable-gloo-process-groups"]
        sys.argv = ["pretrain", *argv, *platform.current().default_flags(argv)]
        self.launch = LaunchArguments.capture(parse_args(), {})
        self.provider = provider

    def world(self, layout: ParallelLayout | str) -> list[DryRank]:
        """All ranks of a layout."""
        if isinstance(layout, str):
            layout = ParallelLayout.parse(layout)
        return [self.build(layout, rank) for rank in range(layout.world)]

    def build(self, layout: ParallelLayout, rank: int) -> DryRank:
        """One rank of a layout; raises what Megatron or :meth:`HostState.fragments` raises."""
        with self._in_world(layout, rank) as args:
            model, optimizer = self._model_and_optimizer()
            state = HostState(model, optimizer, args)
            state.allocate_moments()
            return DryRank(rank, layout, args, model, optimizer, state, state.fragments())

    @contextlib.contextmanager
    def _in_world(self, layout: ParallelLayout, rank: int) -> Iterator[Namespace]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        live = Namespace(rank=rank, global_batch_size=self.launch.parsed.global_batch_size)
        args = self.launch.validated(layout, live)
        args.padded_vocab_size = PADDED_VOCAB_SIZE
        args.perform_initialization = False
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        try:
            _set_globals(args)
            yield args
        finally:
            dist.destroy_process_group()

    def _model_and_optimizer(self) -> tuple[list[Any], Any]:
        from megatron.core.enums import ModelType
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training import argument_utils, get_args, training

        args = get_args()
        built_from: dict[str, Any]
        if self.provider is None:
            config = argument_utils.gpt_config_from_args(args)
            container = argument_utils.pretrain_cfg_container_from_args(args, config)
            built_from = {"cfg_container": container}
        else:
            built_from = {"model_provider_func": self.provider}
        model, optimizer, _ = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            **built_from,
        )
        return model, optimizer


def move(
    source: Sequence[DryRank], target: Sequence[DryRank], options: PlanOptions | None = None
) -> Plan:
    """Plan the way from one world to another and carry it out, a thread for each rank.

    The bridge has as many ranks as the larger world; a rank that is not in a world holds nothing
    there. Replicas and bits are verified as in a switch, and step counts go along. Returns the
    plan, whose bytes were really sent.
    """
    size = max(len(source), len(target))
    old, new = _on_bridge(source, size), _on_bridge(target, size)
    tensors = union_of_tensors([fragments.roster for fragments in (*old, *new)])
    before = RosterSet.merge([fragments.roster for fragments in old], tensors)
    after = RosterSet.merge([fragments.roster for fragments in new], tensors)
    plan = make_plan(before, after, Topology.single_node(size), options or PlanOptions())

    def rank(transport: Transport) -> tuple[int, str, str]:
        own = old[transport.rank], new[transport.rank]
        check_replicas(before, own[0], transport, timeout_s=30)
        report = execute(plan, *own, transport, timeout_s=30)
        check_received(plan, *own, transport, timeout_s=30)
        marks = [
            fingerprint(rosters, fragments, transport, timeout_s=30)[0]
            for rosters, fragments in zip((before, after), own, strict=True)
        ]
        return report.sent_bytes, marks[0], marks[1]

    done = on_threads(size, rank)
    assert {mark for _, *marks in done for mark in marks} == {done[0][1]}
    assert sum(sent for sent, _, _ in done) == plan.moved_bytes == plan.lower_bound_bytes
    steps = merge_steps(rank.state.steps() for rank in source)
    for each in target:
        each.state.restore_steps(steps)
    return plan


def _on_bridge(world: Sequence[DryRank], size: int) -> list[Fragments]:
    absent = [FragmentsBuilder().build() for _ in range(size - len(world))]
    return [rank.fragments for rank in world] + absent


def _set_globals(args: Namespace) -> None:
    """What Megatron's prologue leaves behind, for this rank of this layout."""
    from megatron.training import global_vars
    from megatron.training.initialize import _set_random_seed

    global_vars.set_args(args)
    if global_vars._GLOBAL_TIMERS is None:
        global_vars._set_timers(args)
    skeleton.set_microbatches(args)
    groups.install(groups.wanted(args, None, None, args.rank).make(dist.new_group))
    _set_random_seed(args.seed, args.data_parallel_random_init, False, False)
