"""A process's part in who belongs to the job: a thread that watches the job's store, and what the
main thread does about it at step boundaries.

::

    thread    tells that this process lives, sees what is announced, waits for worlds to be built,
              makes promises; on rank 0 also who has come, who has to go, what is asked
    main      checks and prepares what is announced, at the next boundary; stops where agreed

The thread touches nothing of Megatron, torch's groups or the model.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynatrain_megatron import whereabouts
from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.config import Overlap
from dynatrain_megatron.elastic.beats import BEAT_S, SILENT_S, Beats, last_words, watched_by
from dynatrain_megatron.elastic.building import Building
from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.control import leave_answer, opened, take_request
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.gate import Gate
from dynatrain_megatron.elastic.store import JobStore
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.errors import (
    CommitError,
    ConfigError,
    SwitchRefused,
    TransitionError,
    WorldError,
    shown,
)
from dynatrain_megatron.faults import Phase
from dynatrain_megatron.observe import progress
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.transition import Target
from dynatrain_megatron.transition.attempt import Attempt, named
from dynatrain_megatron.transition.posted import Board, Posted
from dynatrain_megatron.transition.prepare import (
    Prepared,
    Wire,
    Worlds,
    prepare,
    start_building,
)
from dynatrain_megatron.transition.switch import forget
from dynatrain_megatron.whereabouts import READY, LastWord, Place

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_GRACE_S = 3.0  # for a thread that is to find out by itself that the job is over


@dataclass
class Pending:
    """A switch that is announced, as far as this process has got with it."""

    posted: Posted
    since: float = field(default_factory=time.monotonic)
    prepared: Prepared | None = None
    building: Building[Worlds] | None = None
    gate: Gate | None = None
    has_told_gate: bool = False
    begin_hold: int | None = None
    begin: int | None = None
    refused: str = ""
    is_ready: bool = False
    hold: int | None = None
    called_off: str = ""

    @property
    def number(self) -> int:
        """Its number."""
        return self.posted.change.number

    @property
    def is_scheduled(self) -> bool:
        """Whether all stop for it by themselves."""
        return self.posted.step is not None


class Membership:
    """This process among those of the job, or of those that wait to join it.

    ``check`` says whether an announced switch can be, and gives this process's target. ``overlap``,
    which is not ``auto``, is when worlds are built. Requests may lie in ``run_dir``, and answers go
    there too.
    """

    def __init__(
        self,
        job: Job,
        store: JobStore,
        check: Callable[[Posted], Target],
        wire: Wire,
        *,
        run_dir: Path,
        overlap: Overlap,
        timeout_s: float,
    ) -> None:
        self.uid = process_uid()
        self.directory = Directory(store)
        self.board = Board(store)
        self.beats = Beats(self.directory)
        self.pending: Pending | None = None
        self.has_notice = False
        self.arrivals: list[str] = []
        self.notices: set[str] = set()
        self.requests: list[tuple[int, str]] = []
        self.silent_waiting: set[str] = set()
        self.given_up: list[Posted] = []  # as rank 0, for whoever announces
        self._job = job
        self._store = store
        self._check = check
        if overlap is Overlap.boundary:  # the job makes its part of the groups in many steps
            wire = replace(wire, agree_s=max(wire.agree_s, timeout_s))
        self._wire = wire
        self._run_dir = run_dir
        self._overlap = overlap
        self._timeout_s = timeout_s
        self._iteration = job.iteration
        self._num_requests = 0
        self._concluded: list[tuple[Change, float]] = []
        self._forgettable: list[Change] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._notice: int | None = None
        self._num_notices = 0
        self._switching: Pending | None = None
        self._num_beats = 0
        self._told = self._watched_place = whereabouts.here()
        self._stuck = self._looked = 0.0
        self._last_error = ""
        self._published = 0.0
        self._thread = threading.Thread(target=self._watch, name="dynatrain", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; this process has no part in the job any more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(5 * _TICK_S + 1)

    def withdraw_notice(self) -> None:
        """This process has left, and may come back; main thread."""
        self.has_notice = False
        notice, self._notice = self._notice, None
        if notice is not None:
            self.directory.withdraw_notice(notice)

    def can_leave(self) -> bool:
        """Whether there is a job that would go on without this process; any thread."""
        members = self._job.processes
        return bool(members) and members != (self.uid,) and self._thread.is_alive()

    @property
    def leads(self) -> bool:
        """Whether this process announces switches: it is rank 0 of the job."""
        return bool(self._job.processes) and self._job.processes[0] == self.uid

    def waiting(self) -> tuple[str, ...]:
        """Who has come and was not taken in yet, as far as rank 0 knows; any thread."""
        return tuple(
            uid
            for uid in dict.fromkeys(self.arrivals)
            if uid and uid not in self._job.processes and uid not in self.silent_waiting
        )

    # -- main thread -------------------------------------------------------------------------

    def taken(self, joiners: tuple[str, ...]) -> None:
        """These were taken in: they wait no more, unless they come again."""
        for index, uid in enumerate(self.arrivals):  # in place: the thread adds to the same list
            if uid in joiners:
                self.arrivals[index] = ""

    def at_boundary(self, iteration: int) -> Pending | None:
        """The switch that begins at this boundary, if one that is not of the schedule does."""
        with self._lock:
            self._iteration = iteration
            pending = self.pending
        if pending is None:
            return None
        if pending.called_off:
            if not pending.is_scheduled:  # a step of the schedule is given up where it is due
                self.give_up(pending)
            return None
        self.prepare(pending)
        if pending.gate is not None and not self._build_some(pending, pending.gate, iteration):
            return None
        if pending.is_scheduled or pending.hold is None or iteration < pending.hold:
            return None
        return self.decided(pending, iteration)

    def _build_some(self, pending: Pending, gate: Gate, iteration: int) -> bool:
        """Let a few groups be made at this boundary, as all processes of the job do at the same.

        False where the switch has been called off.
        """
        assert pending.building is not None
        if pending.begin is None:
            if pending.begin_hold is None or iteration < pending.begin_hold:
                return True
            found = self.board.wait_for_begin(pending.number, timeout_s=self._timeout_s)
            if isinstance(found, str):
                pending.called_off = found
                if not pending.is_scheduled:
                    self.give_up(pending)
                return False
            pending.begin = found
            progress(
                self._job.args.rank,
                f"iteration {iteration}: from here on groups of the switch to come are made, a few "
                "at each boundary",
            )
        if iteration >= pending.begin and not pending.building.is_done:
            current_platform().synchronize()
            thread, timeout_s = pending.building.thread, 3 * self._wire.connect_s
            gate.let_pass(1, thread, timeout_s=timeout_s)
        return True

    def decided(self, pending: Pending, iteration: int) -> Pending | None:
        """``pending`` where its boundary is this one; waits until that is decided."""
        found = self.board.wait_for_boundary(pending.number, timeout_s=self._timeout_s)
        if isinstance(found, str):
            pending.called_off = found
            self.give_up(pending)
            return None
        return pending if iteration >= found else None

    def announced(self, number: int) -> Pending:
        """The switch of this number, once rank 0 has announced it. Raises :class:`WorldError`."""
        with self._lock:
            if self.pending is not None:
                return self.pending
        try:
            posted = self.board.wait(number, timeout_s=self._timeout_s)
        except WorldError as error:
            first = self._job.processes[:1]
            words = [f"{uid} (rank 0), {word}" for uid, word in self._last_words(first)]
            raise WorldError("; ".join([str(error), *words])) from error
        with self._lock:
            if self.pending is None:
                self.pending = Pending(posted)
            return self.pending

    def prepare(self, pending: Pending) -> None:
        """Do what this process can do before the boundary, once."""
        if pending.prepared is not None or pending.refused:
            return
        try:
            if pending.posted.refused:
                raise SwitchRefused(pending.posted.refused)
            target = self._check(pending.posted)
            prepared = prepare(self._job, pending.posted.change, target)
            if self._overlap is not Overlap.off and prepared.needs_building:
                trains = self._job.built is not None
                gate = Gate() if self._overlap is Overlap.boundary and trains else None
                pending.building = start_building(prepared, self._store, self._wire, gate)
                pending.gate = gate
            pending.prepared = prepared
        except WorldError:  # an earlier build has not ended yet: again at the next boundary
            if pending.is_scheduled:
                pending.prepared = prepared
        except SwitchRefused as error:
            pending.refused = str(error)
            if not pending.is_scheduled:
                self.board.call_off(pending.number, str(error))

    def conclude(self, pending: Pending) -> None:
        """Done with it, one way or the other; the next one has the next number."""
        with self._lock:
            self._job.num_changes = pending.number
            self._concluded.append((pending.posted.change, time.monotonic()))
            self.pending = None

    def forget_before(self, change: Change) -> None:
        """``change`` was made: one of its processes lets earlier ones go from the store.

        Whoever took part in it reads no earlier one any more; whoever did not has had time to.
        """
        long_ago, here = time.monotonic() - self._timeout_s, set(change.processes)
        stay = [uid for uid in change.source if uid in set(change.target)]
        with self._lock:
            gone = [
                earlier
                for earlier, at in self._concluded
                if earlier.number < change.number
                and (at <= long_ago or here.issuperset(earlier.processes))
            ]
            self._concluded = [each for each in self._concluded if each[0] not in gone]
            if self.uid == (stay or change.source)[0]:
                self._forgettable += gone

    def give_up(self, pending: Pending) -> None:
        """The same; what was built for it goes."""
        leads = self.leads
        self.conclude(pending)
        if leads:
            self.given_up.append(pending.posted)
        if pending.gate is not None:
            pending.gate.open()  # its thread must end
        if pending.building is not None:
            pending.building.abandon()
        reason = pending.called_off or pending.refused or "it was called off"
        if leads and pending.posted.request is not None:
            self.answer(pending.posted.request, {"state": "called off", "reason": reason})
        if leads and pending.called_off:
            progress(0, f"the announced switch to {pending.posted.layout} was called off: {reason}")

    def end(self, pending: Pending, error: TransitionError) -> None:
        """The job is over, since this process of it ends; those that wait, or hang, learn of it."""
        change = pending.posted.change
        needed = change.target if isinstance(error, CommitError) else change.source
        if self.uid in needed:
            with contextlib.suppress(WorldError, RuntimeError):
                self.directory.end(f"{self.uid}: {error}")

    def refuse(self, pending: Pending) -> None:
        """Give up what this process has found that it cannot do, which others may have begun.

        Raises :class:`TransitionError` where one of the job does not come back from it.
        """
        if isinstance(self.board.call_off(pending.number, pending.refused), int):
            # Its boundary stands, and others may have begun: they learn of it when they decide.
            attempt = Attempt(self._store, pending.posted.change, self.uid)
            attempt.abort(pending.refused)
            attempt.call_roll(timeout_s=self._timeout_s)
            forget(self._job)
        self.give_up(pending)

    @contextmanager
    def switching(self, pending: Pending) -> Iterator[None]:
        """The switch is under way inside: watch that no process of it hangs; main thread."""
        if pending.gate is not None:
            pending.gate.open()
        with whereabouts.switching(self._tell_place):
            self._switching = pending
            try:
                yield
            finally:
                self._switching = None

    def wait_for_call(self) -> Pending:
        """On a process that waits to join: the switch that takes it in, once all have stopped.

        Raises :class:`WorldError` where the job has ended, or its store, or where none of its
        processes gives a sign of life.
        """
        beats, looked = Beats(self.directory), 0.0
        while True:
            if self.directory.has_ended:
                raise WorldError("the job has ended")
            if time.monotonic() - looked > BEAT_S:
                looked = time.monotonic()
                self._see_that_the_job_lives(beats)
            pending = self.pending
            if pending is None:
                pass
            elif pending.called_off:
                self.give_up(pending)
            else:
                self.prepare(pending)
                if isinstance(self.board.boundary(pending.number), int):
                    if self.board.has_stopped(pending.number):
                        return pending
                    attempt = Attempt(self._store, pending.posted.change, self.uid)
                    if attempt.is_aborted:  # by those who never told it to come
                        self.give_up(pending)
            time.sleep(_TICK_S / 2)

    def _see_that_the_job_lives(self, beats: Beats) -> None:
        """It may have died and left its store: then nobody says that it has ended."""
        members = (self.directory.status() or {}).get("members", ())
        silent = beats.silent(members, self._timeout_s)
        if members and len(silent) == len(members):
            raise WorldError(
                f"none of the job's {len(members)} processes has given a sign of life for "
                f"{self._timeout_s:g} s"
            )

    # -- requests from outside ---------------------------------------------------------------

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Say what became of a request, in the store and in the run directory; any thread.

        Where the store is gone nobody is told through it, and the job goes on.
        """
        with contextlib.suppress(WorldError, RuntimeError):
            self.directory.answer(number, answer)
        self._leave_answer({"number": number, **answer})

    def is_answered(self, number: int) -> bool:
        """Whether it is known what becomes of a request; any thread."""
        answer = self.directory.answer_of(number)
        return answer is not None and answer.get("state") != "waiting"

    def reply(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What somebody is told who asks through the run directory's socket; any thread.

        Raises :class:`ConfigError` where that is no question, :class:`WorldError` where the store
        does not answer.
        """
        match asked:
            case {"ask": dict() as request}:
                return {"number": self.directory.ask(request, self._job.secret)}
            case {"answer": int() as number}:
                return {"answer": self.directory.answer_of(number)}
            case {"status": None}:
                return {"status": self.status()}
        raise ConfigError(
            'a question is {"status": null}, {"ask": {REQUEST}} or {"answer": NUMBER}, not '
            f"{shown(asked)}"
        )

    def read_request(self) -> None:
        """Ask what lies in the run directory, unless another process was first; any thread.

        It is then a request like any other.
        """
        if not self._job.processes:  # waits to join, and may not ask yet
            return
        try:
            text = take_request(self._run_dir)
            if text is None:
                logger.info("no request lies in %s, or another process took it", self._run_dir)
                return
            number = self.directory.ask(text, self._job.secret)
        except (ConfigError, WorldError) as error:
            print(f"[dynatrain] request refused: {error}", flush=True)
            self._leave_answer({"number": None, "state": "refused", "reason": str(error)})
            return
        told = f"request {number}, taken from {self._run_dir}"
        print(f"[dynatrain] {told}: {' '.join(text.split())}", flush=True)

    def _leave_answer(self, answer: dict[str, Any]) -> None:
        try:
            leave_answer(self._run_dir, answer)
        except OSError:
            logger.warning("an answer could not be left in %s", self._run_dir, exc_info=True)

    # -- the thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        last = 0.0
        while not self._stopping.wait(_TICK_S):
            try:
                is_beat = time.monotonic() - last > BEAT_S
                if is_beat:
                    last, self._num_beats = time.monotonic(), self._num_beats + 1
                    self._look_for_the_silent()
                if is_beat or whereabouts.here() is not self._told:
                    self._beat()
                self._tick(is_beat=is_beat)
            except (WorldError, RuntimeError):
                logger.warning(
                    "the job's store is gone: no process can join or leave, and no switch be made",
                    exc_info=True,
                )
                self._wait_without_store()
                return
            except Exception as error:  # without this thread no switch could be made or called off
                if (told := repr(error)) != self._last_error:
                    self._last_error = told
                    logger.exception("the plugin's thread goes on after an error")

    def _beat(self) -> None:
        """A sign of life, and where this process is; any thread."""
        place = self._told = whereabouts.here()
        pending = self.pending
        if not place.phase and pending is not None and pending.is_ready:
            place = Place(READY)
        self.directory.beat(self.uid, whereabouts.to_text(self._num_beats, place))

    def _tell_place(self) -> None:
        with contextlib.suppress(WorldError, RuntimeError):  # the vote finds out, if not the thread
            self._beat()

    def _tick(self, *, is_beat: bool = False) -> None:
        if self.has_notice and self._notice is None:
            self._notice = self.directory.give_notice(self.uid)
        if self.has_notice and self.directory.nobody_stays:
            os._exit(128 + signal.SIGTERM)  # as without a handler: there is no job to go on
        with self._lock:
            pending, number = self.pending, self._job.num_changes + 1
        if self._switching is not None:
            self._see_that_none_hangs(self._switching, is_beat=is_beat)
        elif pending is not None:
            self._further(pending, is_beat=is_beat)
        elif (posted := self._next(number)) is not None:
            with self._lock:
                if self.pending is None and self._job.num_changes + 1 == posted.change.number:
                    self.pending = Pending(posted)
        with self._lock:
            forgettable, self._forgettable = self._forgettable, []
        for change in forgettable:
            self.board.forget(change)
        if self.leads:
            self._listen()

    def _next(self, number: int) -> Posted | None:
        if self._job.built is None:  # others switch meanwhile: only the last one counts
            number = max(number, self.board.latest())
            with self._lock:
                self._job.num_changes = number - 1
        posted = self.board.read(number)
        if posted is None or self.uid in posted.change.processes:
            return posted
        with self._lock:
            self._job.num_changes = number
        return None

    def _further(self, pending: Pending, *, is_beat: bool) -> None:
        number, change = pending.number, pending.posted.change
        found = self.board.boundary(number)
        if isinstance(found, str):
            pending.called_off = found
        elif pending.gate is not None and pending.begin_hold is None:
            self._promise_to_begin(pending)
        if pending.is_scheduled or found is not None:
            return
        if pending.prepared is not None and not pending.is_ready:
            self._report_ready(pending)
        if pending.is_ready and pending.hold is None and self.board.is_armed(number):
            self._promise(pending)
        if time.monotonic() - pending.since > self._timeout_s:
            why = f"not all were prepared within {self._timeout_s:g} s{self._unready(change)}"
            self.board.call_off(number, why)
        silent = self._silent(change, SILENT_S) if is_beat and pending.is_ready else []
        if silent:
            self.board.call_off(number, f"no sign of life from {named(change, silent)}")

    def _last_words(self, uids: tuple[str, ...]) -> list[tuple[str, LastWord]]:
        with contextlib.suppress(WorldError, RuntimeError):
            return list(zip(uids, last_words(self.directory, uids), strict=True))
        return []

    def _unready(self, change: Change) -> str:
        words = last_words(self.directory, change.processes)
        absent = [n for n, word in enumerate(words) if word.phase != READY]
        return f": {named(change, absent)} did not say so" if absent else ""

    def _silent(self, change: Change, seconds: float) -> list[int]:
        """Who of those that this process watches has been silent for so long, by number."""
        watched = watched_by(self.uid, change.processes)
        return [change.processes.index(uid) for uid in self.beats.silent(watched, seconds)]

    def _see_that_none_hangs(self, pending: Pending, *, is_beat: bool) -> None:
        """Wake the main thread where it waits for who will not come, or others have given up.

        Where the job goes on or ends without this process, and the main thread does not find out,
        the process ends.
        """
        change = pending.posted.change
        attempt = Attempt(self._store, change, self.uid)
        # All have much to do now, so they may be silent for longer.
        silent = self._silent(change, 2 * SILENT_S) if is_beat else []
        if silent:
            attempt.abort(f"no sign of life from {attempt.told_of(silent)}")
        stuck_s = self._stuck_s()
        is_stuck = stuck_s > self._wire.timeout_s + 2 * BEAT_S
        if is_stuck and not (attempt.is_aborted or attempt.is_committed):
            phase = whereabouts.here().phase
            why = f"nothing has gone on here for {stuck_s:.0f} s in phase {phase}"
            attempt.abort(f"{attempt.missing()}{why}")
        if attempt.is_aborted:
            for world in self._job.at_stake:
                world.cut()
            if stuck_s > self._wire.timeout_s + self._timeout_s + _GRACE_S:
                self._end_unless_main_does(0.0, "the switch was called off")
        elif silent and attempt.is_committed and not self._job.at_stake:
            bridge = self._job.bridge  # which only brings figures now
            if bridge is not None:
                bridge.world.cut()
        if is_beat and self.directory.has_ended:
            bridge = self._job.bridge
            for world in (*self._job.at_stake, *([] if bridge is None else [bridge.world])):
                world.cut()
            self._end_unless_main_does(_GRACE_S, f"the job has ended ({self.directory.ended_how})")

    def _stuck_s(self) -> float:
        """How long the main thread has been at one place, without time in which all stood still.

        Waits that have a limit of their own do not count.
        """
        place, now = whereabouts.here(), time.monotonic()
        is_limited = bool(place.waits_for) and place.phase in (Phase.groups, Phase.vote)
        if place is not self._watched_place or is_limited:
            self._watched_place, self._stuck, self._looked = place, 0.0, now
        self._stuck += min(now - self._looked, BEAT_S)
        self._looked = now
        return self._stuck

    def _wait_without_store(self) -> None:
        """No switch can be decided now: the main thread finds out when what it waits for is late.

        If it hangs it does not.
        """
        if self._switching is not None:
            most_s = self._wire.timeout_s + self._timeout_s
            self._end_unless_main_does(most_s, "the job's store is gone")

    def _end_unless_main_does(self, seconds: float, why: str) -> None:
        pending, deadline = self._switching, time.monotonic() + seconds
        while pending is self._switching and time.monotonic() < deadline:
            if self._stopping.wait(_TICK_S):
                return
        if pending is None or pending is not self._switching:
            return
        faulthandler.dump_traceback(all_threads=True)
        word = whereabouts.from_text(whereabouts.to_text(0, whereabouts.here()))
        print(f"[dynatrain] {self.uid} ends: {why}, and it hangs, {word}", flush=True)
        os._exit(1)

    def _report_ready(self, pending: Pending) -> None:
        if pending.building is not None:
            if not pending.building.is_done:
                return
            try:
                pending.building.result(timeout_s=0)
            except Exception as error:
                self.board.call_off(pending.number, str(error))
                return
        pending.is_ready = True
        self.board.ready(pending.posted.change)

    def _promise_to_begin(self, pending: Pending) -> None:
        """Not before all have come so far: who waits where groups begin must not be waited for."""
        change = pending.posted.change
        if not pending.has_told_gate:
            pending.has_told_gate = True
            self.board.has_gate(change)
        elif self.board.all_have_gates(change.number):
            with self._lock:
                pending.begin_hold = hold = self._iteration + 1
            self.board.hold(change, hold, "begin")

    def _promise(self, pending: Pending) -> None:
        if self._job.built is None:
            return
        with self._lock:
            hold = max(self._iteration + 1, pending.posted.at)
            pending.hold = hold
        self.board.hold(pending.posted.change, hold)

    def _listen(self) -> None:
        self.arrivals += self.directory.arrivals(len(self.arrivals))
        new = self.directory.notices(self._num_notices)
        self._num_notices += len(new)
        # Those of processes that have left since are of no use, and they may come back.
        self.notices = {*self.notices, *new} & set(self._job.processes)
        nobody_comes = self.pending is None and not self.waiting()
        if self.has_notice and nobody_comes and set(self._job.processes) <= self.notices:
            self.directory.let_nobody_stay()
        for message in self.directory.requests(self._num_requests):
            number, self._num_requests = self._num_requests, self._num_requests + 1
            if self.is_answered(number):
                continue
            text = opened(message, number, self._job.secret)
            if text is None:
                reason = "it is not signed with the job's secret, which is in its run directory"
                self.answer(number, {"state": "refused", "reason": reason})
                continue
            if self.pending is not None or self.requests:
                self.answer(number, {"state": "waiting", "reason": self._what_comes_first()})
            self.requests.append((number, text))
        if time.monotonic() - self._published > BEAT_S:
            self._published = time.monotonic()
            self.directory.publish(self.status())

    def _what_comes_first(self) -> str:
        pending = self.pending
        if pending is None:
            return f"{len(self.requests)} other requests come first"
        return f"{_told(pending)} comes first"

    def status(self) -> dict[str, Any]:
        """What the job is doing, as whoever asks is told; any thread."""
        pending, job = self.pending, self._job
        return {
            "iteration": job.iteration,
            "layout": str(job.layout),
            "world": len(job.processes),
            "members": list(job.processes),
            "waiting": list(self.waiting()),
            "leaving": [uid for uid in self.notices if uid in job.processes],
            "switch": None
            if pending is None
            else {
                "number": pending.number,
                "layout": layout_text(pending.posted.layout),
                "world": len(pending.posted.change.target),
                "origin": pending.posted.origin,
                "request": pending.posted.request,
                "at": pending.posted.at,
                "ready": pending.is_ready,
                "phase": whereabouts.here().phase if self._switching is pending else None,
            },
        }

    def _look_for_the_silent(self) -> None:
        if self.leads:
            waiting = tuple(dict.fromkeys(uid for uid in self.arrivals if uid))
            self.silent_waiting = set(self.beats.silent(waiting))


def layout_text(wanted: Any) -> str:
    """A wanted layout as one line of text."""
    return wanted if isinstance(wanted, str) else json.dumps(wanted)


def _told(pending: Pending) -> str:
    posted = pending.posted
    after = f" after iteration {posted.at}" if posted.at else ""
    return f"switch {pending.number} to {layout_text(posted.layout)}{after} ({posted.origin})"
