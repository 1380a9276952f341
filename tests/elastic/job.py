"""A small job for the tests of worlds: forked processes that train by an all-reduce a step."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

from dynatrain_megatron.elastic import build, building, records
from dynatrain_megatron.elastic.building import Building
from dynatrain_megatron.elastic.groups import HeldGroups, all_held
from dynatrain_megatron.elastic.live import LiveWorld
from dynatrain_megatron.elastic.maker import Group, GroupMaker
from dynatrain_megatron.elastic.store import StoreAddress
from dynatrain_megatron.elastic.world import World, process_uid

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Subgroups:
    """The groups of a world in the tests: each pair of neighbours, and the even ranks twice."""

    pairs: list[Group]
    evens: list[Group]


def make_subgroups(maker: GroupMaker) -> Subgroups:
    """As Megatron does: all processes ask for all groups."""
    size = dist.get_world_size()
    pairs = [maker([r, (r + 1) % size], group_desc="PAIR") for r in range(size) if size > 1]
    return Subgroups(pairs, [maker(range(0, size, 2), group_desc="EVEN") for _ in range(2)])


def train(flag: int = 1) -> int:
    """One step of training in the world in force; returns the smallest flag of all."""
    size = dist.get_world_size()
    summed = torch.ones(64)
    dist.all_reduce(summed)
    assert summed.tolist() == [size] * 64
    assert functional_all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [size] * 2
    smallest = torch.tensor([flag])
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return int(smallest)


@dataclass(frozen=True)
class Exchange:
    """Groups of a process that a change of worlds reused, made and ended."""

    reused: int
    created: int
    destroyed: int


def start(
    world: World,
    address: StoreAddress,
    make: Callable[[GroupMaker], Any] = make_subgroups,
    *,
    known: HeldGroups | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Building[LiveWorld[Any]]:
    """Build a world in a thread of its own."""
    times = {"timeout_s": timeout_s, "agree_s": 1.5 * timeout_s}
    return building.start(
        f"world {world.id}", lambda: build.build(world, address, make, known=known, **times)
    )


class Process:
    """What a forked process of the job knows; ``number`` is its place in the test, never a rank."""

    def __init__(self, address: StoreAddress, number: int, processes: int) -> None:
        self.address = address
        self.number = number
        self.client = address.connect(timeout_s=TIMEOUT_S)
        self.client.set(f"uid/{number}", process_uid())
        self.uids = [self.client.get(f"uid/{n}").decode() for n in range(processes)]
        self.live: LiveWorld[Any] | None = None
        self.aside: list[LiveWorld[Any]] = []
        self.trains = False
        self.steps = 0

    def new_id(self, what: str, leader: int) -> int:
        """The id of the world that is called ``what``; one process asks the store for it."""
        if self.number == leader:
            self.client.set(f"id/{what}", str(self.client.add("dt/worlds", 1)))
        return int(self.client.get(f"id/{what}"))

    def world(self, what: str, numbers: Sequence[int]) -> World:
        """The world of these processes in this order."""
        processes = [self.uids[n] for n in numbers]
        return World.of(self.new_id(what, numbers[0]), processes, timeout_s=TIMEOUT_S)

    def start(
        self,
        what: str,
        numbers: Sequence[int],
        make: Callable[[GroupMaker], Any] = make_subgroups,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> Building[LiveWorld[Any]]:
        """Build that world aside, with what groups there are."""
        world = self.world(what, numbers)
        in_force = [] if self.live is None else [self.live]
        known = all_held(each.held for each in (*self.aside, *in_force))
        return start(world, self.address, make, known=known, timeout_s=timeout_s)

    def move(self, what: str, numbers: Sequence[int], keep: int = 0) -> Exchange | None:
        """Change to that world, training until all have built it; ``None`` if left behind.

        The time of the change itself is kept in ``swap_s``; ``keep`` worlds stay aside.
        """
        building = self.start(what, numbers) if self.number in numbers else None
        if self.trains:
            self.train_while(building)
        old = self.live
        if building is None:
            assert old is not None
            old.end()
            self.live, self.trains = None, False
            return None
        new = building.result(timeout_s=2 * TIMEOUT_S)
        begin = time.perf_counter()
        new.install()
        self.swap_s = time.perf_counter() - begin
        self.live, self.trains = new, True
        exchange = Exchange(len(new.reused), new.num_made, self._put_aside(old, keep))
        self.check(numbers)
        return exchange

    def _put_aside(self, old: LiveWorld[Any] | None, keep: int) -> int:
        """Keep ``old`` and those before as far as all their processes are here; end the others."""
        assert self.live is not None
        here = set(self.live.world.processes)
        latest = [*([] if old is None else [old]), *self.aside]
        whole = [each for each in latest if here.issuperset(each.world.processes)]
        self.aside = whole[:keep]
        kept = [g for each in (*self.aside, self.live) for g in each.process_groups()]
        return sum(each.end(kept) for each in latest if each not in self.aside)

    def train_while(self, building: Building[Any] | None) -> None:
        """Train until all have built their next world, or failed to."""
        rank, size = dist.get_rank(), dist.get_world_size()
        while not self.step(int(building is None or building.is_done)):
            assert (dist.get_rank(), dist.get_world_size()) == (rank, size)

    def step(self, flag: int = 1) -> int:
        """One step of training in the world in force; returns the smallest flag of all."""
        self.steps += 1
        return train(flag)

    def check(self, numbers: Sequence[int]) -> None:
        """Every collective of the world in force reaches the processes it should."""
        assert dist.get_world_size() == len(numbers)
        assert dist.get_rank() == numbers.index(self.number)
        got: list[Any] = [None] * len(numbers)
        dist.all_gather_object(got, self.number)
        assert got == list(numbers)
        first = torch.tensor([self.number])
        dist.broadcast(first, src=0)
        assert int(first) == numbers[0]
        assert self.live is not None
        size, rank = len(numbers), dist.get_rank()
        for r, pair in enumerate(self.live.groups.pairs):
            if rank in (r, (r + 1) % size):
                assert dist.get_process_group_ranks(pair) == sorted({r, (r + 1) % size})
                source = torch.tensor([self.number])
                dist.broadcast(source, src=r, group=pair)
                assert int(source) == numbers[r]
        for even in self.live.groups.evens:
            assert (even == dist.GroupMember.NON_GROUP_MEMBER) == bool(rank % 2)
            if rank % 2 == 0:
                total = torch.tensor([self.number])
                dist.all_reduce(total, group=even)
                assert int(total) == sum(numbers[::2])
        dist.barrier()


def footprint() -> dict[str, int]:
    """What a process holds that worlds could leak, once it stays the same for a moment."""
    gc.collect()
    last, now = None, _footprint()
    while now != last:
        time.sleep(0.06)  # the kernel takes threads and files back a little later
        last, now = now, _footprint()
    return now


def _footprint() -> dict[str, int]:
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(records.in_force().pg_map),
    }
