"""Groups that outlive a world: a job that comes back to a layout finds its groups again.

A group is known by its members' uids in their order, not by ranks, which the next world renumbers.
What is kept, reused and ended must be the same on every process, since one that looks for a group
where another makes it waits for ever. So nobody looks into its own memory: :func:`reusable` and
:func:`after` decide from a :class:`History`, plain data that is equal on all processes of a world,
because all of them ask for the world's groups in the same order, and a process that joins is given
it.

    history  = the last worlds, the latest first, each as the keys of its groups
    reusable   a key of any of them
    ended      what is in none of them any more, or has lost a member
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from dynatrain_megatron.elastic.records import Held
from dynatrain_megatron.errors import WorldError


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What makes a group fit for what another was made for.

    ``members`` are uids in the order of their ranks in the group, ``options`` the backend's own as
    text. Two groups of a world that agree in all else are told apart by ``index``, so that none
    serves two purposes at once.
    """

    members: tuple[str, ...]
    backend: str
    options: str = ""
    purpose: str = ""
    index: int = 0


WorldKeys = tuple[GroupKey, ...]
"""All groups of a world, the default one first, in the order in which they are asked for."""


@dataclass(frozen=True, slots=True)
class History:
    """The groups of the last worlds, the latest world first; equal on all their processes."""

    worlds: tuple[WorldKeys, ...] = ()

    def all_keys(self) -> tuple[GroupKey, ...]:
        """Each key once."""
        return tuple(dict.fromkeys(key for world in self.worlds for key in world))


def reusable(history: History, key: GroupKey) -> bool:
    """Whether there is such a group; all its members are here, or nobody could ask for it."""
    return any(key in world for world in history.worlds)


@dataclass(frozen=True, slots=True)
class Change:
    """What a world that comes into force makes of a history."""

    history: History
    ended: tuple[GroupKey, ...]


def after(history: History, world: WorldKeys, *, present: Collection[str], keep: int) -> Change:
    """Put ``world`` first, keep the ``keep`` latest, and leave out who is not ``present``.

    ``present`` are the processes that may be in a world again: those of this one, and any that
    are parked. ``ended`` has the keys that nobody needs any more, in the order to end them in.
    """
    assert keep >= 1 and all(member in present for key in world for member in key.members)
    latest = [world, *(other for other in history.worlds if other != world)][:keep]
    here = set(present)
    whole = (tuple(key for key in keys if set(key.members) <= here) for keys in latest)
    new = History(tuple(keys for keys in whole if keys))
    kept = set(new.all_keys())
    return Change(new, tuple(key for key in reversed(history.all_keys()) if key not in kept))


@dataclass(frozen=True, slots=True)
class Found:
    """A group that exists; ``held`` is ``None`` on processes that are not in it."""

    held: Held | None


class GroupCache:
    """The groups of the last ``keep`` worlds of which this process is a member.

    ``keep`` = 1 keeps those of the world in force only. A process that joins a job starts with the
    job's ``history``. All methods are local, and called alike by all processes of a world.
    """

    def __init__(self, keep: int = 1, history: History | None = None) -> None:
        self.keep = keep
        self.history = history or History()
        self._held: dict[GroupKey, Held] = {}

    def __len__(self) -> int:
        """Number of groups held."""
        return len(self._held)

    def groups(self) -> list[ProcessGroup]:
        """All groups held."""
        return [held.group for held in self._held.values()]

    def find(self, key: GroupKey, own: str) -> Found | None:
        """What there is for ``key``, or ``None`` where it has to be made; ``own`` is this uid."""
        if not reusable(self.history, key):
            return None
        held = self._held.get(key)
        if own in key.members and held is None:
            raise WorldError(
                f"process {own} has no group {key.purpose or 'default'} of {key.members}, which "
                "it should have kept; a process that joins needs the job's history of groups"
            )
        return Found(held)

    def commit(
        self, world: WorldKeys, made: Mapping[GroupKey, Held], *, present: Collection[str]
    ) -> list[Held]:
        """Note that ``world`` is in force; returns the groups to end now, in that order.

        ``made`` are those of its groups that were not reused and have this process as a member;
        ``present`` as in :func:`after`.
        """
        change = after(self.history, world, present=present, keep=self.keep)
        self._held |= made
        self.history = change.history
        return [self._held.pop(key) for key in change.ended if key in self._held]

    def catch_up(self, history: History) -> list[Held]:
        """Take over the job's ``history`` after worlds without this process.

        Returns the groups to end now: those that the others have ended meanwhile.
        """
        self.history = history
        return [self._held.pop(key) for key in [*self._held] if not reusable(history, key)]
