"""Real Megatron jobs to measure on: forked CPU ranks, every object Megatron's own, no training.

A job starts as a training run does, by the package's own entry with the plugin attached. Where
Megatron would train, the benchmark gets the :class:`Job` in its place. Parameters are as Megatron
draws them at random; moments are made of them, so that replicas are equal as after real steps.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import run_ranks

from dynatrain_megatron import platform
from dynatrain_megatron.adapters import arguments, groups, skeleton
from dynatrain_megatron.adapters.built import BuiltCache
from dynatrain_megatron.adapters.job import BoundPlans, Job
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.elastic import records
from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.store import JobStore
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.engine import Fragments, Transport, connect
from dynatrain_megatron.engine.memory import Dropped, release
from dynatrain_megatron.engine.unwritten import Unwritten
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import (
    Plan,
    PlanCache,
    PlanOptions,
    Recent,
    Topology,
    make_plan,
)
from dynatrain_megatron.plugin.placing import Placing
from dynatrain_megatron.transition import Target, check_request, switch
from dynatrain_megatron.transition.prepare import (
    Wire,
    build,
    make_bridge,
    prepare,
)
from dynatrain_megatron.transition.switch import SwitchOptions, SwitchReport
from dynatrain_megatron.vps import Roster, RosterSet
from dynatrain_megatron.vps.roster import union_of_tensors
from dynatrain_megatron.vps.tensors import StateKind

RANKS = 4
TIMEOUT_S = 300.0
_BATCH, _ITERATION = 8, 10
_MESSAGE_BYTES = 16 << 20
_CPU = torch.device("cpu")
WIRE = Wire(EngineTransport.auto, 256 << 20, TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder of the Llama family; ``experts`` 0 is dense, ``ffn`` else the size of each."""

    layers: int
    hidden: int
    ffn: int
    heads: int = 16
    experts: int = 0
    vocab: int = 8192

    @property
    def numel(self) -> int:
        """Parameters, but for norms."""
        attention = 3 * self.hidden**2  # half as many key and value heads as query heads
        mlp = 3 * self.hidden * self.ffn * max(1, self.experts) + self.experts * self.hidden
        return self.layers * (attention + mlp) + 2 * self.vocab * self.hidden

    def flags(self) -> list[str]:
        """Megatron's flags; the layout's and the dtype's are for the caller to add."""
        text = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn}"
            f" --num-attention-heads {self.heads} --group-query-attention"
            f" --num-query-groups {self.heads // 2} --seq-length 64 --max-position-embeddings 64"
            f" --micro-batch-size 1 --global-batch-size {_BATCH} --train-iters {2 * _ITERATION}"
            " --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine"
            f" --mock-data --tokenizer-type NullTokenizer --vocab-size {self.vocab - 1}"
            " --normalization RMSNorm --swiglu --disable-bias-linear"
            " --position-embedding-type rope --untie-embeddings-and-output-weights"
            " --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer"
            " --eval-iters 0 --eval-interval 1000 --num-workers 0 --no-load-rng --no-save-rng"
        )
        if self.experts:
            text += (
                f" --num-experts {self.experts} --moe-router-topk 2 --moe-router-dtype fp32"
                f" --moe-ffn-hidden-size {self.ffn} --moe-token-dispatcher-type alltoall"
            )
        return text.split()


DENSE = {
    "10M": Model(8, 256, 704, heads=8),
    "30M": Model(8, 512, 1408, heads=8),
    "110M": Model(8, 1024, 2816),
    "200M": Model(16, 1024, 2816),
    "380M": Model(16, 1408, 3872),
}
MOE = {
    "10M": Model(8, 192, 264, heads=8, experts=8),
    "80M": Model(8, 512, 704, heads=8, experts=8),
    "180M": Model(8, 768, 1056, heads=8, experts=8),
}


def layout_flags(layout: ParallelLayout) -> list[str]:
    """Megatron's flags for the degrees that the benchmarks launch in."""
    text = (
        f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}"
        f" --expert-model-parallel-size {layout.ep}"
    )
    if layout.vpp:
        text += f" --num-virtual-stages-per-pipeline-rank {layout.vpp}"
    if layout.etp != layout.tp:
        text += f" --expert-tensor-parallel-size {layout.etp}"
    return text.split() + ["--sequence-parallel"] * layout.sp


