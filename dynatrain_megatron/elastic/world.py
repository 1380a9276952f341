"""What a world is, as plain data, and which process this is in it.

Ranks are places in a world's list of processes. The same processes in another order are another
world: that is how a layout's coordinates are placed on processes. A process keeps its **uid** from
start to end, through all worlds it is ever in.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from dynatrain_megatron.errors import WorldError

_NAMES_PER_WORLD = 100_000
"""Torch names groups by counting; a world counts within a span of its own."""


def process_uid() -> str:
    """``host:pid:nonce`` of this process; another in a process forked from it."""
    return _uid_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _uid_of(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class World:
    """A world as one of its processes sees it.

    ``processes`` are uids, by rank. Groups get ``timeout_s`` for each operation once the world is
    built. The ``id`` is one that a store gave out (``store.add``) and that no world ever had, also
    none that could not be built; 0 is the world that torch was started with.
    """

    id: int
    processes: tuple[str, ...]
    rank: int
    backend: str = "gloo"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse a list of processes that names one twice."""
        if len(set(self.processes)) != len(self.processes):
            raise WorldError(f"world {self.id} names a process twice: {self.processes}")
        assert 0 <= self.rank < len(self.processes)

    @classmethod
    def of(
        cls,
        world_id: int,
        processes: Iterable[str],
        *,
        backend: str = "gloo",
        timeout_s: float = 600.0,
    ) -> World:
        """The world as this process sees it, which must be one of ``processes``."""
        ordered, own = tuple(processes), process_uid()
        if own not in ordered:
            raise WorldError(f"world {world_id} has no process {own}; it has {', '.join(ordered)}")
        return cls(world_id, ordered, ordered.index(own), backend, timeout_s)

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.processes)

    @property
    def uid(self) -> str:
        """The process that sees it."""
        return self.processes[self.rank]

    @property
    def prefix(self) -> str:
        """What its keys in the store begin with, before a slash."""
        return f"w{self.id}"

    @property
    def first_name(self) -> int:
        """Torch's name for its default group; those of its other groups follow."""
        return self.id * _NAMES_PER_WORLD

    def uids(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The processes that have these ranks."""
        return tuple(self.processes[rank] for rank in ranks)
