"""One switch of a running job, on the same processes, at a step boundary.

::

    quiesce   finish what is in flight, describe the state as it lies       old groups in force
    replicas  if asked: what several ranks hold compared, refused where it differs
    groups    make the target's process groups aside, install them          new groups in force
    build     target model, optimizer, scheduler, iterators: empty
    plan      exchange rosters, every rank makes the same plan, digests compared
    memory    memory for what is moved, and where it must be, that of what has been moved freed
    move      pack, wire, unpack into the new objects; the old ones are only read
    rebuild   parameters gathered from main parameters
    verify    every receiver's bits against their sources', the whole against the whole
    commit    the host's objects become the new ones; old memory goes

Until commit the old state is whole: whatever raises before puts the host back as it was. Where
there is no memory for that, state moves in stages, and what has been read and verified is freed
(:mod:`.move`): from then on the switch must succeed, or the job ends.

The layout left stays dormant: where a switch comes back to one, groups and objects are there,
without memory, and rosters, plan and what the transfer copies are known.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from dynatrain_megatron.adapters import arguments, groups, skeleton
from dynatrain_megatron.adapters.built import Built, BuiltKey
from dynatrain_megatron.adapters.handover import finish_in_flight, hand_over
from dynatrain_megatron.adapters.job import Iterators, Job, RostersKey
from dynatrain_megatron.adapters.skeleton import become
from dynatrain_megatron.adapters.state import HostState, Steps, merge_steps
from dynatrain_megatron.config import EngineTransport, KeepSource
from dynatrain_megatron.engine import BoundPlan, Fragments, Transport, connect
from dynatrain_megatron.engine.fingerprint import Sums, fingerprint_of, own_sums
from dynatrain_megatron.engine.holdings import Holdings
from dynatrain_megatron.engine.memory import Dropped, Ledger, storage_sizes
from dynatrain_megatron.engine.replicas import check_replicas
from dynatrain_megatron.engine.unwritten import Unwritten
from dynatrain_megatron.errors import (
    ConfigError,
    SplitStateError,
    SwitchRefused,
    TransitionError,
)
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe import progress
from dynatrain_megatron.planner import PlanOptions, Topology, TopologyFile, place
from dynatrain_megatron.planner.checks import held_once
from dynatrain_megatron.planner.staged import StagedPlan
from dynatrain_megatron.planner.stages import Peak
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.transition.check import Target
from dynatrain_megatron.transition.keep import Free, decide
from dynatrain_megatron.transition.move import Frees, Move
from dynatrain_megatron.vps import Roster, RosterSet
from dynatrain_megatron.vps.roster import union_of_tensors

logger = logging.getLogger(__name__)

_RINGS_SHARE = 4  # the part of staging memory that a transport may hold is one of so many
_MESSAGE_CHARS = 500  # of a host's message; some print whole dictionaries
_MOST_RANKS_IN_MATRIX = 64  # a number for each pair of ranks is more than a line of a log should be


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """``verify`` False skips the fingerprints; ``timeout_s`` bounds each wait of the transfer.

    ``check_replicas`` compares what several ranks hold before anything is built. ``topology`` is
    what the user says of nodes and links. ``placement`` True works out what another placement of
    the processes would save, and says so; every process keeps its rank.
    """

    plan: PlanOptions
    transport: EngineTransport = EngineTransport.auto
    verify: bool = True
    keep_source: KeepSource = KeepSource.auto
    check_replicas: bool = False
    topology: TopologyFile | None = None
    placement: bool = False
    timeout_s: float = 600.0


@dataclass
class SwitchReport:
    """What a switch did, as the event log tells it; equal on every rank but for local bytes.

    ``schedule`` is what placed the messages, never ``auto``, ``predicted_s`` what it says beside
    the measured ``seconds["wire"]``. ``bytes_matrix`` is None with more than 64 ranks.
    """

    iteration: int
    source: str
    target: str
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    ops: int = 0
    rounds: int = 0
    schedule: str = ""
    predicted_s: float = 0.0
    stages: int = 1
    keep_source: str = ""
    peak_extra_bytes: int = 0
    planned_peak_extra_bytes: int = 0
    bound_peak_extra_bytes: int = 0
    fingerprint: dict[str, str] | None = None
    bytes_matrix: list[list[int]] | None = None
    placement: dict[str, Any] | None = None


class _Phases:
    """Times the phases of a switch and prints a line for each on rank 0."""

    def __init__(self, report: SwitchReport, rank: int) -> None:
        self._report = report
        self._rank = rank

    @contextlib.contextmanager
    def __call__(self, name: str, doing: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self._report.seconds[name] = self._report.seconds.get(name, 0.0) + seconds
        progress(self._rank, f"{name:8s} {seconds:7.3f} s  {doing}")


def switch(job: Job, target: Target, options: SwitchOptions) -> SwitchReport:
    """Take ``job`` from its layout to the target's; collective, on the main thread.

    Runs at a step boundary, outside ``train``. Raises :class:`SwitchRefused` where the state
    cannot be described (nothing was changed), :class:`TransitionError` where the transfer fails
    (the host's globals are put back; the old state is intact), and :class:`SplitStateError` where
    something fails after parts of the old state were freed.
    """
    frees = Frees()
    try:
        return _switch(job, target, options, frees)
    except Exception as error:
        if frees.begun:
            raise SplitStateError(
                f"the switch failed after parts of the old state had been freed: {error}; the "
                "state is split between two layouts, so the job must end. Start again from the "
                "last checkpoint; with engine.keep_source=always a switch can go back"
            ) from error
        raise


def _switch(job: Job, target: Target, options: SwitchOptions, frees: Frees) -> SwitchReport:
    rank = job.args.rank
    report = SwitchReport(job.iteration, str(job.layout), str(target.layout))
    phase = _Phases(report, rank)
    progress(rank, f"iteration {job.iteration}: {job.layout} -> {target.layout}")
    free = Free.now()
    source = job.built
    assert source is not None
    with phase("quiesce", "asynchronous saves finished, old state described"):
        finish_in_flight()
        current_platform().synchronize()
        bridge = _bridge(job, options)
        old = _holdings(source, _described(source, bridge, options.timeout_s))
        ledger, sizes = Ledger(source.state.tensors()), storage_sizes(source.state.tensors())
    if options.check_replicas:
        with phase("replicas", "what several ranks hold compared"):
            replicated = RosterSet.merge(_gather_rosters(old.fragments, bridge, options.timeout_s))
            check_replicas(replicated, old.fragments, bridge, timeout_s=options.timeout_s)
    with skeleton.host_context(job), _without_gradients(source.state):
        baseline = _install_arguments(job, target)
        ready = _ready(job, target.layout, phase, bridge, options.timeout_s)
        new_state, new = ready.built.state, ready.holdings
        ledger.watch(new_state.tensors())
        ledger.mark(ready.most_bytes)
        with phase("plan", "rosters exchanged, plan made"):
            try:
                planned = _planned(job, source, ready.built, old, new, free, bridge, options)
                steps = _exchange_steps(source.state.steps(), bridge, options.timeout_s)
            except SwitchRefused:
                ready.built.destroy()
                raise
            plan, rosters = planned.plan, planned.rosters
            if options.placement:
                report.placement = _what_placement_would_save(rosters, planned.topology, rank)
        frees.wanted = planned.kept is KeepSource.never
        give_back = current_platform().empty_cache
        move = Move(plan, old, new, ready.missing, ledger, frees, give_back, planned.bound)
        peak = move.planned(rosters, rank, bridge.held_bytes)
        if options.verify:
            with phase("verify", "old state hashed where ranks hold the same"):
                shared = ~(held_once(rosters[0]) & held_once(rosters[1]))
                before = own_sums(rosters[0], old.fragments, bridge.rank, chosen=shared)
        move.run(rosters, bridge, verify=options.verify, timeout_s=options.timeout_s)
        for name, seconds in move.seconds.items():
            report.seconds[name] = report.seconds.get(name, 0.0) + seconds
        if move.bound is not None:
            job.bound_plans.put(plan.plans[0], old.fragments, new.fragments, move.bound)
        with phase("rebuild", "parameters gathered from main parameters"):
            move.rebuild_begins()
            new_state.restore_steps(steps)
            rebuilt = new_state.rebuild_params()
        if options.verify:
            with phase("verify", "fingerprints compared"):
                after = own_sums(rosters[1], new.fragments, bridge.rank, chosen=shared)
                # The rest moved once from the only holder to the only holder: known by now.
                gave, got = move.sums(before, rosters[0])
                before[~shared], after[~shared] = gave[~shared], got[~shared]
                report.fingerprint = _compared(
                    rosters[0],
                    fingerprint_of(before, bridge, timeout_s=options.timeout_s),
                    fingerprint_of(after, bridge, timeout_s=options.timeout_s),
                )
    with phase("commit", "old memory released"):
        assert ready.iterators is not None
        destroyed = hand_over(job, ready.built, ready.iterators, baseline, sizes)
        for tensor in new_state.gradients():
            ready.missing.restore_one(tensor.untyped_storage(), zeros=True)
        ledger.watch(new_state.tensors())
        ledger.mark()
        num_groups = len(ready.built.groups.process_groups())
        report.groups = {
            "reused": num_groups * ready.woken,
            "created": num_groups * (not ready.woken),
            "destroyed": destroyed,
        }
        report.keep_source, report.stages = str(planned.kept), plan.stages.count
        report.peak_extra_bytes = ledger.peak_extra_bytes
        _fill_in(report, plan, move, peak, rebuilt, bridge, options.timeout_s)
    progress(
        rank,
        f"memory   {report.keep_source} kept, {report.stages} stages: at most "
        f"{report.peak_extra_bytes} bytes more on a rank (planned "
        f"{report.planned_peak_extra_bytes}, bound {report.bound_peak_extra_bytes})",
    )
    return report


def _bridge(job: Job, options: SwitchOptions) -> Transport:
    """The group that carries transfers and nothing else; made once for a set of processes."""
    if job.bridge is None:
        group = dist.new_group(group_desc="DYNATRAIN_BRIDGE")
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        device = current_platform().device
        try:
            job.bridge = connect(
                group,
                device,
                options.transport,
                timeout_s=options.timeout_s,
                ring_bytes=options.plan.staging_bytes // _RINGS_SHARE,
            )
        except SwitchRefused:
            dist.destroy_process_group(group)
            raise
    if job.topology is None:
        job.topology = _hosts_and_links(job.bridge, options.timeout_s)
    return job.bridge


def _described(built: Built, bridge: Transport, timeout_s: float) -> Fragments:
    """This rank's fragments, once every rank could describe its own; collective."""
    refusal, fragments = "", None
    try:
        fragments = built.fragments()
    except SwitchRefused as error:
        refusal = str(error)
    except Exception as error:  # Megatron's own description of a checkpoint fails for some models
        logger.warning("the state could not be described on this rank", exc_info=True)
        refusal = f"{type(error).__name__}: {str(error)[:_MESSAGE_CHARS]}"
    answers = bridge.all_gather(refusal.encode(), timeout_s=timeout_s)
    for rank, answer in enumerate(answers):
        if answer:
            raise SwitchRefused(f"rank {rank}: {answer.decode()}")
    assert fragments is not None
    return fragments


def _install_arguments(job: Job, target: Target) -> Namespace:
    """Put the target's arguments in force; returns their shallow copy as validated."""
    new = Namespace(**vars(target.args))
    baseline = Namespace(**vars(target.args))
    arguments.carry_over(new, job.args, job.baseline)
    arguments.replace_in_place(job.args, new)
    return baseline


@contextlib.contextmanager
def _without_gradients(state: HostState) -> Iterator[None]:
    """Give the gradients' memory back; if the body raises they are there again, as zeros."""
    dropped = Dropped(state.gradients())
    try:
        yield
    except BaseException:
        dropped.restore()
        raise


def _holdings(built: Built, fragments: Fragments, missing: Dropped | None = None) -> Holdings:
    return Holdings(
        fragments,
        gradients=built.state.gradients(),
        rebuilt=built.state.rebuilt(),
        everything=built.state.tensors(),
        missing=missing,
    )


class _Ready(NamedTuple):
    """The target on this rank, ready to be filled: built now, or ``woken``.

    ``missing`` are its storages without memory yet; ``most_bytes`` is what building took for a
    moment beside what it left.
    """

    built: Built
    woken: bool
    holdings: Holdings
    missing: Dropped
    most_bytes: int
    iterators: Iterators | None = None


def _ready(
    job: Job, layout: ParallelLayout, phase: _Phases, bridge: Transport, timeout_s: float
) -> _Ready:
    """Groups and objects of the target, once every rank could make its own; collective.

    Megatron says no to some layouts only while it builds modules. Then the groups go and the
    switch is refused on all ranks; before data is read, which takes all of them.
    """
    key = BuiltKey.of(layout, job.args)
    dormant = job.dormant.take(key)
    made, ready, problem = None, None, ""
    try:
        with phase("groups", "process groups made" if dormant is None else "process groups kept"):
            made = _groups(job) if dormant is None else dormant.groups
            groups.install(made)
        with phase("build", "model and optimizer of the target"):
            skeleton.set_microbatches(job.args)
            ready = _built(job, key, made) if dormant is None else _woken(job, dormant)
    except Exception as error:
        problem = _told(error)
    iterators = None
    with phase("build", "data iterators, and all ranks waited for"):
        problem = _any_problem(problem, bridge, timeout_s)
        if ready is not None and not problem:
            try:
                iterators = skeleton.take_position(job, ready.built.skeleton)
            except Exception as error:
                problem = _told(error)
            problem = _any_problem(problem, bridge, timeout_s)
    if problem:
        failed = dormant if ready is None else ready.built
        if failed is not None:
            failed.destroy()
        elif made is not None:
            groups.destroy(made)
        raise SwitchRefused(problem, f"the job stays in layout {job.layout}")
    assert ready is not None
    return ready._replace(iterators=iterators)


def _told(error: Exception) -> str:
    logger.warning("the target could not be built on this rank", exc_info=True)
    return f"{type(error).__name__}: {str(error)[:_MESSAGE_CHARS]}"


def _any_problem(own: str, bridge: Transport, timeout_s: float) -> str:
    """What keeps a rank from building the target; empty where all can. Collective."""
    for rank, problem in enumerate(bridge.all_gather(own.encode(), timeout_s=timeout_s)):
        if problem:
            return f"rank {rank} cannot build the target: {problem.decode()}"
    return ""


def _groups(job: Job) -> groups.Groups:
    recipe = job.recipe
    return groups.build(job.args, recipe.embedding_ranks, recipe.position_embedding_ranks)


def _built(job: Job, key: BuiltKey, made: groups.Groups) -> _Ready:
    unwritten = Unwritten()
    built = Built(key, made, skeleton.build(job, unwritten), job.args)
    with unwritten:
        fragments = built.fragments()
    missing = unwritten.take(built.written_later())
    unwritten.allocate_rest()
    built.note_as_built()
    become(job.config, built.skeleton.config)
    holdings = _holdings(built, fragments, missing)
    return _Ready(built, False, holdings, missing, unwritten.most_bytes)


def _woken(job: Job, dormant: Built) -> _Ready:
    become(job.config, dormant.skeleton.config)
    missing = dormant.wake()
    return _Ready(dormant, True, _holdings(dormant, dormant.fragments(), missing), missing, 0)


def _gather_rosters(fragments: Fragments, bridge: Transport, timeout_s: float) -> list[Roster]:
    rows = bridge.all_gather(fragments.roster.to_bytes(), timeout_s=timeout_s)
    read = {row: Roster.from_bytes(row) for row in set(rows)}  # replicas have equal ones
    return [read[row] for row in rows]


def _merged(old: list[Roster], new: list[Roster]) -> tuple[RosterSet, RosterSet]:
    """Both roster sets over one list of logical tensors; all ranks see the same rosters.

    Raises :class:`SwitchRefused` where two of them contradict each other.
    """
    try:
        tensors = union_of_tensors([*old, *new])
    except ValueError as error:
        raise SwitchRefused(str(error), "the job stays in its layout") from error
    return RosterSet.merge(old, tensors), RosterSet.merge(new, tensors)


def _hosts_and_links(bridge: Transport, timeout_s: float) -> tuple[Topology, tuple[str, ...]]:
    """What can be found out of nodes and links, and every rank's host; collective."""
    links = current_platform().links()
    own = json.dumps([socket.gethostname(), links.near_gb_s, links.rails_gb_s]).encode()
    rows = bridge.all_gather(own, timeout_s=timeout_s)
    hosts, near, rails = zip(*map(json.loads, rows), strict=True)
    return Topology.from_hosts(hosts).with_devices(near, rails), hosts


def _what_placement_would_save(
    rosters: tuple[RosterSet, RosterSet], topology: Topology, rank: int
) -> dict[str, Any]:
    """Bytes moved and predicted seconds with the best placement and as it is; pure but for a line.

    Processes cannot take other ranks yet.
    """
    found = place(*rosters, topology)
    progress(
        rank,
        f"another placement would move {found.moved_bytes} bytes instead of "
        f"{found.identity_bytes}; every process keeps its rank",
    )
    return {
        "applied": False,
        "bytes": {"best": found.moved_bytes, "identity": found.identity_bytes},
        "seconds": {"best": found.seconds, "identity": found.identity_seconds},
    }


def _rosters(
    job: Job, source: Built, target: Built, bridge: Transport, timeout_s: float
) -> tuple[RosterSet, RosterSet]:
    """Both roster sets, exchanged only where they are not those of a switch before; collective.

    All ranks know the same ones, since all have made the same switches. Raises
    :class:`SwitchRefused` on all ranks alike.
    """
    own = json.dumps([source.digest, target.digest]).encode()
    digests = [json.loads(row) for row in bridge.all_gather(own, timeout_s=timeout_s)]
    key = RostersKey(*(tuple(column) for column in zip(*digests, strict=True)))
    known = job.rosters.get(key)
    if known is None:
        old, new = (
            _gather_rosters(built.described, bridge, timeout_s) for built in (source, target)
        )
        known = _merged(old, new)
        job.rosters.put(key, known)
    return known


class _Planned(NamedTuple):
    """A plan, what it was made of, and whether the old state is ``kept`` until all is done.

    ``bound`` is this rank's part in memory where all ranks know theirs from a switch before.
    """

    plan: StagedPlan
    rosters: tuple[RosterSet, RosterSet]
    topology: Topology
    kept: KeepSource
    bound: BoundPlan | None


def _planned(
    job: Job,
    source: Built,
    target: Built,
    old: Holdings,
    new: Holdings,
    free: Free,
    bridge: Transport,
    options: SwitchOptions,
) -> _Planned:
    """This rank's part of the plan that all agreed on, and what it was made of.

    Collective. Raises :class:`SwitchRefused` on all ranks where one of them finds that the plan
    cannot be, :class:`TransitionError` where they made different plans.
    """
    timeout_s = options.timeout_s
    # At least a byte: whoever wants little staging memory gets as many windows as there can be.
    room = max(1, options.plan.staging_bytes - bridge.held_bytes)
    # The ranks of a node copy host memory through one bus: nobody gains by sending for another.
    own_links = bridge.device.type != "cpu"
    plan_options = replace(options.plan, staging_bytes=room, relay_within_nodes=own_links)
    assert job.topology is not None
    topology, hosts = job.topology
    rosters = _rosters(job, source, target, bridge, timeout_s)
    kept, stages = decide(
        options.keep_source,
        rosters,
        old,
        new,
        free,
        bridge,
        staging_bytes=options.plan.staging_bytes,
        timeout_s=timeout_s,
    )
    problem = digest = ""
    bound = None
    try:
        if options.topology is not None:
            topology = options.topology.over(topology, hosts)
        plan = job.plans.staged(*rosters, stages, topology, plan_options, rank=bridge.rank)
        digest = plan.digest
        if stages.count == 1:
            bound = job.bound_plans.get(plan.plans[0], old.fragments, new.fragments)
    except (ConfigError, TransitionError) as error:
        problem = str(error)
    own = json.dumps([problem, digest, bound is not None]).encode()
    answers = [json.loads(row) for row in bridge.all_gather(own, timeout_s=timeout_s)]
    for found, _, _ in answers:
        if found:
            raise SwitchRefused(found, f"the job stays in layout {job.layout}")
    odd = [rank for rank, (_, made, _) in enumerate(answers) if made != answers[0][1]]
    if odd:
        raise TransitionError(
            f"ranks {odd} made another plan than rank 0; their rosters, options or package "
            "versions differ"
        )
    known = all(each for _, _, each in answers)
    return _Planned(plan, rosters, topology, kept, bound if known else None)


def _exchange_steps(own: Steps, bridge: Transport, timeout_s: float) -> Steps:
    rows = bridge.all_gather(json.dumps(own).encode(), timeout_s=timeout_s)
    return merge_steps(json.loads(row) for row in rows)


def _compared(rosters: RosterSet, old: tuple[str, Sums], new: tuple[str, Sums]) -> dict[str, str]:
    (before, old_sums), (after, new_sums) = old, new
    if before != after:
        odd = np.unique(np.nonzero(old_sums != new_sums)[0])
        raise TransitionError(
            f"fingerprint of the whole state was {before} and is {after}, although every rank has "
            "its sources' bits: copies that should be equal differed before the switch, of "
            f"{', '.join(rosters.tensors[i].name for i in odd[:5])}; engine.check_replicas=true "
            "names the ranks and refuses such a switch"
        )
    return {"before": before, "after": after}


def _fill_in(
    report: SwitchReport,
    plan: StagedPlan,
    move: Move,
    peak: Peak,
    rebuilt: int,
    bridge: Transport,
    timeout_s: float,
) -> None:
    """Add the figures of all ranks: seconds are the slowest rank's, bytes those really carried."""
    own: dict[str, Any] = {
        "pack": sum(executed.pack_s for executed in move.reports),
        "wire": sum(executed.wire_s for executed in move.reports),
        "unpack": sum(executed.unpack_s + executed.retain_s for executed in move.reports),
        "sent": sum(executed.sent_bytes for executed in move.reports),
        "lower_bound": plan.lower_bound_bytes,
        "rebuilt": rebuilt,
        "peak": report.peak_extra_bytes,
        "planned": peak.extra,
        "bound": peak.ends_with + peak.staging,
        "largest": peak.largest,
    }
    rows = [json.loads(r) for r in bridge.all_gather(json.dumps(own).encode(), timeout_s=timeout_s)]
    for name in ("pack", "wire", "unpack"):
        report.seconds[name] = max(row[name] for row in rows)
    report.bytes = {
        "moved": sum(row["sent"] for row in rows),
        "lower_bound": sum(row["lower_bound"] for row in rows),
        "retained": plan.retained_bytes,
        "rebuilt": sum(row["rebuilt"] for row in rows),
        "max_send": plan.max_send_bytes,
        "max_recv": plan.max_recv_bytes,
    }
    report.peak_extra_bytes = max(row["peak"] for row in rows)
    report.planned_peak_extra_bytes = max(row["planned"] for row in rows)
    report.bound_peak_extra_bytes = max(row["bound"] for row in rows) + max(
        row["largest"] for row in rows
    )
    report.ops = plan.num_operations
    report.rounds = plan.num_windows
    report.schedule = ", ".join(plan.windows_by)
    report.predicted_s = plan.predicted_s
    if bridge.size <= _MOST_RANKS_IN_MATRIX:
        report.bytes_matrix = plan.bytes_matrix.tolist()
