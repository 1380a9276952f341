"""One switch of a running job, on the same processes, at a step boundary.

::

    quiesce   finish what is in flight, describe the state as it lies       old groups in force
    replicas  if asked: what several ranks hold compared, refused where it differs
    groups    make the target's process groups aside, install them          new groups in force
    build     target model, optimizer, scheduler, iterators: empty
    plan      exchange rosters, every rank makes the same plan, digests compared
    move      pack, wire, unpack into the new objects; the old ones are only read
    verify    every receiver's bits against their sources', the whole against the whole
    commit    the host's objects become the new ones; old memory goes

Until commit the old state is whole: whatever raises before puts the host back as it was. The layout
left stays dormant: where a switch comes back to one, groups and objects are there, without memory,
and rosters, plan and what the transfer copies are known.
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
from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import (
    BoundPlan,
    ExecutionReport,
    Fragments,
    Transport,
    bind_plan,
    connect,
    execute,
)
from dynatrain_megatron.engine.fingerprint import check_received, fingerprint
from dynatrain_megatron.engine.memory import Dropped, storage_bytes
from dynatrain_megatron.engine.replicas import check_replicas
from dynatrain_megatron.errors import ConfigError, SwitchRefused, TransitionError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe import progress
from dynatrain_megatron.planner import Plan, PlanOptions, Topology, TopologyFile, place
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.transition.check import Target
from dynatrain_megatron.vps import Roster, RosterSet
from dynatrain_megatron.vps.roster import union_of_tensors

logger = logging.getLogger(__name__)

_RINGS_SHARE = 4  # the part of staging memory that a transport may hold is one of so many
_MESSAGE_CHARS = 500  # of a host's message; some print whole dictionaries


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
    check_replicas: bool = False
    topology: TopologyFile | None = None
    placement: bool = False
    timeout_s: float = 600.0


@dataclass
class SwitchReport:
    """What a switch did, as the event log tells it; equal on every rank but for local bytes."""

    iteration: int
    source: str
    target: str
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    ops: int = 0
    rounds: int = 0
    stages: int = 1
    peak_extra_bytes: int = 0
    planned_peak_extra_bytes: int = 0
    fingerprint: dict[str, str] | None = None
    bytes_matrix: list[list[int]] = field(default_factory=list)
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
    (the host's globals are put back; the old state is intact).
    """
    rank = job.args.rank
    report = SwitchReport(job.iteration, str(job.layout), str(target.layout))
    phase = _Phases(report, rank)
    progress(rank, f"iteration {job.iteration}: {job.layout} -> {target.layout}")
    source = job.built
    assert source is not None
    with phase("quiesce", "asynchronous saves finished, old state described"):
        finish_in_flight()
        current_platform().synchronize()
        bridge = _bridge(job, options)
        old_fragments = _described(source, bridge, options.timeout_s)
        old_bytes = storage_bytes(source.state.tensors())
    if options.check_replicas:
        with phase("replicas", "what several ranks hold compared"):
            replicated = RosterSet.merge(_gather_rosters(old_fragments, bridge, options.timeout_s))
            check_replicas(replicated, old_fragments, bridge, timeout_s=options.timeout_s)
    with skeleton.host_context(job), _without_gradients(source.state) as old_gradients:
        baseline = _install_arguments(job, target)
        ready = _ready(job, target.layout, phase, bridge, options.timeout_s)
        new, new_fragments = ready.built.state, ready.fragments
        expected = new.expected_bytes()
        with phase("plan", "rosters exchanged, plan made"):
            try:
                planned = _planned(job, source, ready.built, bridge, options)
            except SwitchRefused:
                ready.built.destroy()
                raise
            plan, rosters = planned.plan, planned.rosters
            if options.placement:
                report.placement = _what_placement_would_save(rosters, planned.topology, rank)
        executed = execute(
            *(plan, old_fragments, new_fragments, bridge),
            timeout_s=options.timeout_s,
            bound=planned.bound,
        )
        with phase("rebuild", "parameters gathered from main parameters"):
            steps = _exchange_steps(source.state.steps(), bridge, options.timeout_s)
            new.restore_steps(steps)
            rebuilt = new.rebuild_params()
        if options.verify:
            with phase("verify", "fingerprints compared"):
                report.fingerprint = _verify(
                    plan, rosters, old_fragments, new_fragments, bridge, options.timeout_s
                )
    new_bytes = storage_bytes(new.tensors())
    report.peak_extra_bytes = _peak_extra_bytes(
        before=old_bytes,
        dropped=old_gradients.bytes,
        skeleton=ready.skeleton_bytes,
        state=new_bytes,
        gradients=ready.gradients.bytes,
        staging=executed.peak_staging_bytes,
    )
    report.planned_peak_extra_bytes = _peak_extra_bytes(
        before=old_bytes,
        dropped=old_gradients.bytes,
        skeleton=0 if ready.woken else expected.model + expected.gradients,
        state=expected.model + expected.moments,
        gradients=expected.gradients,
        staging=plan.peak_staging_bytes(rank) + bridge.held_bytes,
    )
    with phase("commit", "old memory released"):
        assert ready.iterators is not None
        destroyed = hand_over(job, ready.built, ready.iterators, baseline, old_gradients)
        ready.gradients.restore()
        num_groups = len(ready.built.groups.process_groups())
        report.groups = {
            "reused": num_groups * ready.woken,
            "created": num_groups * (not ready.woken),
            "destroyed": destroyed,
        }
        _fill_in(report, plan, executed, rebuilt, bridge, options.timeout_s)
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
def _without_gradients(state: HostState) -> Iterator[Dropped]:
    """Give the gradients' memory back; if the body raises they are there again, as zeros."""
    dropped = Dropped(state.gradients())
    try:
        yield dropped
    except BaseException:
        dropped.restore()
        raise


