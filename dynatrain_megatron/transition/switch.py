"""One switch of a running job at a step boundary, on the same processes, more, fewer or others.

::

    worlds    a bridge between all processes, the target's groups: made, if not made before
    quiesce   finish what is in flight, describe the state as it lies       old world in force
    replicas  if asked: what several ranks hold compared, refused where it differs
    build     target model, optimizer, scheduler, iterators: empty          new world in force
    plan      exchange rosters, every rank makes the same plan, digests compared
    memory    memory for what is moved, and where it must be, that of what has been moved freed
    move      pack, wire, unpack into the new objects; the old ones are only read
    rebuild   parameters gathered from main parameters
    verify    every receiver's bits against their sources', the whole against the whole
    vote      all commit, or none does                                      :mod:`.attempt`
    commit    the host's objects become the new ones; old memory goes

A process that joins has no old state, one that leaves no new one; the rest is the same for all.

Until the vote the old state is whole: whatever raises before calls the switch off on all
processes, and puts the host back as it was. Where there is no memory for that, state moves in
stages, and what has been read and verified is freed (:mod:`.move`): from then on whatever fails
takes the finished stages back (:mod:`.undo`), and the job ends where a process is not there to.

The layout left stays dormant where its processes do: where a switch comes back to one, groups and
objects are there, without memory, and rosters, plan and what the transfer copies are known.
"""

from __future__ import annotations

import contextlib
import logging
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from dynatrain_megatron import whereabouts
from dynatrain_megatron.adapters import arguments, groups, skeleton, writers
from dynatrain_megatron.adapters.built import Built
from dynatrain_megatron.adapters.handover import (
    finish_in_flight,
    hand_over,
    let_go,
    renumber,
)
from dynatrain_megatron.adapters.job import BoundPlans, Bridge, Iterators, Job
from dynatrain_megatron.adapters.position import position_of, take_over
from dynatrain_megatron.adapters.skeleton import become
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.config import KeepSource, Verify
from dynatrain_megatron.elastic import records
from dynatrain_megatron.elastic.building import Building
from dynatrain_megatron.elastic.live import LiveWorld
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.engine.fingerprint import Sums, by_label, fingerprint_of, own_sums
from dynatrain_megatron.engine.memory import Dropped, Ledger, storage_sizes
from dynatrain_megatron.engine.replicas import check_replicas
from dynatrain_megatron.engine.unwritten import Unwritten
from dynatrain_megatron.errors import (
    CommitError,
    SplitStateError,
    SwitchAborted,
    SwitchRefused,
    TransitionError,
    WorldError,
    release_frames,
)
from dynatrain_megatron.observe import progress
from dynatrain_megatron.planner.checks import held_once
from dynatrain_megatron.planner.stages import Peak
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.transition import agree
from dynatrain_megatron.transition.agree import Planned, Side, SwitchOptions
from dynatrain_megatron.transition.attempt import Attempt
from dynatrain_megatron.transition.check import Target
from dynatrain_megatron.transition.keep import Free
from dynatrain_megatron.transition.move import Move
from dynatrain_megatron.transition.prepare import (
    Prepared,
    Wire,
    Worlds,
    build,
    make_bridge,
)
from dynatrain_megatron.transition.report import (
    MOST_RANKS_IN_MATRIX,
    MOST_TENSORS_IN_EVENT,
    Phases,
    SwitchReport,
    fill_in,
)
from dynatrain_megatron.transition.undo import move_back
from dynatrain_megatron.vps import LogicalTensor, RosterSet

__all__ = ["SwitchOptions", "SwitchReport", "switch", "wire_of"]

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_PATIENCE_S = 3.0  # most of what is being built has been by then, and can be ended in order


def wire_of(options: SwitchOptions) -> Wire:
    """How the bridge of a switch with these options is built."""
    return Wire(
        options.transport,
        options.plan.staging_bytes,
        options.timeout_s,
        options.connect_s,
        1.5 * options.connect_s,
    )


