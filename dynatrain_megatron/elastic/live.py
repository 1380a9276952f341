"""A world that is built: in force, or aside; and what happens to its groups when it goes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dynatrain_megatron.elastic import records
from dynatrain_megatron.elastic.connections import Connections
from dynatrain_megatron.elastic.groups import GroupKey
from dynatrain_megatron.elastic.records import Held
from dynatrain_megatron.elastic.world import World, process_uid
from dynatrain_megatron.errors import WorldError

logger = logging.getLogger(__name__)

_CONNECT_LATE = ("nccl",)


@dataclass
class LiveWorld[T]:
    """A world that is built: its record, and what the caller's function made with its groups.

    ``held`` are this process's groups in it; ``reused`` are those of them it took over from others.
    ``connections`` are those of its groups, as far as they are known, and of some that have ended.
    """

    world: World
    record: Any
    groups: T
    held: dict[GroupKey, Held] = field(default_factory=dict)
    reused: tuple[dist.ProcessGroup, ...] = ()
    client: Store | None = None
    connections: Connections = field(default_factory=Connections)

    @property
    def num_made(self) -> int:
        """How many of its groups were made for it."""
        return len(self.held) - len(self.reused)

    def cut(self) -> None:
        """Wake whoever waits in it for another process; any thread. It can only be ended then."""
        self.connections.cut()
        self.give_up()

    def give_up(self) -> None:
        """Leave what is in flight on GPUs, which ending its groups would wait for; any thread."""
        for group in self.process_groups():
            if group.name() == "nccl":
                group.abort()

    def connecting_late(self) -> list[dist.ProcessGroup]:
        """Groups made for it that connect with their first operation, in the order of making."""
        made = [group for group in self.process_groups() if group not in self.reused]
        return [group for group in made if group.name() in _CONNECT_LATE]

    def connect(self, device: torch.device, *, timeout_s: float) -> None:
        """Let those groups connect now; collective over its processes, before it is in force.

        Otherwise they take memory, and find a link that fails, when nobody can go back any more.
        Raises :class:`WorldError` where one does not within ``timeout_s``.
        """
        if self.client is not None:  # at which they find each other
            self.client.set_timeout(timedelta(seconds=timeout_s))
        try:
            for group in self.connecting_late():
                _connect(group, device, timeout_s)
        finally:
            if self.client is not None:
                self.client.set_timeout(timedelta(seconds=self.world.timeout_s))

    def process_groups(self) -> list[dist.ProcessGroup]:
        """This process's groups in it, the default one among them."""
        return [held.group for held in self.held.values()]

    def install(self) -> None:
        """Put it in force on this process, for all threads at once."""
        records.install(self.record)

    def pass_on(self, new: LiveWorld[Any]) -> None:
        """Let ``new``, of the same processes by rank, know the groups that others made in this one.

        A script may have some of its own; they are none of ours to end.
        """
        ours = {*self.process_groups(), *new.record.pg_map}
        for group in list(self.record.pg_map):
            if group not in ours:
                ranks = sorted(self.record.pg_group_ranks[group])
                Held.of(self.record, group).add_to(new.record, ranks)

    def abandon(self) -> None:
        """End it before it was ever in force: the groups it took over go on elsewhere."""
        self.end(keep=self.reused)

    def end(self, keep: Collection[dist.ProcessGroup] = ()) -> int:
        """End its groups but those to ``keep``, which other worlds have too; returns how many.

        Groups that somebody else made in it go on, if :meth:`pass_on` has let another world know.
        Its processes do this alike, once another world is in force or as they leave. The last of
        them deletes its keys from the store.
        """
        kept = set(keep)
        ours = set(self.process_groups()) - kept
        doomed = [group for group in records.groups_of(self.record) if group in ours]
        for group in doomed:
            records.end(group)
        records.clear(self.record)
        self.held, self.reused = {}, ()
        client, self.client = self.client, None
        try:
            if client is not None and client.add("ended", 1) == self.world.size:
                forget(client)
        except dist.DistError:  # the store may have ended before us, and the keys with it
            logger.debug("world %d: the store is gone", self.world.id, exc_info=True)
        return len(doomed)


def _connect(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
    told, deadline = torch.ones(1, device=device), time.monotonic() + timeout_s
    try:
        work = group.allreduce([told])
        # Not by a wait with a timeout: NCCL's watchdog would end the process for it, later.
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not work.is_completed():
            if group.name() == "nccl":
                group.abort()
            raise WorldError(f"group {group.group_desc} does not connect within {timeout_s:g} s")
        work.wait()
    except RuntimeError as error:
        raise WorldError(f"group {group.group_desc} does not connect: {error}") from error
    if float(told) != group.size():  # one that was given up says nothing of it
        raise WorldError(f"group {group.group_desc} was given up while it connected")


def forget(keys_of_world: Store) -> None:
    """Delete all keys of a world; for its last process, or for one that survives the others.

    The client sees the world's keys only: it prefixes them.
    """
    for key in keys_of_world.list_keys():
        keys_of_world.delete_key(key)


def adopt[T](processes: Sequence[str], groups: T) -> LiveWorld[T]:
    """The world that torch was started with, by whoever did; ``processes`` by rank."""
    record = records.in_force()
    backend, _ = record.pg_map[record.default_pg]
    world = World.of(0, processes, backend=backend)
    held: dict[GroupKey, Held] = {}
    seen = Counter[GroupKey]()
    for group in record.pg_map:
        members = world.uids(sorted(record.pg_group_ranks[group]))
        # What options it was made with is not known any more: with NCCL it is taken for no other.
        options = "" if group.name() == "gloo" else "of the launch"
        purpose = "" if group.group_desc in ("undefined", "default_pg") else group.group_desc
        key = GroupKey(members, record.pg_map[group][0], options, purpose)
        seen[key] += 1
        held[replace(key, index=seen[key] - 1)] = Held.of(record, group)
    return LiveWorld(world, record, groups, held)


def gather_uids() -> tuple[str, ...]:
    """Collective over the world in force: the uids of its processes, by rank."""
    return tuple(gather(process_uid()))


def gather(own: str) -> list[str]:
    """Collective over the world in force: everyone's text, by rank."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    return rows