def _peak_extra_bytes(
    *, before: int, dropped: int, skeleton: int, state: int, gradients: int, staging: int
) -> int:
    """The most memory a switch takes on a rank beyond the ``before`` bytes of its old state.

    The old state without its gradients (``dropped``) is kept until commit. On top of it come the
    target's ``skeleton``, which has gradients and no moments; then the whole ``state``, which has
    moments and no gradients, with the ``staging``; the gradients come last, in place of all that.
    """
    return max(0, skeleton - dropped, state + staging - dropped, state + gradients - before)


class _Ready(NamedTuple):
    """The target on this rank, ready to be filled: built now, or ``woken``."""

    built: Built
    woken: bool
    fragments: Fragments
    gradients: Dropped
    skeleton_bytes: int
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
    built = Built(key, made, skeleton.build(job), job.args)
    become(job.config, built.skeleton.config)
    skeleton_bytes = storage_bytes(built.state.tensors())
    gradients = Dropped(built.state.gradients())
    return _Ready(built, False, built.fragments(), gradients, skeleton_bytes)


def _woken(job: Job, dormant: Built) -> _Ready:
    become(job.config, dormant.skeleton.config)
    gradients = dormant.wake()
    return _Ready(dormant, True, dormant.fragments(), gradients, 0)


def _gather_rosters(fragments: Fragments, bridge: Transport, timeout_s: float) -> list[Roster]:
    rows = bridge.all_gather(fragments.roster.to_bytes(), timeout_s=timeout_s)
    read = {row: Roster.from_bytes(row) for row in set(rows)}  # replicas have equal ones
    return [read[row] for row in rows]


def _merged(old: list[Roster], new: list[Roster]) -> tuple[RosterSet, RosterSet]:
    """Both roster sets over one list of logical tensors."""
    try:
        tensors = union_of_tensors([*old, *new])
    except ValueError as error:
        raise TransitionError(str(error)) from error
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
    :class:`TransitionError` on all ranks alike.
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
    """A plan, the roster sets and the topology it was made of, and this rank's part in memory."""

    plan: Plan
    rosters: tuple[RosterSet, RosterSet]
    topology: Topology
    bound: BoundPlan