def run_on_ranks[Result](
    argv: Sequence[str], body: Callable[[Job], Result], *, timeout_s: float
) -> list[Result]:
    """``body`` at a step boundary of a job with these flags, on every rank; results by rank."""
    return run_ranks(RANKS, lambda _: run_job(argv, body), timeout_s=timeout_s)


def run_job[Result](argv: Sequence[str], body: Callable[[Job], Result]) -> Result:
    """One rank of a job: Megatron's whole prologue, then ``body`` where it would train."""
    platform.install("cpu")  # before Megatron is imported
    from megatron.training import training

    from dynatrain_megatron.plugin import attach, entry, pretrain_gpt

    found: list[Result] = []

    @functools.wraps(training.train)  # hooks read arguments by name
    def instead_of_training(*_: Any, **__: Any) -> tuple[int, float]:
        job = session.job
        assert job is not None
        found.append(body(job))
        return job.iteration, job.num_flops

    training.train = instead_of_training
    config = entry.prepare([*argv, "--dynatrain", "platform=cpu"])
    assert config is not None
    session = attach(config)
    pretrain_gpt._train()
    return found[0]


def fill(job: Job) -> None:
    """Make the job look as after some steps: a position, moments, step counts."""
    job.iteration = job.args.iteration = _ITERATION
    job.args.consumed_train_samples = _ITERATION * _BATCH
    state = HostState(job.model, job.optimizer, job.args)
    state.allocate_moments()
    for shard in state.shards():
        main = shard.states[StateKind.MAIN_PARAM]
        torch.mul(main, 0.01, out=shard.states[StateKind.EXP_AVG])
        torch.mul(main, main, out=shard.states[StateKind.EXP_AVG_SQ])
        shard.inner.state[shard.key]["step"].fill_(_ITERATION)


# ------------------------------------------------------------------------- switches


class Switched(NamedTuple):
    """One switch as this rank saw it; ``resident`` is what its memory grew by at the most, bytes.

    ``stall_s`` is the time from the check of the request to the end of the switch on all ranks. Of
    the seconds ``other`` are those in no phase, and those this rank waited for others at the end.
    """

    report: SwitchReport
    stall_s: float
    resident: int


def switch_to(
    job: Job, layout: str, options: SwitchOptions, placing: Placing | None = None
) -> Switched:
    """Switch as a running job does; collective. With ``placing`` processes may take other ranks."""
    memory = platform.current()
    memory.empty_cache()
    dist.barrier()
    memory.reset_peak()
    before = memory.allocated_bytes()
    begin = time.perf_counter()
    change, target = change_in_place(job), _target(job, layout)
    if placing is not None:
        change = replace(change, target=placing.order(job.processes, target.layout).target)
        target = _target(job, layout, change.target.index(process_uid()))
    prepared = prepare(job, change, target)
    prepare_s = time.perf_counter() - begin
    report = switch(job, target, options, prepared)
    dist.barrier()
    stall_s = time.perf_counter() - begin
    report.seconds = {"prepare": prepare_s, **report.seconds}
    report.seconds["other"] = stall_s - sum(report.seconds.values())
    return Switched(report, stall_s, memory.peak_bytes() - before)


def change_in_place(job: Job) -> Change:
    """The next switch of a job whose processes stay as they are; collective over them."""
    job.num_changes += 1
    key, client = f"switch/{job.num_changes}/in-place", _store(job).here()
    if job.processes[0] == process_uid():
        ids = _store(job).new_world_ids(2)
        change = Change(job.num_changes, job.processes, job.processes, *ids)
        client.set(key, change.to_json())
    client.wait([key], timedelta(seconds=TIMEOUT_S))
    return Change.from_json(bytes(client.get(key)))


def placing_of(job: Job) -> Placing:
    """What finds placements for a job that has not switched yet."""
    return Placing(job, job.baseline, None)


def _target(job: Job, layout: str, rank: int | None = None) -> Target:
    args = job.args
    return check_request(
        layout,
        launch=job.launch,
        launch_layout=ParallelLayout(dp=RANKS),  # layouts are written in full here
        source=job.layout,
        args=args,
        consumed_samples=args.consumed_train_samples,
        rank=rank,
    )