def switch(
    job: Job,
    target: Target,
    options: SwitchOptions,
    prepared: Prepared,
    building: Building[Worlds] | None = None,
) -> SwitchReport:
    """Take ``job`` from its layout to the target's; collective, on the main thread.

    Runs at a step boundary, outside ``train``, on all processes of the source and of the target.
    Without ``building`` worlds are made here. ``job.built`` is None afterwards on a process that
    has left.

    Raises :class:`SwitchRefused` where the switch cannot be (nothing was changed),
    :class:`SwitchAborted` where it was called off on all processes (the old state is intact, the
    host's globals are put back), :class:`TransitionError` where a process does not come back from
    that or the outcome of the vote cannot be known, :class:`CommitError` where something fails when
    all have voted for it, and :class:`SplitStateError` where parts of the old state were freed and
    cannot be brought back: with these three the process must end.
    """
    assert job.store is not None
    report = SwitchReport(job.iteration, str(job.layout), str(target.layout))
    change, uid = prepared.change, process_uid()
    shown = -1 if job.built is None else job.args.rank
    phase = Phases(report, shown, change.processes.index(uid))
    attempt = Attempt(job.store, change, uid)
    if job.built is not None:
        who = _who(prepared)
        progress(job.args.rank, f"iteration {job.iteration}: {job.layout} -> {target.layout}{who}")
    run = _Switch(job, prepared, options, attempt, report, phase)
    try:
        with phase("groups", "process groups made" if prepared.wanted else "process groups kept"):
            run.worlds = _worlds(prepared, building, job, options, attempt)
        before, job.bridge = job.bridge, run.worlds.bridge
        if before is not job.bridge:
            job.bound_plans = BoundPlans()  # of what the transport before could carry
            if before is not None:
                before.end()  # of other processes; no switch under way uses it
        job.at_stake = run.at_stake()
        run.connect()
        run.move()
        with phase("vote", "all ranks ready to commit"):
            attempt.vote(timeout_s=options.decide_s)
    except SwitchRefused as refusal:
        _give_up(run, attempt, f"{_missing(attempt)}{refusal}")
        raise
    except Exception as error:
        if attempt.in_doubt:
            raise
        if attempt.is_agreed:  # and nothing may be undone here
            raise _failed_after_commit(attempt, error) from error
        reason = _give_up(run, attempt, f"{_missing(attempt)}{type(error).__name__}: {error}")
        release_frames(error)  # tensors of the target, and a bridge that has failed
        raise SwitchAborted(reason) from error
    job.at_stake = ()
    try:
        run.commit()
    except Exception as error:
        raise _failed_after_commit(attempt, error) from error
    return report


def forget(job: Job) -> None:
    """Let go of what the others let go of when a switch is called off; local.

    All processes must have the same worlds, bridges and rosters from before, or none.
    """
    for built in job.dormant.drop(()):
        built.end()
    if job.bridge is not None:
        job.bridge.end()
        job.bridge = None
    job.bound_plans = BoundPlans()
    job.rosters.clear()


def _failed_after_commit(attempt: Attempt, error: Exception) -> CommitError:
    return CommitError(
        f"the switch was committed, and failed afterwards in phase commit: {_missing(attempt)}"
        f"{error}. The process must end; start the job again from the last checkpoint"
    )


def _missing(attempt: Attempt) -> str:
    """Whom this process waited for when it failed; empty where it did not wait."""
    return attempt.missing() if whereabouts.here().waits_for else ""


def _who(prepared: Prepared) -> str:
    change = prepared.change
    told = [
        f"{len(uids)} {verb}"
        for uids, verb in ((change.joiners, "joining"), (change.leavers, "leaving"))
        if uids
    ]
    return f" ({', '.join(told)})" if told else ""


def _worlds(
    prepared: Prepared,
    building: Building[Worlds] | None,
    job: Job,
    options: SwitchOptions,
    attempt: Attempt,
) -> Worlds:
    assert job.store is not None
    try:
        with whereabouts.waiting("process groups to be made"):
            if building is None:
                return build(prepared, job.store, wire_of(options))
            deadline, patience_s = time.monotonic() + 3 * options.connect_s, _PATIENCE_S
            while not building.wait(timeout_s=_POLL_S):
                patience_s -= _POLL_S * attempt.is_aborted
                if patience_s < 0:  # whoever did not come need not be waited for
                    raise TransitionError("it was called off while process groups were made")
                if time.monotonic() > deadline:
                    raise WorldError(f"no process groups within {3 * options.connect_s:g} s")
            return building.result(timeout_s=0)
    except WorldError as error:
        if attempt.is_aborted:  # which has a reason of its own
            raise TransitionError("it was called off while process groups were made") from error
        raise SwitchRefused(str(error), "the job stays as it is") from error


