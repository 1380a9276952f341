"""Makes the groups of a world, or takes over those that another world has already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dynatrain_megatron.elastic.groups import Found, GroupCache, GroupKey
from dynatrain_megatron.elastic.records import Held, Record
from dynatrain_megatron.elastic.world import World

_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER

_SET_BY_TORCH = {"group_name", "split_color"}
"""Fields of a backend's options that torch writes when it makes a group with them."""

Group = dist.ProcessGroup | int
"""A group, or torch's mark for one that this process is not in."""


class GroupMaker:
    """Makes a world's groups; all its processes ask for the same ones, in the same order.

    Called like Megatron's ``parallel_state.create_group``, whose place it can take.
    """

    def __init__(
        self, world: World, record: Record, cache: GroupCache | None, timeout_s: float
    ) -> None:
        self.keys: list[GroupKey] = []
        self.made: dict[GroupKey, Held] = {}
        self.reused: list[dist.ProcessGroup] = []
        self._world = world
        self._record = record
        self._cache = cache
        self._timeout = timedelta(seconds=timeout_s)
        self._wanted: list[tuple[dist.ProcessGroup, timedelta]] = []

    def default(self, store: Store, device: torch.device | None) -> None:
        """The world's own group; one that is made here has carried a barrier then."""
        ranks = range(self._world.size)
        key = self._next_key(ranks, self._world.backend, None, None)
        found = self._find(key, ranks)
        if found is not None:
            assert found.held is not None
            self._record.default_pg = found.held.group
            return
        dist.init_process_group(
            self._world.backend,
            store=store,
            rank=self._world.rank,
            world_size=self._world.size,
            timeout=self._timeout,
            device_id=device,
        )
        self._note(key, self._record.default_pg, None)

    def meet(self) -> None:
        """Let all processes find each other over a new default group, where that moves no GPU."""
        if self.keys[0] in self.made and self._world.backend == "gloo":
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

        ``use_local_synchronization`` is left alone: all processes are here, and with it torch 2.14
        hangs where they have made different groups before.
        """
        members = sorted(range(self._world.size) if ranks is None else ranks)
        key = self._next_key(members, backend or self._world.backend, pg_options, group_desc)
        found = self._find(key, members)
        if found is not None:
            return _NO_MEMBER if found.held is None else found.held.group
        group = dist.new_group(
            members,
            timeout=self._timeout,
            backend=backend,
            pg_options=pg_options,
            group_desc=group_desc,
        )
        if isinstance(group, dist.ProcessGroup):
            self._note(key, group, timeout)
        return group

    def set_timeouts(self) -> None:
        """Give the new groups the timeouts of training."""
        for group, timeout in self._wanted:
            group.set_timeout(timeout)

    def _next_key(
        self, ranks: Sequence[int], backend: str, options: Any, purpose: str | None
    ) -> GroupKey:
        # All count all groups, made or reused, so that all give the next one the same name.
        self._record.group_count = self._world.first_name + len(self.keys)
        members = self._world.uids(ranks)
        key = GroupKey(members, str(backend), options_text(options), purpose or "")
        while key in self.keys:
            key = replace(key, index=key.index + 1)
        self.keys.append(key)
        return key

    def _find(self, key: GroupKey, ranks: Sequence[int]) -> Found | None:
        found = self._cache.find(key, self._world.uid) if self._cache is not None else None
        if found is not None and found.held is not None:
            found.held.add_to(self._record, ranks)
            self.reused.append(found.held.group)
        return found

    def _note(
        self, key: GroupKey, group: dist.ProcessGroup | None, timeout: timedelta | None
    ) -> None:
        assert group is not None
        self.made[key] = Held.of(self._record, group)
        self._wanted.append((group, timeout or timedelta(seconds=self._world.timeout_s)))


def options_text(options: Any) -> str:
    """A backend's options as text that is equal where they are; empty for none."""
    if options is None:
        return ""
    parts = []
    for name in sorted(set(dir(options)) - _SET_BY_TORCH):
        if name.startswith("_"):
            continue
        value = getattr(options, name)
        if isinstance(value, (bool, int, float, str, timedelta)):
            parts.append(f"{name}={value}")
        elif name == "config":
            parts.append(f"config=({options_text(value)})")
    return " ".join(parts)
