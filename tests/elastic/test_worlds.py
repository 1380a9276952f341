"""Real worlds of forked processes: they are built, entered and ended while training goes on."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _resolve_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from dynatrain_megatron.elastic import build, live
from dynatrain_megatron.elastic.maker import GroupMaker
from dynatrain_megatron.elastic.store import StoreAddress
from dynatrain_megatron.elastic.world import World, process_uid
from dynatrain_megatron.errors import WorldError
from tests.elastic.job import Exchange, Process, footprint, make_subgroups, start, train
from tests.ranks import run_ranks, store_apart


@pytest.fixture
def store() -> Iterator[StoreAddress]:
    """A store that outlives any of the processes."""
    with store_apart() as address:
        yield address


def world_keys(client: Any) -> list[str]:
    return [key for key in client.list_keys() if re.match(r"w\d+/", key)]


def assert_ended(group: dist.ProcessGroup) -> None:
    """It refuses whatever way it is used in, also those that do not ask torch's record."""
    x = torch.ones(1)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(x, group=group)
    for operation in (lambda: group.allreduce([x]), lambda: group.barrier()):
        with pytest.raises(RuntimeError, match=r"has ended, does not support|error_on_collective"):
            operation()
    with pytest.raises(RuntimeError):
        _resolve_process_group(group.group_name)


# -- permuted, larger, smaller ---------------------------------------------------------------


def launched(p: Process, numbers: Sequence[int]) -> list[dist.ProcessGroup]:
    """Let torch be initialised as a job does it, before anything of ours; returns its groups."""
    launch = PrefixStore("launch", p.address.connect(timeout_s=20))
    dist.init_process_group(
        "gloo", store=launch, rank=numbers.index(p.number), world_size=len(numbers)
    )
    groups = [dist.group.WORLD, dist.new_group()]
    p.live, p.trains = live.adopt(live.gather_uids(), None), True
    return groups