def _planned(
    job: Job, source: Built, target: Built, bridge: Transport, options: SwitchOptions
) -> _Planned:
    """This rank's part of the plan that all agreed on, and what it was made of.

    Collective. Raises :class:`SwitchRefused` on all ranks where one of them finds that the plan
    cannot be, :class:`TransitionError` where they made different plans.
    """
    # At least a byte: whoever wants little staging memory gets as many windows as there can be.
    room = max(1, options.plan.staging_bytes - bridge.held_bytes)
    plan_options = replace(options.plan, staging_bytes=room)
    assert job.topology is not None
    topology, hosts = job.topology
    problem = digest = ""
    fragments, bound = (source.described, target.described), None
    try:
        if options.topology is not None:
            topology = options.topology.over(topology, hosts)
        rosters = _rosters(job, source, target, bridge, options.timeout_s)
        plan = job.plans.plan(*rosters, topology, plan_options, rank=bridge.rank)
        digest, bound = plan.digest, job.bound_plans.get(plan, *fragments)
    except (ConfigError, TransitionError) as error:
        problem = str(error)
    own = json.dumps([problem, digest, bound is not None]).encode()
    answers = [json.loads(row) for row in bridge.all_gather(own, timeout_s=options.timeout_s)]
    for found, _, _ in answers:
        if found:
            raise SwitchRefused(found, f"the job stays in layout {job.layout}")
    odd = [rank for rank, (_, made, _) in enumerate(answers) if made != answers[0][1]]
    if odd:
        raise TransitionError(
            f"ranks {odd} made another plan than rank 0; their rosters, options or package "
            "versions differ"
        )
    if bound is None or not all(known for _, _, known in answers):
        bound = bind_plan(plan, *fragments, bridge, timeout_s=options.timeout_s)
        job.bound_plans.put(plan, *fragments, bound)
    return _Planned(plan, rosters, topology, bound)


def _exchange_steps(own: Steps, bridge: Transport, timeout_s: float) -> Steps:
    rows = bridge.all_gather(json.dumps(own).encode(), timeout_s=timeout_s)
    return merge_steps(json.loads(row) for row in rows)


def _verify(
    plan: Plan,
    rosters: tuple[RosterSet, RosterSet],
    old: Fragments,
    new: Fragments,
    bridge: Transport,
    timeout_s: float,
) -> dict[str, str]:
    check_received(plan, old, new, bridge, timeout_s=timeout_s)
    before, old_sums = fingerprint(rosters[0], old, bridge, timeout_s=timeout_s)
    after, new_sums = fingerprint(rosters[1], new, bridge, timeout_s=timeout_s)
    if before != after:
        odd = np.unique(np.nonzero(old_sums != new_sums)[0])
        raise TransitionError(
            f"fingerprint of the whole state was {before} and is {after}, although every rank has "
            "its sources' bits: copies that should be equal differed before the switch, of "
            f"{', '.join(plan.tensors[i].name for i in odd[:5])}; engine.check_replicas=true "
            "names the ranks and refuses such a switch"
        )
    return {"before": before, "after": after}


def _fill_in(
    report: SwitchReport,
    plan: Plan,
    executed: ExecutionReport,
    rebuilt: int,
    bridge: Transport,
    timeout_s: float,
) -> None:
    """Add the figures of all ranks: seconds are the slowest rank's, bytes those really carried."""
    own: dict[str, Any] = {
        "pack": executed.pack_s,
        "wire": executed.wire_s,
        "unpack": executed.unpack_s + executed.retain_s,
        "sent": executed.sent_bytes,
        "lower_bound": plan.lower_bound_bytes,
        "rebuilt": rebuilt,
        "peak": report.peak_extra_bytes,
        "planned": report.planned_peak_extra_bytes,
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
    report.ops = plan.num_operations
    report.rounds = plan.num_windows
    report.bytes_matrix = plan.bytes_matrix.tolist()
