"""The TCP connections between the processes of a world, so that they can be cut.

A wait for a process that hangs ends when its time is up and not before: gloo's waits cannot be
called off, and a hung process keeps its sockets open. Who has decided not to wait any longer cuts
the connections at this end; the wait then fails at once, as if the peer had died.

Which connections are a world's is found out, not guessed: those made while it was built whose other
end is one that some process of it has made, too. Linux only, as ``/proc`` is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

Ends = tuple[str, str]
"""A connection's own end and the other one, as text."""


def open_now(*, but_at: int) -> dict[int, Ends]:
    """This process's TCP connections, by inode, but for those with an end at port ``but_at``.

    That is the store's, which one of the processes may hold: it is nobody's to cut.
    """
    return {
        inode: ends
        for inode, ends, _ in _connections()
        if not any(end.rpartition(":")[2] == str(but_at) for end in ends)
    }


class Appearing:
    """Connections that appear while groups are made, ``but_at`` as above.

    With breaks, in which training may open some of its own: those do not count.
    """

    def __init__(self, *, but_at: int) -> None:
        self._but_at = but_at
        self._found: dict[int, Ends] = {}
        self._before: dict[int, Ends] | None = open_now(but_at=but_at)

    def pause(self) -> None:
        """A break begins, if none has."""
        if self._before is None:
            return
        now, before = open_now(but_at=self._but_at), self._before
        self._found |= {inode: ends for inode, ends in now.items() if inode not in before}
        self._before = None

    def go_on(self) -> None:
        """It is over."""
        self._before = open_now(but_at=self._but_at)

    def take(self) -> dict[int, Ends]:
        """Those that have appeared until now and since the last call; a break begins."""
        self.pause()
        found, self._found = self._found, {}
        return found


class Connections:
    """Connections of this process that may be cut, ``inodes``."""

    def __init__(self, inodes: frozenset[int] = frozenset()) -> None:
        self._inodes = inodes

    def __len__(self) -> int:
        """How many there are."""
        return len(self._inodes)

    @classmethod
    def among(cls, made: dict[int, Ends], ends_of_all: list[str]) -> Connections:
        """Those of this process's newly ``made`` ones whose other end is one of ``ends_of_all``."""
        known = set(ends_of_all)
        return cls(frozenset(inode for inode, (_, other) in made.items() if other in known))

    def and_those_of(self, others: Iterable[Connections]) -> Connections:
        """These and those of ``others``, some groups of which a world has taken over."""
        return Connections(self._inodes.union(*(other._inodes for other in others)))

    def cut(self) -> int:
        """Cut those that are still open, from any thread; returns how many."""
        count = 0
        for inode, _, connection in _connections():
            if inode in self._inodes:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


def _connections() -> Iterator[tuple[int, Ends, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:["):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed by another thread meanwhile
            continue
        with connection:
            inode = os.fstat(connection.fileno()).st_ino
            if f"socket:[{inode}]" != target:  # another one, in the place of one that was closed
                continue
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                ends = _text(connection.getsockname()), _text(connection.getpeername())
            except OSError:  # one that listens
                continue
            yield inode, ends, connection


def _text(address: tuple[str, int]) -> str:
    host = address[0].removeprefix("::ffff:")
    return f"{host}:{address[1]}"