def in_a_fake_world(p: Process, size: int) -> list[dist.ProcessGroup]:
    """What a joiner runs its prologue in: groups that move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    groups = [dist.group.WORLD, dist.new_group()]
    p.live = live.adopt([*(f"someone:{n}" for n in range(size - 1)), process_uid()], None)
    return groups


def test_permuted_then_larger_then_without_its_rank_0(store: StoreAddress) -> None:
    def worker(number: int) -> int:
        p = Process(store, number, 4)
        stale = in_a_fake_world(p, 4) if number == 3 else launched(p, [0, 1, 2])
        hook = sys.excepthook
        if number != 3:
            p.move("permuted", [2, 0, 1])
            for group in stale:
                assert_ended(group)
        p.move("larger", [3, 2, 0, 1])
        for group in stale:
            assert_ended(group)
        exchange = p.move("smaller", [1, 0, 2])
        assert sys.excepthook is hook
        if number == 3:
            assert exchange is None and not dist.is_initialized()
            p.client.wait(["over/0", "over/1", "over/2"])
            assert footprint()["groups"] == 0
            return p.steps
        # The world of 4: its own group, two pairs, and two of even ranks where they are ours.
        assert exchange is not None and exchange.destroyed == 3 + 2 * (number in (0, 3))
        p.move("back", [0, 1, 2])
        p.client.set(f"over/{number}", "")
        left = {key.partition("/")[0] for key in p.client.list_keys() if key.startswith("w")}
        assert left <= {p.live.world.prefix} if p.live is not None else not left
        return p.steps

    steps = run_ranks(4, worker, timeout_s=120)
    assert min(steps) > 0


# -- failures --------------------------------------------------------------------------------

CONNECT_S = 2.0


def killed_in(maker: GroupMaker) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped_in(maker: GroupMaker) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


def raising_in(maker: GroupMaker) -> Any:
    maker([0, 1])
    raise ValueError("on purpose\nwith more lines")


JOINERS: dict[str, tuple[Callable[[GroupMaker], Any] | None, str]] = {
    "absent": (None, "never came: {joiner}"),
    "killed": (killed_in, "."),
    "stopped": (stopped_in, "."),
    "raising": (raising_in, "{joiner}: ValueError: on purpose$"),
    "well": (make_subgroups, ""),
}
"""What joiners do while they make groups, and what the others are told."""


def join(store: StoreAddress, how: str, make: Callable[[GroupMaker], Any] | None) -> NoReturn:
    """The life of a joiner, forked for one attempt."""
    code = 1
    try:
        client = store.connect(timeout_s=20)
        client.set(f"joiner/{how}", process_uid())
        if make is not None:
            processes = client.get(f"members/{how}").decode().split(",")
            world = World.of(int(client.get(f"id/{how}")), processes, timeout_s=20)
            timeout_s = CONNECT_S if how != "well" else 20
            new = build.build(world, store, make, timeout_s=timeout_s, agree_s=1.5 * timeout_s)
            new.install()
            train()
            code = 0
    except WorldError:
        code = 2
    finally:
        os._exit(code)


def test_a_joiner_that_fails_leaves_the_job_as_it_was(store: StoreAddress) -> None:
    def parent_of_joiners(client: Any) -> dict[str, int]:
        ends = {}
        for how, (make, _) in JOINERS.items():
            client.wait([f"begun/{how}"])
            pid = os.fork()
            if pid == 0:
                join(store, how, make)
            client.wait([f"over/{how}"])
            if how != "well":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ends[how] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return ends

    def attempt(p: Process, how: str, told: str) -> None:
        if p.number == 0:
            p.client.set(f"begun/{how}", "")
        joiner = p.client.get(f"joiner/{how}").decode()
        world_id = p.new_id(how, leader=0)
        processes = [*p.uids, joiner]
        if p.number == 0:
            p.client.set(f"members/{how}", ",".join(processes))
        world = World.of(world_id, processes, timeout_s=20)
        before, begin = p.steps, time.monotonic()
        building = start(world, p.address, timeout_s=20 if how == "well" else CONNECT_S)
        with pytest.raises(WorldError, match=f"world {world.id + 1} when that has ended"):
            start(replace(world, id=world.id + 1), p.address)
        p.train_while(building)
        assert how == "well" or time.monotonic() - begin < 2.5 * CONNECT_S + 5
        assert p.steps > before
        if how == "well":
            assert p.live is not None
            old, p.live = p.live, building.result(timeout_s=1)
            p.live.install()
            old.end(p.live.process_groups())
            train()  # with the joiner, once
            return
        with pytest.raises(WorldError, match=f"world id {world.id} was used before"):
            build.build(world, p.address, make_subgroups, agree_s=1)
        with pytest.raises(WorldError) as caught:
            building.result(timeout_s=1)
        message = str(caught.value)
        assert message.startswith(f"world {world.id} was not built: ") and "\n" not in message
        assert re.search(told.format(joiner=re.escape(joiner)), message), message
        p.step()

    def worker(number: int) -> Any:
        if number == 3:
            return parent_of_joiners(store.connect(timeout_s=60))
        p = Process(store, number, 3)
        p.move("first", [0, 1, 2])
        sizes = []
        for how, (_, told) in JOINERS.items():
            attempt(p, how, told)
            sizes.append(footprint())
            if number == 0:
                p.client.set(f"over/{how}", "")
        assert all(size == sizes[0] for size in sizes[:-1]), sizes
        return p.steps

    *_, ends = run_ranks(4, worker, timeout_s=170)
    assert ends == {"absent": 1, "killed": -9, "stopped": -9, "raising": 2, "well": 0}


# -- many ------------------------------------------------------------------------------------


def test_thirty_worlds_leave_nothing_behind(store: StoreAddress) -> None:
    def worker(number: int) -> None:
        p = Process(store, number, 3)
        hook, sizes = sys.excepthook, []
        for turn in range(31):
            p.move(f"turn {turn}", [[0, 1, 2], [2, 0, 1], [1, 0, 2]][turn % 3])
            sizes.append({**footprint(), "keys": len(world_keys(p.client))})
            p.step()
        # A world's last process deletes its keys; the others may look before it has.
        steady = {name: [size[name] for size in sizes[3::3]] for name in sizes[0]}
        assert all(len(set(values)) == 1 for values in steady.values()), steady
        assert sys.excepthook is hook

    run_ranks(3, worker, timeout_s=120)


ORDERS = [[0, 1, 2], [1, 2, 0], [2, 1, 0]]


@pytest.mark.parametrize("keep", [3, 2])
def test_layouts_that_come_back_find_their_groups(store: StoreAddress, keep: int) -> None:
    """Of three layouts in turn, a cache of three worlds has all, a cache of two never the next."""

    def worker(number: int) -> list[Exchange]:
        p = Process(store, number, 3)
        told, sizes = [], []
        for turn in range(13):
            exchange = p.move(f"turn {turn}", ORDERS[turn % 3], keep - 1)
            assert exchange is not None
            told.append(exchange)
            sizes.append(footprint())
        assert sizes[-3:] == sizes[-6:-3], sizes
        return told[7:]

    for told in run_ranks(3, worker, timeout_s=120):
        for exchange in told:
            assert exchange.reused + exchange.created in (3, 5)
            if keep == 3:
                assert exchange.created == exchange.destroyed == 0
            else:
                assert exchange.created > 0
        # What a turn through all layouts makes it also ends.
        assert sum(e.created for e in told[:3]) == sum(e.destroyed for e in told[:3])


# -- the rest --------------------------------------------------------------------------------


def test_a_world_that_is_built_has_the_timeout_of_training(store: StoreAddress) -> None:
    """It waits longer than connecting may take, in its own group and in others."""

    def worker(number: int) -> None:
        p = Process(store, number, 2)
        building = p.start("slow", [0, 1], lambda maker: [maker(), maker()], timeout_s=CONNECT_S)
        new = building.result(timeout_s=20)
        new.install()
        for group in (dist.group.WORLD, new.groups[-1]):
            if number:
                time.sleep(1.2 * CONNECT_S)
            summed = torch.ones(1)
            dist.all_reduce(summed, group=group)
            assert int(summed) == 2
        new.end()

    run_ranks(2, worker, timeout_s=60)


def test_groups_that_connect_late_do_when_they_are_asked_to(
    store: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's do; gloo's stand in for them here."""
    monkeypatch.setattr(live, "_CONNECT_LATE", ("gloo",))

    def worker(number: int) -> str:
        p = Process(store, number, 2)
        build_it = p.start("late", [0, 1], lambda maker: [maker(), maker([0]), maker([1])])
        new = build_it.result(timeout_s=20)
        assert len(new.connecting_late()) == 3  # its own among them
        new.install()
        if number:
            time.sleep(0.5)
        new.connect(torch.device("cpu"), timeout_s=10)
        if number:  # one that does not come
            time.sleep(2)
        else:
            with pytest.raises(WorldError, match="does not connect"):
                new.connect(torch.device("cpu"), timeout_s=0.5)
        return "done"

    assert run_ranks(2, worker, timeout_s=60) == ["done"] * 2


