"""What rank 0 of a job announces: who takes part in the next switch, and in which layout.

In this order: whoever has to leave; the schedule; what is asked from outside. With a policy, which
may see to those that leave: the schedule; what is asked; the policy; whoever has to leave, where it
wants nothing. Whether a switch is possible is checked before it is announced, and again by each
process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.advisor import Machine, Workload, workload_of
from dynatrain_megatron.config import ScheduleStep
from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.store import StoreOwner
from dynatrain_megatron.errors import ConfigError, LayoutError, SwitchRefused
from dynatrain_megatron.layout import ParallelLayout, read_changes
from dynatrain_megatron.observe import progress
from dynatrain_megatron.plugin.membership import Membership
from dynatrain_megatron.plugin.placing import Placed, Placing
from dynatrain_megatron.policies import Policy, PolicyContext, ask_policy
from dynatrain_megatron.transition.posted import Posted

_FIRST_S, _MOST_S = 5.0, 600.0
"""Seconds after which something that failed is announced again: twice the first, then doubled."""

_REQUEST_KEYS = ("layout", "world", "at", "dry_run")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Uids by what becomes of them: ``members`` by rank, those of them that leave, who waits."""

    members: tuple[str, ...]
    leaving: frozenset[str]
    waiting: tuple[str, ...]

    @property
    def available(self) -> tuple[str, ...]:
        """Who could be in the next world, in the order in which they are taken."""
        return (*(uid for uid in self.members if uid not in self.leaving), *self.waiting)

    def take(self, world: int) -> tuple[str, ...]:
        """The processes of a world of that size; raises :class:`SwitchRefused`."""
        pool = self.available
        if len(pool) < world:
            raise SwitchRefused(
                f"the layout needs {world} processes; {len(pool)} can be had: "
                f"{len(self.members)} of the job, {len(self.leaving)} of which leave, and "
                f"{len(self.waiting)} that wait to join",
                "start more with --dynatrain elastic.join=HOST:PORT",
            )
        return pool[:world]


def wanted_world(wanted: Any) -> int | None:
    """How many ranks a wanted layout is to have; None where it does not say ``world``.

    A ``dp`` that does not fit the ranks there are is a mistake and not a wish for other ranks.
    """
    world = read_changes(wanted).get("world")
    return None if world is None else int(str(world))


def closest(current: ParallelLayout, world: int) -> list[dict[str, int]]:
    """Layouts of ``world`` ranks to try in turn: ``current``'s degrees, then parts of them.

    Those that keep the most of its model parallelism come first.
    """
    axes = ("tp", "pp", "cp", "ep")
    parts = ([d for d in range(getattr(current, axis), 0, -1) if not getattr(current, axis) % d]
             for axis in axes)  # fmt: skip
    found = [dict(zip(axes, degrees, strict=True)) for degrees in itertools.product(*parts)]
    found.sort(key=lambda wanted: -math.prod(wanted.values()))
    return [
        wanted | {"world": world}
        for wanted in found
        if world % (wanted["tp"] * wanted["pp"] * wanted["cp"]) == 0
    ]


