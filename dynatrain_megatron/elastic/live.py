"""A world that is built: in force, or aside; and what happens to its groups when it goes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dynatrain_megatron.elastic import records
from dynatrain_megatron.elastic.groups import GroupCache, GroupKey
from dynatrain_megatron.elastic.records import Held
from dynatrain_megatron.elastic.world import World, process_uid

logger = logging.getLogger(__name__)


@dataclass
class LiveWorld[T]:
    """A world that is built: its record, and what the caller's function made with its groups.

    ``made`` and ``reused`` are this process's groups, by whether it got them for this world.
    """

    world: World
    record: Any
    groups: T
    keys: tuple[GroupKey, ...] = ()
    made: dict[GroupKey, Held] = field(default_factory=dict)
    reused: list[dist.ProcessGroup] = field(default_factory=list)
    client: Store | None = None

    def install(self) -> None:
        """Put it in force on this process, for all threads at once."""
        records.install(self.record)

    def end(self, keep: Collection[dist.ProcessGroup] = ()) -> int:
        """End its groups but those it reused and those to ``keep``; returns how many.

        Its processes do this alike, once another world is in force or as they leave. The last of
        them deletes its keys from the store.
        """
        kept = {*self.reused, *keep}
        doomed = [group for group in records.groups_of(self.record) if group not in kept]
        for group in doomed:
            records.end(group)
        records.clear(self.record)
        self.made, self.reused = {}, []
        client, self.client = self.client, None
        try:
            if client is not None and client.add("ended", 1) == self.world.size:
                forget(client)
        except dist.DistError:  # the store may have ended before us, and the keys with it
            logger.debug("world %d: the store is gone", self.world.id, exc_info=True)
        return len(doomed)


def forget(keys_of_world: Store) -> None:
    """Delete all keys of a world; for its last process, or for one that survives the others.

    The client sees the world's keys only: it prefixes them.
    """
    for key in keys_of_world.list_keys():
        keys_of_world.delete_key(key)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Groups of this process that a change of worlds reused, made and ended."""

    reused: int
    created: int
    destroyed: int


def retire(
    old: LiveWorld[Any],
    new: LiveWorld[Any],
    cache: GroupCache | None = None,
    *,
    present: Collection[str] = (),
) -> Exchange:
    """End what is left of ``old`` now that ``new`` is in force; each process of either does it.

    With a ``cache``, groups that it keeps outlive ``old``; ``present`` are processes that may be in
    a world again besides those of ``new``. Done before the next world is built.
    """
    counts = len(new.reused), len(new.made)
    evicted: list[dist.ProcessGroup] = []
    kept: list[dist.ProcessGroup] = []
    if cache is not None:
        here = {*new.world.processes, *present}
        evicted = [held.group for held in cache.commit(new.keys, new.made, present=here)]
        kept = cache.groups()
    for group in evicted:
        records.end(group)
    ended = old.end([*kept, *evicted])
    return Exchange(*counts, ended + len(evicted))


def adopt(processes: Sequence[str]) -> LiveWorld[None]:
    """The world that torch was started with, by whoever did; ``processes`` by rank."""
    record = records.in_force()
    backend, _ = record.pg_map[record.default_pg]
    world = World.of(0, processes, backend=backend)
    made = {
        GroupKey((), backend, purpose=record.pg_names[group]): Held.of(record, group)
        for group in record.pg_map
    }
    return LiveWorld(world, record, None, made=made)


def gather_uids() -> tuple[str, ...]:
    """Collective over the world in force: the uids of its processes, by rank."""
    uids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(uids, process_uid())
    return tuple(uids)
