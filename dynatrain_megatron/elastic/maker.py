"""Makes the groups of a world, or takes over those that another world has already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dynatrain_megatron.elastic.groups import GroupKey, HeldGroups, options_text
from dynatrain_megatron.elastic.records import Held, Record
from dynatrain_megatron.elastic.world import World

_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER

Group = dist.ProcessGroup | int
"""A group, or torch's mark for one that this process is not in."""


class GroupMaker:
    """Makes a world's groups; all its processes ask for the same ones, in the same order.

    Called like Megatron's ``parallel_state.create_group``, whose place it can take. ``known`` are
    groups of other worlds that may be taken over; ``held`` are this world's, in the end.
    """

    def __init__(self, world: World, record: Record, known: HeldGroups, timeout_s: float) -> None:
        self.held: dict[GroupKey, Held] = {}
        self.reused: list[dist.ProcessGroup] = []
        self._world = world
        self._record = record
        self._known = known
        self._timeout = timedelta(seconds=timeout_s)
        self._wanted: list[tuple[dist.ProcessGroup, timedelta]] = []
        self._seen = Counter[GroupKey]()
        self._num_asked = 0

    def default(self, store: Store) -> None:
        """The world's own group; one that is made here has carried a barrier then."""
        ranks = range(self._world.size)
        key = self._next_key(ranks, self._world.backend, None, None)
        if (reused := self._reused(key, ranks)) is not None:
            # Its groups meet at this world's store, whose keys go with the world.
            self._record.pg_map[reused] = self.held[key].backend, store
            self._record.default_pg = reused
            return
        dist.init_process_group(
            self._world.backend,
            store=store,
            rank=self._world.rank,
            world_size=self._world.size,
            timeout=self._timeout,
        )
        group = self._record.default_pg
        assert group is not None
        self._note(key, group, None)

    def meet(self) -> None:
        """Let all processes find each other over a new default group, where that moves no GPU.

        Groups that somebody makes later have the same names on all of them.
        """
        self._record.group_count = self._world.first_name + self._num_asked
        made = {group for group, _ in self._wanted}
        if self._record.default_pg in made and self._world.backend == "gloo":
            dist.monitored_barrier(timeout=self._timeout)

    def __call__(
        self,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> Group:
        """The group of these ranks, made or reused, or torch's mark for none of ours.

        ``use_local_synchronization`` is left alone: with it torch 2.14 hangs where processes have
        made different groups before. Without it a process has nothing to do for groups of others:
        names are given by counting what was asked for, and only a default group that is bound to
        its device would be asked to split.
        """
        members = sorted(range(self._world.size) if ranks is None else ranks)
        key = self._next_key(members, backend or self._world.backend, pg_options, group_desc)
        if self._world.rank not in members:
            return _NO_MEMBER
        if (reused := self._reused(key, members)) is not None:
            return reused
        group = dist.new_group(
            members,
            timeout=self._timeout,
            backend=backend,
            pg_options=pg_options,
            group_desc=group_desc,
        )
        assert isinstance(group, dist.ProcessGroup)
        self._note(key, group, timeout)
        return group

    def set_timeouts(self) -> None:
        """Give the new groups the timeouts of training."""
        for group, timeout in self._wanted:
            group.set_timeout(timeout)

    def _next_key(
        self, ranks: Sequence[int], backend: str, options: Any, purpose: str | None
    ) -> GroupKey:
        # All count all groups, made or not, so that all give the next one the same name.
        self._record.group_count = self._world.first_name + self._num_asked
        self._num_asked += 1
        members = self._world.uids(ranks)
        key = GroupKey(members, str(backend), options_text(options), purpose or "")
        self._seen[key] += 1
        return replace(key, index=self._seen[key] - 1)

    def _reused(self, key: GroupKey, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        held = self._known.get(key)
        if held is None:
            return None
        held.add_to(self._record, ranks)
        self.held[key] = held
        self.reused.append(held.group)
        return held.group

    def _note(self, key: GroupKey, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
        self.held[key] = Held.of(self._record, group)
        self._wanted.append((group, timeout or timedelta(seconds=self._world.timeout_s)))