def _give_up(run: _Switch, attempt: Attempt, reason: str) -> str:
    """Call the switch off; returns why, as all know it. Host and state are as they were.

    Raises :class:`SplitStateError` where parts of the state cannot be brought back.
    """
    job, moved = run.job, run.moving
    with contextlib.suppress(WorldError):
        reason = attempt.abort(reason)
    for world in job.at_stake:
        try:
            world.give_up()
        except RuntimeError:
            logger.warning("groups of a world could not be given up", exc_info=True)
    with contextlib.suppress(WorldError):
        attempt.say_finished(0 if moved is None else moved.finished)
    run.restore_host()
    run.end_bridge()
    is_back = False
    if moved is not None and moved.frees:
        try:
            is_back = run.take_back()
        except Exception as error:
            raise SplitStateError(
                f"the switch failed: {reason}; parts of the old state had been freed by then and "
                f"could not be brought back: {error}; so the job must end. Start again from the "
                "last checkpoint; with engine.keep_source=always the old state is kept to the end"
            ) from error
    run.undo()
    if job.built is not None:
        attempt.call_roll(timeout_s=run.options.decide_s)
        if is_back and moved is not None:
            moved.old.allocate_rebuilt()
            job.built.state.rebuild_params()
    return reason


class _Ready(NamedTuple):
    """The target on this rank, ready to be filled: built now, or ``woken``.

    ``missing`` are its storages without memory yet; ``most_bytes`` is what building took for a
    moment beside what it left.
    """

    side: Side
    woken: bool
    missing: Dropped
    most_bytes: int
    iterators: Iterators | None = None

    @property
    def built(self) -> Built:
        assert self.side.built is not None
        return self.side.built