def bridge(transport: EngineTransport) -> Transport:
    """A transport over a new group of all ranks; collective, before the job's first switch."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return connect(group, _CPU, transport, timeout_s=TIMEOUT_S)


def use(job: Job, transport: Transport) -> None:
    """Let the job's next switches go over ``transport``."""
    if job.bridge is None:
        job.bridge = make_bridge(change_in_place(job), _store(job), WIRE, "gloo")
    job.bridge = replace(job.bridge, transport=transport)
    job.bound_plans = BoundPlans()  # which were made for the one before


def _store(job: Job) -> JobStore:
    assert job.store is not None
    return job.store


def keep_layouts(job: Job, most: int) -> None:
    """Forget every layout left, and keep so many of those left from now on; collective."""
    assert job.built is not None
    for built in job.dormant:
        built.end(job.built.world.held.values())
    job.dormant = BuiltCache(most)
    job.rosters, job.plans = Recent(8), PlanCache()
    job.bound_plans = BoundPlans()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds from all ranks' begin to all ranks' end, and what ``work`` returned; collective."""
    dist.barrier()
    begin = time.perf_counter()
    found = work()
    dist.barrier()
    return time.perf_counter() - begin, found


def bandwidth(transport: Transport) -> float:
    """Bytes a second, each way, of the slowest rank while all send and receive; collective.

    Messages are contiguous and memory is warm: the median of five after one that is not counted.
    """
    peers = [rank for rank in range(transport.size) if rank != transport.rank] * 2
    out, into = ([torch.ones(_MESSAGE_BYTES, dtype=torch.uint8) for _ in peers] for _ in range(2))
    sends, receives = (list(zip(peers, tensors, strict=True)) for tensors in (out, into))

    def exchange() -> None:
        transport.exchange(sends, receives, timeout_s=TIMEOUT_S)

    seconds = [timed(exchange)[0] for _ in range(6)][1:]
    own = torch.tensor(len(peers) * _MESSAGE_BYTES / statistics.median(seconds))
    dist.all_reduce(own, dist.ReduceOp.MIN)
    return float(own)


# ------------------------------------------------------------- two layouts at one time


class Pair(NamedTuple):
    """The job's state, and room for it in another layout, both whole."""

    source: HostState
    target: HostState


class _Undo(Exception):
    """Leaves the other layout."""


def beside[Result](job: Job, layout: str, body: Callable[[Pair], Result]) -> Result:
    """``body`` with another layout's objects built beside the job's, which stays as it is.

    The other layout's groups are in force inside, and torch knows both layouts'. Gradients are set
    aside meanwhile. Collective.
    """
    target = _target(job, layout)
    source = HostState(job.model, job.optimizer, job.args)
    gradients = Dropped(source.gradients())
    change, dormant, job.dormant = (
        change_in_place(job),
        job.dormant,
        BuiltCache(0),
    )
    prepared = prepare(job, change, target)
    job.dormant, in_force = dormant, records.in_force()
    worlds = build(prepared, _store(job), WIRE)
    assert worlds.world is not None
    found: list[Result] = []
    with contextlib.suppress(_Undo), skeleton.host_context(job):
        new_args = Namespace(**vars(target.args))
        arguments.carry_over(new_args, job.args, job.baseline)
        arguments.replace_in_place(job.args, new_args)
        worlds.world.install()
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag"):
            getattr(worlds.world.record, name).update(getattr(in_force, name))
        groups.install(worlds.world.groups)
        skeleton.set_microbatches(job.args)
        unwritten = Unwritten()
        made = skeleton.build(job, unwritten)
        new = HostState(made.model, made.optimizer, job.args)
        unwritten.take(new.tensors()).restore()  # copies of parameters have no values of their own
        unwritten.allocate_rest()
        release(new.gradients())
        found.append(body(Pair(source, new)))
        release(new.tensors())
        raise _Undo
    records.install(in_force)
    worlds.abandon()
    gradients.restore()
    return found[0]


def plan_between(
    old: Fragments, new: Fragments, transport: Transport, options: PlanOptions
) -> Plan:
    """This rank's part of the plan, rosters exchanged as in a switch; collective."""
    sides = []
    for fragments in (old, new):
        rows = transport.all_gather(fragments.roster.to_bytes(), timeout_s=TIMEOUT_S)
        sides.append([Roster.from_bytes(row) for row in rows])
    tensors = union_of_tensors([*sides[0], *sides[1]])
    before, after = (RosterSet.merge(side, tensors) for side in sides)
    topology = Topology.single_node(transport.size)
    return make_plan(before, after, topology, options, rank=transport.rank)
