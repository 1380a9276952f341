"""A process's part in who belongs to the job: a thread that watches the job's store, and what the
main thread does about it at step boundaries.

::

    thread    tells that this process lives, sees what is announced, waits for worlds to be built,
              makes promises; on rank 0 also who has come, who has to go, what is asked
    main      checks and prepares what is announced, at the next boundary; stops where agreed

The thread touches nothing of Megatron, torch's groups or the model.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.config import Overlap
from dynatrain_megatron.elastic.beats import SILENT_S, Beats
from dynatrain_megatron.elastic.building import Building
from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.control import leave_answer, opened, take_request
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.gate import Gate
from dynatrain_megatron.elastic.store import JobStore
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.errors import ConfigError, SwitchRefused, WorldError
from dynatrain_megatron.observe import progress
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.transition import Target
from dynatrain_megatron.transition.attempt import Attempt
from dynatrain_megatron.transition.posted import Board, Posted
from dynatrain_megatron.transition.prepare import (
    Prepared,
    Wire,
    Worlds,
    prepare,
    start_building,
)

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_GROUPS_A_STEP = 4  # made at one boundary, where they are made at boundaries
_BEAT_S = 1.0


@dataclass
class Pending:
    """A switch that is announced, as far as this process has got with it."""

    posted: Posted
    since: float = field(default_factory=time.monotonic)
    prepared: Prepared | None = None
    building: Building[Worlds] | None = None
    gate: Gate | None = None
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
        self._job = job
        self._store = store
        self._check = check
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
            if pending.begin_hold is None:
                pending.begin_hold = iteration + 1
                self.board.hold(pending.posted.change, iteration + 1, "begin")
            if iteration < pending.begin_hold:
                return True
            found = self.board.wait_for_begin(pending.number, timeout_s=self._timeout_s)
            if isinstance(found, str):
                pending.called_off = found
                self.give_up(pending)
                return False
            pending.begin = found
            progress(
                self._job.args.rank,
                f"iteration {iteration}: from here on groups of the switch to come are made, "
                f"{_GROUPS_A_STEP} at each boundary",
            )
        if iteration >= pending.begin and not pending.building.is_done:
            current_platform().synchronize()
            thread, timeout_s = pending.building.thread, 3 * self._wire.connect_s
            gate.let_pass(_GROUPS_A_STEP, thread, timeout_s=timeout_s)
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
        posted = self.board.wait(number, timeout_s=self._timeout_s)
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
        if pending.gate is not None:
            pending.gate.open()  # its thread must end
        if pending.building is not None:
            pending.building.abandon()
        reason = pending.called_off or pending.refused or "it was called off"
        if leads and pending.posted.request is not None:
            self.answer(pending.posted.request, {"state": "called off", "reason": reason})
        if leads and pending.called_off:
            progress(0, f"the announced switch to {pending.posted.layout} was called off: {reason}")

    @contextmanager
    def switching(self, pending: Pending) -> Iterator[None]:
        """The switch is under way inside: watch that no process of it hangs."""
        if pending.gate is not None:
            pending.gate.open()
        self._switching = pending
        try:
            yield
        finally:
            self._switching, self._job.phase = None, ""

    def wait_for_call(self) -> Pending:
        """On a process that waits to join: the switch that takes it in, once all have stopped.

        Raises :class:`WorldError` where the job has ended, or its store.
        """
        while True:
            if self.directory.has_ended:
                raise WorldError("the job has ended")
            pending = self.pending
            if pending is None:
                pass
            elif pending.called_off:
                self.give_up(pending)
            else:
                self.prepare(pending)
                if isinstance(self.board.boundary(pending.number), int):
                    return pending
            time.sleep(_TICK_S / 2)

    # -- requests from outside ---------------------------------------------------------------

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Say what became of a request, in the store and in the run directory; any thread."""
        self.directory.answer(number, answer)
        self._leave_answer({"number": number, **answer})

    def is_answered(self, number: int) -> bool:
        """Whether it is known what becomes of a request; any thread."""
        answer = self.directory.answer_of(number)
        return answer is not None and answer["state"] != "waiting"

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
        beats, last = 0, 0.0
        while not self._stopping.wait(_TICK_S):
            try:
                if time.monotonic() - last > _BEAT_S:
                    last, beats = time.monotonic(), beats + 1
                    self.directory.beat(self.uid, beats)
                    self._look_for_the_silent()
                self._tick()
            except (WorldError, RuntimeError):
                logger.warning(
                    "the job's store is gone: no process can join or leave, and no switch be made",
                    exc_info=True,
                )
                return

    def _tick(self) -> None:
        if self.has_notice and self._notice is None:
            self._notice = self.directory.give_notice(self.uid)
        if self.has_notice and self.directory.nobody_stays:
            os._exit(128 + signal.SIGTERM)  # as without a handler: there is no job to go on
        with self._lock:
            pending, number = self.pending, self._job.num_changes + 1
        if self._switching is not None:
            self._see_that_none_hangs(self._switching)
        elif pending is not None:
            self._further(pending)
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

    def _further(self, pending: Pending) -> None:
        number, change = pending.number, pending.posted.change
        found = self.board.boundary(number)
        if isinstance(found, str):
            pending.called_off = found
        if pending.is_scheduled or found is not None:
            return
        if pending.prepared is not None and not pending.is_ready:
            self._report_ready(pending)
        if pending.is_ready and pending.hold is None and self.board.is_armed(number):
            self._promise(pending)
        if time.monotonic() - pending.since > self._timeout_s:
            self.board.call_off(number, f"not all were prepared within {self._timeout_s:g} s")
        silent = self.beats.silent(change.processes) if pending.is_ready else []
        if silent:
            self.board.call_off(number, f"no sign of life from {', '.join(silent)}")

    def _see_that_none_hangs(self, pending: Pending) -> None:
        """Wake the main thread where it waits for who will not come, or others have given up."""
        change = pending.posted.change
        attempt = Attempt(self._store, change, self.uid)
        silent = self.beats.silent(change.processes, 2 * SILENT_S)  # all have much to do now
        if silent:
            attempt.abort(f"no sign of life from {', '.join(silent)}")
        if attempt.is_aborted:
            for world in self._job.at_stake:
                world.cut()

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
        if time.monotonic() - self._published > _BEAT_S:
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
                "phase": job.phase if self._switching is pending else None,
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