@dataclass
class _Switch:
    """One process's part in a switch, phase by phase, and what it takes to undo it."""

    job: Job
    prepared: Prepared
    options: SwitchOptions
    attempt: Attempt
    report: SwitchReport
    phase: Phases

    def __post_init__(self) -> None:
        self.worlds: Worlds | None = None
        self.moving: Move | None = None
        self._undo: list[Callable[[], object]] = []
        self._is_bridge_gone = False
        self._context = contextlib.ExitStack()
        self._ready: _Ready | None = None
        self._dormant: Built | None = None
        self._gradients: Dropped | None = None
        self.run_id = ""

    @property
    def bridge(self) -> Bridge:
        assert self.worlds is not None
        return self.worlds.bridge

    def at_stake(self) -> tuple[LiveWorld[Any], ...]:
        """The worlds that go where the switch is called off: all but the one in force."""
        assert self.worlds is not None
        target = [] if self.worlds.world is None else [self.worlds.world]
        dormant = [built.world for built in self.job.dormant]
        return (self.bridge.world, *target, *dormant)

    # -- until the vote ----------------------------------------------------------------------

    def connect(self) -> None:
        """Let new groups of the target connect that have not; collective over its processes."""
        assert self.worlds is not None
        world = self.worlds.world
        if world is not None and world.connecting_late():
            with self.phase("groups", "process groups connected"):
                current_platform().empty_cache()  # of which their buffers are no part
                with whereabouts.waiting("process groups to connect"):
                    device = current_platform().device
                    world.connect(device, timeout_s=self.options.connect_s)
        self._free = Free.now()

    def move(self) -> None:
        """All that can fail; collective over the bridge."""
        job, options, phase = self.job, self.options, self.phase
        transport, timeout_s = self.bridge.transport, options.timeout_s
        source = job.built
        with phase("quiesce", "asynchronous saves finished, old state described"):
            if source is not None:
                finish_in_flight()
                current_platform().synchronize()
            old = agree.described(source, transport, timeout_s)
            tensors = [] if source is None else list(source.state.tensors())
            self.ledger, self.sizes = Ledger(tensors), storage_sizes(tensors)
            if self.prepared.change.source != self.prepared.change.target:
                self._tell_position()
        if options.check_replicas:
            with phase("replicas", "what several ranks hold compared"):
                fragments = old.holdings.fragments
                gathered = agree.gather_rosters(fragments, transport, timeout_s)
                check_replicas(RosterSet.merge(gathered), fragments, transport, timeout_s=timeout_s)
        if source is not None:
            self._drop_gradients(source.state)
        new = self._target_side()
        with phase("plan", "rosters exchanged, plan made"):
            if self.prepared.change.joiners:
                job.rosters.clear()  # which those do not know
            planned = agree.planned(job, old, new, self._free, self.bridge, options)
            if transport.size <= MOST_RANKS_IN_MATRIX:
                self.report.nodes = list(planned.topology.node)
            steps = {} if source is None else source.state.steps()
            steps = agree.exchange_steps(steps, transport, timeout_s)
        self._move(planned, old, new, steps)

    def _tell_position(self) -> None:
        """Let who joins know where the run is, and all which run its curves belong to."""
        job, transport, timeout_s = self.job, self.bridge.transport, self.options.timeout_s
        problem, own = "", b""
        if job.built is not None and job.args.rank == job.args.world_size - 1:
            try:
                own = position_of(job)
            except SwitchRefused as refusal:
                problem = str(refusal)
        problem = agree.everyones_problem(problem, transport, timeout_s)
        if problem:
            raise SwitchRefused(problem)
        told = transport.all_gather(own, timeout_s=timeout_s)
        runs = transport.all_gather(writers.run_name().encode(), timeout_s=timeout_s)
        self.run_id = b"".join(runs).decode()
        if job.built is None:
            take_over(job, next(filter(None, told)))
            self.report.iteration, self.report.source = job.iteration, str(job.layout)

    def _drop_gradients(self, state: HostState) -> None:
        """Give the gradients' memory back; if the switch is called off it is there as zeros."""
        self._gradients = Dropped(state.gradients())
        self._undo.append(self._gradients.restore)

    def _target_side(self) -> Side:
        """Objects of the target, once every rank could make its own.

        Megatron says no to some layouts only while it builds modules. Then the switch is refused on
        all ranks; before data is read, which takes all of them.
        """
        transport, timeout_s = self.bridge.transport, self.options.timeout_s
        ready, problem = None, ""
        with self.phase("build", "model and optimizer of the target"):
            if self.prepared.key is not None:
                self._undo.append(partial(records.install, records.in_force()))
                self._context.enter_context(skeleton.host_context(self.job))
                try:
                    ready = self._build()
                except Exception as error:
                    problem = agree.told(error, "the target could not be built")
        with self.phase("build", "data iterators, and all ranks waited for"):
            problem = agree.everyones_problem(problem, transport, timeout_s)
            if ready is not None and not problem:
                try:
                    iterators = skeleton.take_position(self.job, ready.built.skeleton)
                    ready = ready._replace(iterators=iterators)
                except Exception as error:
                    problem = agree.told(error, "data iterators could not be built")
            if not problem:
                problem = agree.everyones_problem(problem, transport, timeout_s)
        if problem:
            raise SwitchRefused(problem, f"the job stays in layout {self.report.source}")
        self._ready = ready
        return Side.absent() if ready is None else ready.side

    def _build(self) -> _Ready:
        job, key = self.job, self.prepared.key
        assert key is not None and self.worlds is not None
        self.baseline = _install_arguments(job, self.prepared.target)
        self._dormant = job.dormant.take(key)
        world = self.worlds.world if self._dormant is None else self._dormant.world
        assert world is not None
        if job.built is not None and job.processes == key.processes:
            job.built.world.pass_on(world)
        world.install()
        groups.install(world.groups)
        skeleton.set_microbatches(job.args)
        if self._dormant is not None:
            become(job.config, self._dormant.skeleton.config)
            missing = self._dormant.wake()
            side = Side.of(self._dormant, self._dormant.fragments(), missing)
            return _Ready(side, True, missing, 0)
        unwritten = Unwritten()
        built = Built(key, world, skeleton.build(job, unwritten), job.args)
        with unwritten:
            fragments = built.fragments()
        missing = unwritten.take(built.written_later())
        unwritten.allocate_rest()
        built.note_as_built()
        become(job.config, built.skeleton.config)
        return _Ready(Side.of(built, fragments, missing), False, missing, unwritten.most_bytes)

    def _move(self, planned: Planned, old: Side, new: Side, steps: dict[str, float]) -> None:
        job, options, phase, report = self.job, self.options, self.phase, self.report
        transport, timeout_s = self.bridge.transport, options.timeout_s
        plan, rosters = planned.plan, planned.rosters
        if self._ready is not None:
            self.ledger.watch(self._ready.built.state.tensors())
            self.ledger.mark(self._ready.most_bytes)
        self._planned = planned
        frees, give_back = planned.kept is KeepSource.never, current_platform().empty_cache
        move = Move(plan, old.holdings, new.holdings, self.ledger, frees, give_back, planned.bound)
        self.moving = move
        peak = move.planned(rosters, transport.rank, transport.held_bytes)
        if options.verify is Verify.fingerprint:
            with phase("verify", "old state hashed where ranks hold the same"):
                shared = ~(held_once(rosters[0]) & held_once(rosters[1]))
                before = own_sums(rosters[0], old.holdings.fragments, transport.rank, chosen=shared)
        move.run(rosters, transport, verify=options.verify, timeout_s=timeout_s)
        phase.add_move(move)
        if move.bound is not None:
            fragments = old.holdings.fragments, new.holdings.fragments
            job.bound_plans.put(plan.plans[0], *fragments, move.bound)
        rebuilt = 0
        with phase("rebuild", "parameters gathered from main parameters"):
            move.rebuild_begins()
            if new.built is not None:
                new.built.state.restore_steps(steps)
                with whereabouts.waiting("all to gather parameters"):
                    rebuilt = new.built.state.rebuild_params()
        if options.verify is Verify.fingerprint:
            with phase("verify", "fingerprints compared"):
                after = own_sums(rosters[1], new.holdings.fragments, transport.rank, chosen=shared)
                # The rest moved once from the only holder to the only holder: known by now.
                gave, got = move.sums(before, rosters[0])
                before[~shared], after[~shared] = gave[~shared], got[~shared]
                tensors = rosters[0].tensors
                found = self._whole(tensors, after)
                report.fingerprint = agree.compared(rosters[0], self._whole(tensors, before), found)
                if len(tensors) <= MOST_TENSORS_IN_EVENT:
                    report.state_fingerprints = by_label(tensors, found[1])
        self._moved: tuple[Planned, Move, Peak, int] = planned, move, peak, rebuilt

    def _whole(self, tensors: Sequence[LogicalTensor], own: Sums) -> tuple[str, Sums]:
        timeout_s = self.options.timeout_s
        return fingerprint_of(tensors, own, self.bridge.transport, timeout_s=timeout_s)

    # -- afterwards --------------------------------------------------------------------------

    def commit(self) -> None:
        """Assignments, and memory given back; then the bridge's last word: everyone's figures."""
        job, change, phase, ready = self.job, self.prepared.change, self.phase, self._ready
        self._context.close()
        planned, move, peak, rebuilt = self._moved
        with phase("commit", "old memory released"):
            made = reused = 0
            if ready is None:
                ended = let_go(job)
            else:
                assert ready.iterators is not None
                if set(change.source) != set(change.target):
                    job.rosters.clear()  # which a process that joins does not know
                ended = hand_over(job, ready.built, ready.iterators, self.baseline, self.sizes)
                if change.source != change.target:
                    renumber(job.args)
                for tensor in ready.built.state.gradients():
                    ready.missing.restore_one(tensor.untyped_storage(), zeros=True)
                self.ledger.watch(ready.built.state.tensors())
                world = ready.built.world
                reused = len(world.held) if ready.woken else len(world.reused)
                made = len(world.held) - reused
            self.ledger.mark()
            report = self.report
            report.groups = {"reused": reused, "created": made, "destroyed": ended}
            report.world = len(change.target)
            report.joined, report.left = len(change.joiners), len(change.leavers)
            report.keep_source, report.stages = str(planned.kept), planned.plan.stages.count
            report.verify = str(self.options.verify)
            report.peak_extra_bytes = self.ledger.peak_extra_bytes
            if change.leavers and ready is not None:
                self.attempt.say_done()
            size = self.bridge.transport.size
            stay = set(change.source) & set(change.target)
            knows = process_uid() in (stay or set(change.source))
            fill_in(report, planned.plan, move, peak, rebuilt, size, knows, self._last_word)
            if ready is not None and change.source != change.target:
                writers.follow(job.args, self.run_id)  # all others have closed theirs by now
            if change.leavers:
                self.bridge.end()
                job.bridge = None
        progress(
            self.bridge.transport.rank,
            f"memory   {report.keep_source} kept, {report.stages} stages: at most "
            f"{report.peak_extra_bytes} bytes more on a rank (planned "
            f"{report.planned_peak_extra_bytes}, bound {report.bound_peak_extra_bytes})",
        )

    def _last_word(self, own: bytes) -> list[bytes]:
        """Everyone's figures. One that leaves may be lost by now: what it did is done."""
        change, transport = self.prepared.change, self.bridge.transport
        try:
            return transport.all_gather(own, timeout_s=self.options.timeout_s)
        except TransitionError:
            if not change.leavers:
                raise
            if self._ready is not None:
                self.attempt.wait_for_done(timeout_s=self.options.decide_s)
            logger.warning("a process that leaves is lost; figures are this rank's", exc_info=True)
            return [own]

    def restore_host(self) -> None:
        """Put arguments, groups, config and random streams back as they were; local."""
        with contextlib.suppress(_Undone), self._context:
            raise _Undone

    def end_bridge(self) -> None:
        """Whoever waits in it for this process wakes up; local."""
        job, worlds = self.job, self.worlds
        last, job.bridge = job.bridge, None
        if self._is_bridge_gone:
            return
        self._is_bridge_gone = True
        for bridge in {id(b): b for b in (last, worlds and worlds.bridge) if b}.values():
            bridge.end()

    def take_back(self) -> bool:
        """Bring back what was freed, if anything was; collective over all processes of the switch.

        On a bridge of its own. True where the source has its state from there.
        """
        job, options, moved, planned = self.job, self.options, self.moving, self._planned
        finished = self.attempt.finished(timeout_s=options.decide_s)
        if not finished:
            return False
        assert job.store is not None and moved is not None
        # By the same ranks as the bridge that failed, which may be of an earlier switch.
        ranks = self.bridge.processes
        bridge_id = self.attempt.way_back(timeout_s=options.decide_s)
        same = replace(self.prepared.change, source=ranks, target=ranks, bridge_id=bridge_id)
        bridge = make_bridge(same, job.store, wire_of(options), self.prepared.backend)
        progress(bridge.transport.rank, f"{finished} stages are taken back to {self.report.source}")
        try:
            move_back(
                moved,
                planned.rosters,
                finished,
                bridge.transport,
                bridge.topology,
                options.plan,
                verify=options.verify,
                timeout_s=options.timeout_s,
            )
        finally:
            bridge.end()
        return True

    def undo(self) -> None:
        """Put the host back as it was and end all worlds but the one in force; local.

        Whatever state they are in, who still waits in one of them for this process wakes up. What
        had dormant layouts is made anew when it is wanted.
        """
        job, worlds, ready = self.job, self.worlds, self._ready
        self.restore_host()
        for step in reversed(self._undo):
            step()
        # The layout taken out to be filled; those still there follow: others may have got further.
        ended = [] if self._dormant is None else [self._dormant]
        if ready is not None and not ready.woken:
            ended.append(ready.built)
        elif worlds is not None and worlds.world is not None:
            worlds.world.end()
        for built in ended:
            built.end()
        self.end_bridge()
        job.at_stake = ()
        forget(job)


class _Undone(Exception):
    """Makes contexts put back what they changed."""


def _install_arguments(job: Job, target: Target) -> Namespace:
    """Put the target's arguments in force; returns their shallow copy as validated."""
    new = Namespace(**vars(target.args))
    baseline = Namespace(**vars(target.args))
    arguments.carry_over(new, job.args, job.baseline)
    arguments.replace_in_place(job.args, new)
    return baseline