class Leader:
    """Rank 0's part; used by whichever process has that rank.

    ``posted`` is the number of the last switch announced, ``posted_step`` the schedule's step that
    it is.
    """

    def __init__(
        self,
        job: Job,
        membership: Membership,
        feasible: Callable[..., ParallelLayout],
        *,
        lead_steps: int,
        policy: Policy | None,
        launch_layout: ParallelLayout,
        placing: Placing | None = None,
    ) -> None:
        """``feasible`` gives the layout of a request on so many ranks, not before iteration ``at``
        if that is given, or raises SwitchRefused.

        With ``placing`` processes take the ranks it finds for them, else those they have.
        """
        self._placing = placing
        self._policy = policy
        self._launch_layout = launch_layout
        self._workload = _workload(job) if policy is not None else None
        self._asked = job.iteration
        self._asked_at = time.monotonic()
        self._refused: list[Any] = []
        self._refusal = ""
        self._last: Capacity | None = None
        self._stuck: Capacity | None = None
        self._num_failures = 0
        self._not_before = 0.0
        self._failed_with: Capacity | None = None
        self._made_way = 0
        self._later: list[tuple[int, int, str]] = []
        self._job = job
        self._membership = membership
        self._feasible = feasible
        self._lead_steps = lead_steps
        self._told_waiting: set[str] = set()
        self._told_to_stay = ""
        self._last_layout = job.layout
        self.posted = 0
        self.posted_step: int | None = None

    def capacity(self) -> Capacity:
        """Who could be in the next world, as far as is known now."""
        members, known = self._job.processes, self._membership
        waiting = known.waiting()
        told = tuple(uid for uid in members if uid in known.notices)
        leaving = self._free_to_leave(told, waiting)
        return Capacity(members, leaving, waiting)

    def _free_to_leave(self, told: tuple[str, ...], waiting: tuple[str, ...]) -> frozenset[str]:
        """Those of ``told`` that leave: not the last one that the store needs."""
        staying = [uid for uid in self._job.processes if uid not in told]
        if not told or self._owner.lives_on(staying, parking=waiting):
            return frozenset(told)
        stuck = next((uid for uid in told if uid in self._owner.processes), "")
        if stuck and stuck != self._told_to_stay:
            self._told_to_stay = stuck
            progress(0, f"{stuck} was told to leave and stays: {self._owner.refusal}")
        return frozenset(told) - {stuck}

    @functools.cached_property
    def _owner(self) -> StoreOwner:
        return self._membership.directory.owner()

    def _take(self, capacity: Capacity, world: int) -> tuple[str, ...]:
        """The processes of a world of that size; raises :class:`SwitchRefused`."""
        target = capacity.take(world)
        staying = {*capacity.members, *capacity.waiting} - capacity.leaving
        if not self._owner.lives_on(target, parking=staying):
            raise self._owner.refusal
        return target

    def announce(self, iteration: int, steps: Sequence[tuple[int, ScheduleStep]]) -> None:
        """Announce what is due, if anything and if nothing is announced; at a step boundary.

        ``steps`` are those of the schedule that are still to come, each with its number.
        """
        if self.posted > self._job.num_changes:
            return
        self._learn()
        capacity = self.capacity()
        if capacity != self._failed_with:  # others are there: what failed may be possible now
            self._failed_with, self._num_failures, self._not_before = capacity, 0, 0.0
        self._tell_of(capacity)
        may_leave = capacity.leaving and self._policy is None and not self._is_too_early
        if may_leave and self._without_leavers(capacity, iteration):
            return
        if steps and iteration >= steps[0][1].iteration - self._lead_steps:
            index, step = steps[0]
            self.post_step(step, index)
        elif (asked := self._next_request(iteration)) is not None:
            self._requested(*asked, capacity, iteration)

    def _learn(self) -> None:
        """What was announced by itself, by the policy or for those that leave, and has failed.

        It is not asked for again at once, and each time later: training must not stand still again
        and again for what fails again and again.
        """
        given_up, self._membership.given_up = self._membership.given_up, []
        for posted in given_up:
            if posted.change.number == self._made_way:
                continue
            if posted.origin == "policy":
                self._refused.append(posted.layout)
            if posted.origin in ("policy", "notice"):
                self._num_failures += 1
                wait_s = min(_MOST_S, _FIRST_S * 2**self._num_failures)
                self._not_before = time.monotonic() + wait_s
        if not given_up and self._job.layout != self._last_layout:
            self._num_failures = 0
        self._last_layout = self._job.layout

    def make_way(self, number: int) -> None:
        """A step of the schedule is due: what is announced is called off, if it can be still."""
        self._made_way = number
        self._membership.board.call_off(number, "a step of the schedule comes first")

    @property
    def _is_too_early(self) -> bool:
        return time.monotonic() < self._not_before

    def _next_request(self, iteration: int) -> tuple[int, str] | None:
        """The request that is to be looked at now: one whose time has come, or the next new one."""
        for index, (at, number, text) in enumerate(self._later):
            if iteration >= at - self._lead_steps:
                del self._later[index]
                return number, text
        return self._membership.requests.pop(0) if self._membership.requests else None

    def post_step(self, step: ScheduleStep, step_index: int) -> None:
        """Announce a step of the schedule, also one that cannot be: all wait for it."""
        capacity, refused = self.capacity(), ""
        target = capacity.members
        try:
            world = wanted_world(step.layout_changes) or len(capacity.members)
            if world != len(capacity.members):
                target = self._take(capacity, world)
            layout = self._feasible(step.layout_changes, world, step.iteration)
            if layout == self._job.layout and target == capacity.members:
                refused = f"the job is in layout {layout} already"
        except (SwitchRefused, LayoutError) as error:
            refused, target = str(error), capacity.members
        self._post(target, step.layout_changes, at=step.iteration, step=step_index, refused=refused)

    def ask_policy(
        self, iteration: int, steps: tuple[ScheduleStep, ...], metrics: dict[str, float]
    ) -> None:
        """Announce what the policy wants, if anything, where nothing else is announced."""
        if self._policy is None:
            return
        if self.posted > self._job.num_changes:
            return
        capacity = self.capacity()
        if capacity != self._last:
            self._last, self._refused = capacity, []
        if self._is_too_early:
            return
        now, before = time.monotonic(), self._asked
        step_s = (now - self._asked_at) / max(1, iteration - before)
        self._asked, self._asked_at = iteration, now
        context = PolicyContext(
            iteration=iteration,
            previous_iteration=before,
            layout=self._job.layout,
            launch_layout=self._launch_layout,
            time_s=time.time(),
            step_s=step_s,
            waiting=len(capacity.waiting),
            leaving=tuple(i for i, uid in enumerate(capacity.members) if uid in capacity.leaving),
            metrics=metrics,
            schedule=steps,
            refused=tuple(self._refused),
            workload=self._workload,
            machine=Machine(gpus_per_node=_ranks_of_a_node()),
        )
        answer: Any = None
        try:
            answer = ask_policy(self._policy, context)
            if answer is None:
                if capacity.leaving:
                    self._without_leavers(capacity, iteration)
                return
            world = wanted_world(answer) or len(capacity.members)
            target = self._take(capacity, world)
            layout = self._feasible(answer, world)
        except (SwitchRefused, LayoutError) as refusal:
            if answer is not None:
                self._refused.append(answer)
            if str(refusal) != self._refusal:
                self._refusal = str(refusal)
                progress(0, f"iteration {iteration}: what the policy wants cannot be: {refusal}")
            if answer is None and capacity.leaving:
                self._without_leavers(capacity, iteration)
            return
        if layout != self._job.layout or target != capacity.members:
            self._post(target, answer, at=iteration, origin="policy")

    def _without_leavers(self, capacity: Capacity, iteration: int) -> bool:
        """Announce a layout without those that leave; False where there is none."""
        if capacity == self._stuck:
            return False
        for world in range(len(capacity.available), 0, -1):
            for wanted in closest(self._job.layout, world):
                try:
                    target = self._take(capacity, world)
                    self._feasible(wanted, world)
                except SwitchRefused:
                    continue
                self._post(target, wanted, at=iteration, origin="notice")
                return True
        self._stuck = capacity
        progress(
            0,
            f"iteration {iteration}: {len(capacity.leaving)} processes are to leave, but no layout "
            f"of the {len(capacity.available)} others can be; they stay until others join",
        )
        return False

    def _requested(self, number: int, text: str, capacity: Capacity, iteration: int) -> None:
        answer = self._membership.answer
        if self._membership.is_answered(number):  # while another process had rank 0
            return
        try:
            request = _read_request(text)
            layout = request.get("layout", {})
            world = request.get("world") or wanted_world(layout)
            target = self._take(capacity, world or len(capacity.members))
            if "layout" not in request:
                layout = self._same_degrees(len(target))
            at = request.get("at", 0)
            found = self._feasible(layout, len(target), at)
            if found == self._job.layout and target == capacity.members:
                raise SwitchRefused(f"the job is in layout {found} already")
        except (SwitchRefused, LayoutError) as error:
            answer(number, {"state": "refused", "reason": str(error)})
            return
        if request.get("dry_run"):
            answer(number, {"state": "possible", "layout": str(found), "world": len(target)})
            return
        if iteration < at - self._lead_steps:  # all else goes on until then
            answer(number, {"state": "waiting", "reason": f"it is not to be before iteration {at}"})
            self._later.append((at, number, text))
            return
        answer(number, {"state": "announced", "layout": str(found), "world": len(target)})
        self._post(target, layout, at=at, origin="request", request=number)

    def _same_degrees(self, world: int) -> dict[str, Any]:
        """The first layout of so many ranks that can be, as close to the current one as can be."""
        reason: SwitchRefused | None = None
        for wanted in closest(self._job.layout, world):
            try:
                self._feasible(wanted, world)
            except SwitchRefused as refusal:
                reason = reason or refusal
                continue
            return wanted
        raise reason or SwitchRefused(f"no layout with the job's degrees has {world} ranks")

    def _post(self, target: Iterable[str], layout: Any, **fields: Any) -> None:
        job, placed = self._job, Placed(tuple(target))
        assert job.store is not None
        if self._placing is not None and not fields.get("refused"):
            with contextlib.suppress(SwitchRefused, LayoutError):  # its step is refused when due
                found = self._feasible(layout, len(placed.target))
                placed = self._placing.order(placed.target, found)
        change = Change(
            job.num_changes + 1, job.processes, placed.target, *job.store.new_world_ids(2)
        )
        posted = Posted(change, layout, placement=placed.told, **fields)
        self._membership.board.post(posted)
        self.posted, self.posted_step = change.number, posted.step

    def _tell_of(self, capacity: Capacity) -> None:
        new = [uid for uid in capacity.waiting if uid not in self._told_waiting]
        if new:
            self._told_waiting.update(new)
            progress(0, f"{len(capacity.waiting)} processes wait to join, now also {new}")


def _workload(job: Job) -> Workload | None:
    try:
        return workload_of(job.args, job.launch.parsed)
    except ConfigError:
        return None


def _ranks_of_a_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "8"))


def _read_request(text: str) -> dict[str, Any]:
    """A request from outside; raises :class:`SwitchRefused` where it is none."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SwitchRefused(f"a request is JSON: {error}") from error
    if not isinstance(read, dict) or not read or set(read) - set(_REQUEST_KEYS):
        raise SwitchRefused(f"a request is an object with keys of {', '.join(_REQUEST_KEYS)}")
    for key in ("world", "at"):
        value = read.get(key, 1)
        if type(value) is not int or value < 1:
            raise SwitchRefused(f"{key} must be a whole number of at least 1, not {value!r}")
    return read
