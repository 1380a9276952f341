"""Ranks that run a schedule in the engine's order over a transport of limited means.

The engine (:mod:`dynatrain_megatron.engine.execute`) posts everything of a window, receives first,
and then waits for the window before it; it goes through windows in ascending order. A memory stage
begins when a rank has waited for all its earlier windows (:class:`Drain`), or when all ranks have
(:class:`Meet`). Of the transport this is assumed, and no more:

- messages from one rank to another meet their receives in the order posted; they have no tags;
- of what a rank has posted the first ``slots`` operations are in progress, the others wait their
  turn (as where NCCL cuts a group);
- a send is done when it is received, or stored in one of the sender's ``buffers`` until then
  (as in a socket); without any, both ends wait for each other.

Who goes first is drawn at random. Where everyone waits, :class:`Deadlock` is raised.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynatrain_megatron.planner import Plan
from dynatrain_megatron.vps.boxes import IntArray

UNDER_WAY = 2


class Deadlock(AssertionError):
    """Ranks wait for each other for ever."""


class Mismatch(AssertionError):
    """A receive got another message than it was posted for."""


class Operation(NamedTuple):
    """One end of a message."""

    message: int
    src: int
    dst: int
    sending: bool

    @property
    def rank(self) -> int:
        return self.src if self.sending else self.dst


@dataclass(frozen=True, slots=True)
class Post:
    """Post these, then wait until fewer than ``UNDER_WAY`` windows are."""

    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait for all windows posted so far."""


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait for all windows posted so far, and for all ranks to come here."""


Program = list[Post | Drain | Meet]


def programs(
    num_ranks: int,
    message: IntArray,
    src: IntArray,
    dst: IntArray,
    window: IntArray,
    *,
    drains: Collection[int] = (),
    meets: Collection[int] = (),
) -> list[Program]:
    """What each rank does; windows at ``drains`` and ``meets`` begin a memory stage.

    ``message`` [m] are numbers that tell messages apart, in the order in which a rank posts them.
    """
    stages: list[tuple[int, Drain | Meet]] = [(at, Drain()) for at in drains]
    stages = sorted(stages + [(at, Meet()) for at in meets], key=lambda stage: stage[0])
    found: list[Program] = [[] for _ in range(num_ranks)]
    own: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for name, a, b, at in np.stack((message, src, dst, window), axis=1).tolist():
        own[b, at].append(Operation(name, a, b, False))
        own[a, at].append(Operation(name, a, b, True))
    begun = [0] * num_ranks

    def enter(rank: int, before: float) -> None:
        while begun[rank] < len(stages) and stages[begun[rank]][0] <= before:
            found[rank].append(stages[begun[rank]][1])
            begun[rank] += 1

    for (rank, at), operations in sorted(own.items()):
        enter(rank, at)
        found[rank].append(Post(tuple(sorted(operations, key=lambda one: one.sending))))
    for rank in range(num_ranks):
        enter(rank, np.inf)
    return found


def simulate_plan(plan: Plan, **means: int) -> None:
    """Run the plan of all ranks; each begins a pass when it is through with the one before."""
    columns, first_of_pass = np.zeros((4, 0), dtype=np.int64), []
    for each in plan.passes:
        own = each.schedule
        first_of_pass.append(columns[3].max(initial=-1) + 1)
        window = own.window + first_of_pass[-1]
        message = np.arange(len(own)) + columns[0].max(initial=-1) + 1
        columns = np.hstack((columns, (message, own.src, own.dst, window)))
    simulate(programs(plan.num_ranks, *columns, drains=first_of_pass), **means)


def simulate(
    todo: Sequence[Program], *, buffers: int = 0, slots: int = 1 << 30, seed: int = 0
) -> None:
    """Run all ranks to their end; raises :class:`Deadlock` or :class:`Mismatch`."""
    _World(todo, buffers, slots, random.Random(seed)).run()


class _World:
    """All ranks, and what is between them."""

    def __init__(
        self, todo: Sequence[Program], buffers: int, slots: int, order: random.Random
    ) -> None:
        self.ranks = [_Rank(program, buffers, slots) for program in todo]
        self.sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.wanted: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.order = order
        self.awake = list(range(len(todo)))
        self.waiting_to_meet = 0

    def run(self) -> None:
        while self.awake:
            at = self.order.randrange(len(self.awake))
            rank = self.awake[at]
            if not self.step(rank):
                self.awake[at] = self.awake[-1]
                self.awake.pop()
                self.ranks[rank].asleep = True
        stuck = {
            rank: [sorted(window) for window in one.under_way]
            for rank, one in enumerate(self.ranks)
            if not one.finished
        }
        if stuck:
            raise Deadlock(f"{len(stuck)} ranks wait for each other; under way: {stuck}"[:800])

    def step(self, rank: int) -> bool:
        """Let a rank go on; whether it could."""
        self.start(rank)
        one = self.ranks[rank]
        allowed = UNDER_WAY - 1
        if one.at == len(one.program) or not isinstance(one.program[one.at], Post):
            allowed = 0
        while one.under_way and not one.under_way[0]:
            one.under_way.popleft()
        if len(one.under_way) > allowed or one.finished:
            return False
        if one.at == len(one.program):
            one.finished = True
            return False
        now = one.program[one.at]
        if isinstance(now, Meet) and not one.released:
            if not one.has_come:
                one.has_come = True
                self.waiting_to_meet += 1
            if self.waiting_to_meet < len(self.ranks):
                return False
            self.waiting_to_meet = 0
            for other, it in enumerate(self.ranks):
                it.has_come, it.released = False, True
                self.wake(other)
        one.at += 1
        one.released = False
        if isinstance(now, Post):
            unfinished = set(now.operations)
            one.under_way.append(unfinished)
            one.window_of.update(dict.fromkeys(now.operations, unfinished))
            one.queue.extend(now.operations)
        return True

    def wake(self, rank: int) -> None:
        if self.ranks[rank].asleep:
            self.ranks[rank].asleep = False
            self.awake.append(rank)

    def start(self, rank: int) -> None:
        """Put what is posted in progress, as far as there are slots."""
        one = self.ranks[rank]
        while one.queue and one.in_progress < one.slots:
            operation = one.queue.popleft()
            one.in_progress += 1
            pair = operation.src, operation.dst
            if operation.sending:
                self.sent[pair].append(operation.message)
                one.unstored.append(operation)
                self.store(rank)
            else:
                self.wanted[pair].append(operation.message)
            self.match(*pair)

    def store(self, rank: int) -> None:
        """Take sends out of the sender's hands while it has buffers."""
        one = self.ranks[rank]
        while one.unstored and one.free_buffers:
            operation = one.unstored.popleft()
            if operation in one.window_of:  # not received meanwhile
                one.free_buffers -= 1
                one.stored.add(operation.message)
                self.done(operation)

    def match(self, src: int, dst: int) -> None:
        sent, wanted = self.sent[src, dst], self.wanted[src, dst]
        while sent and wanted:
            message, expected = sent.popleft(), wanted.popleft()
            if message != expected:
                raise Mismatch(f"{src} -> {dst}: message {message} where {expected} is expected")
            sender = self.ranks[src]
            if message in sender.stored:
                sender.stored.remove(message)
                sender.free_buffers += 1
                self.store(src)
            else:
                self.done(Operation(message, src, dst, True))
            self.done(Operation(message, src, dst, False))

    def done(self, operation: Operation) -> None:
        one = self.ranks[operation.rank]
        one.window_of.pop(operation).remove(operation)
        one.in_progress -= 1
        self.wake(operation.rank)


class _Rank:
    """Where one rank is in its program."""

    def __init__(self, program: Program, buffers: int, slots: int) -> None:
        self.program = program
        self.at = 0
        self.under_way: deque[set[Operation]] = deque()
        self.window_of: dict[Operation, set[Operation]] = {}
        self.queue: deque[Operation] = deque()
        self.in_progress, self.slots = 0, slots
        self.unstored: deque[Operation] = deque()
        self.stored: set[int] = set()
        self.free_buffers = buffers
        self.asleep = self.finished = self.has_come = self.released = False
