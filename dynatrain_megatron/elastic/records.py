"""Torch's records of process groups: one a world, of which one is in force.

torch.distributed keeps all it knows of groups in one object, and every function of it asks that
object. We put a switch in its place, which passes the question on::

    torch.distributed ──► switch ──► the record this thread has entered, if it has
                                └──► else the record in force: what all other threads see

So a thread builds a world's groups in a record of their own while training goes on in another, and
a world comes into force by one assignment. The record found at the start is the first in force.
All functions here are local.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dynatrain_megatron.elastic import contract

contract.check()
_c10d: Any = torch._C._distributed_c10d


class Record(c10d._World):  # type: ignore[misc, name-defined, unused-ignore]
    """A record with tables of its own; groups made in it are named from ``first_name`` on."""

    def __init__(self, first_name: int) -> None:
        """Start empty, without a default group."""
        super().__init__()
        self._tables: dict[str, dict[Any, Any]] = {name: {} for name in contract.TABLES}
        self._group: dist.ProcessGroup | None = None
        self._next_name = first_name

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        """The world's own group."""
        return self._group

    @default_pg.setter
    def default_pg(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    @property
    def group_count(self) -> int:
        """What torch names the next group."""
        return self._next_name

    @group_count.setter
    def group_count(self, name: int) -> None:
        self._next_name = name


def _own_table(name: str) -> property:
    return property(lambda record: record._tables[name])


for _name in contract.TABLES:
    setattr(Record, _name, _own_table(_name))


class _Here(threading.local):
    """What each thread has entered."""

    record: Any = None


class _Switch:
    """Stands where torch looks for its record."""

    def __init__(self, record: Any) -> None:
        vars(self).update(in_force=record, here=_Here())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here.record or self.in_force, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.here.record or self.in_force, name, value)


def attach() -> _Switch:
    """Put the switch in place, once; torch may have been initialised before, or may be later."""
    module: Any = c10d
    if not isinstance(module._world, _Switch):
        module._world = _Switch(module._world)
    switch: _Switch = module._world
    return switch


def in_force() -> Any:
    """The record that threads see which have entered none."""
    return attach().in_force


def install(record: Any) -> None:
    """Put ``record`` in force, for all threads at once."""
    vars(attach())["in_force"] = record
    _set_logged_rank()


@contextlib.contextmanager
def entered(record: Any) -> Iterator[None]:
    """This thread, and no thread it starts, sees ``record`` inside."""
    here = attach().here
    before, here.record = here.record, record
    try:
        yield
    finally:
        here.record = before
        _set_logged_rank()


@contextlib.contextmanager
def excepthook_kept() -> Iterator[None]:
    """Take back the hook that torch wraps around ``sys.excepthook`` for each default group."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


def _set_logged_rank() -> None:
    """Let C++ logs have the rank in the world in force again."""
    group = in_force().default_pg
    _c10d._set_global_rank(-1 if group is None else group.rank())


@dataclass(frozen=True, slots=True)
class Held:
    """A group and what torch notes of it besides the ranks of its members."""

    group: dist.ProcessGroup
    backend: str
    store: Any
    backend_config: str

    @classmethod
    def of(cls, record: Any, group: dist.ProcessGroup) -> Held:
        """As ``record`` has it."""
        backend, store = record.pg_map[group]
        return cls(group, backend, store, record.pg_backend_config[group])

    def add_to(self, record: Any, ranks: Iterable[int]) -> None:
        """Let the group be one of ``record`` too; ``ranks`` are its members' there, in its order.

        Its name stays, so compiled and functional collectives find it as before.
        """
        name, tag = self.group.group_name, f"ptd:{self.group.group_name}"
        record.pg_map[self.group] = self.backend, self.store
        record.pg_names[self.group] = name
        record.pg_backend_config[self.group] = self.backend_config
        record.pg_group_ranks[self.group] = {rank: i for i, rank in enumerate(ranks)}
        record.pg_to_tag[self.group] = tag
        for group_tag in ("", tag):
            record.tags_to_pg.setdefault(group_tag, []).append(self.group)


def groups_of(record: Any) -> list[dist.ProcessGroup]:
    """Its groups in the order in which every member ends them: last made first, the world's last.

    The order of torch's own ``destroy_process_group``: ending is a collective in some NCCL.
    """
    names: Mapping[dist.ProcessGroup, str] = record.pg_names
    default = record.default_pg
    return sorted(names, key=lambda group: (group is not default, names[group]), reverse=True)


def remove(record: Any, group: dist.ProcessGroup) -> None:
    """Let ``record`` forget ``group``, which stays as it is."""
    for name in contract.TABLES:
        if name != "tags_to_pg":
            getattr(record, name).pop(group, None)
    record.pg_coalesce_state.pop(group, None)
    for groups in record.tags_to_pg.values():
        if group in groups:
            groups.remove(group)
    if record.default_pg is group:
        record.default_pg = None


def clear(record: Any) -> None:
    """Let ``record`` forget everything, so that what is left of it holds no group."""
    for name in (*contract.TABLES, "pg_coalesce_state"):
        getattr(record, name).clear()
    record.default_pg = None


def unregister(group: dist.ProcessGroup) -> None:
    """Let C++ forget its name, which it would refuse another group of."""
    _c10d._unregister_process_group(group.group_name)


def end(group: dist.ProcessGroup) -> None:
    """End ``group`` here and for good; whoever uses it afterwards is told so.

    Call it on all members, in the same order. Never torch's ``destroy_process_group`` of a default
    group instead: that also unregisters the groups of every other world. Connections close when
    the last reference to the group goes.
    """
    group.shutdown()
    unregister(group)
    # torch leaves a group that was shut down usable: on gloo an all_reduce still goes through.
    kind = dist.ProcessGroup.BackendType.UNDEFINED
    for device in group._device_types:
        group._register_backend(device, kind, _tombstone(group))
    group._set_default_backend(kind)


class _Tombstone(_c10d.Backend):  # type: ignore[misc]
    """Refuses every operation, in words of ours."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._words = f"of process group {group.group_name} ({group.group_desc}), which has ended,"

    def getBackendName(self) -> str:  # torch says "Backend … does not …"
        return self._words


def _tombstone(group: dist.ProcessGroup) -> Any:
    try:
        return _Tombstone(group)
    except TypeError:  # torch 2.11 lets Python make none
        fake = _c10d.FakeProcessGroup
        options = fake.Options()
        options.error_on_collective = True
        return fake._create_internal(group.rank(), group.size(), options)