def test_groups_made_afterwards_have_one_name_on_all_processes(store: StoreAddress) -> None:
    """Also where the world's last group was not one of this process."""

    def worker(number: int) -> str:
        p = Process(store, number, 2)
        new = p.start("uneven", [0, 1], lambda maker: [maker(), maker([0])]).result(timeout_s=20)
        new.install()
        later = dist.new_group([0, 1])
        summed = torch.ones(1)
        dist.all_reduce(summed, group=later)
        assert int(summed) == 2
        name = str(later.group_name)
        dist.barrier()
        new.end()
        return name

    first, second = run_ranks(2, worker, timeout_s=60)
    assert first == second


def test_a_world_that_nobody_wants_any_more_ends_when_it_is_built(store: StoreAddress) -> None:
    def worker(number: int) -> None:
        p = Process(store, number, 2)
        go = threading.Event()

        def make(maker: GroupMaker) -> None:
            maker()
            assert go.wait(20)

        before = footprint()
        for early in (True, False):
            building = p.start(f"early {early}", [0, 1], make)
            if early:
                building.abandon()
                with pytest.raises(WorldError, match="is still being built after 0 s"):
                    building.result(timeout_s=0)
            go.set()
            while not building.is_done:
                time.sleep(0.01)
            building.abandon()
            with pytest.raises(WorldError, match="was abandoned"):
                building.result(timeout_s=0)
            go.clear()
        p.client.set(f"over/{number}", "")
        p.client.wait(["over/0", "over/1"])
        assert footprint() == before and not dist.is_initialized()
        if number == 0:
            assert world_keys(p.client) == []

    run_ranks(2, worker, timeout_s=60)


def test_a_world_is_of_different_processes_one_of_them_this() -> None:
    own = process_uid()
    assert process_uid() == own and re.fullmatch(r"[^:]+:\d+:[0-9a-f]{8}", own)
    assert own.split(":")[1] == str(os.getpid())
    with pytest.raises(WorldError, match="names a process twice"):
        World.of(1, [own, own])
    with pytest.raises(WorldError, match=f"world 1 has no process {own}; it has a:1:x, b:2:y"):
        World.of(1, ["a:1:x", "b:2:y"])
    uids = run_ranks(2, lambda rank: process_uid())
    assert len({*uids, own}) == 3
