"""How ranks of one host come to share rings: each opens a socket, the others connect to it.

A ring is a file without a name, and what has no name has to be handed over. Opening it under
``/proc/<pid>/fd`` takes the permission to trace the other process, and where ranks had that, they
would read each other's memory; passing it over a Unix socket (``SCM_RIGHTS``) takes none. The
sockets are in the abstract namespace, which needs no directory that ranks share, but the same
network namespace: containers that have one each do not meet.

Any process of the host may connect to such a socket. Each rank therefore makes a secret token and
tells it over the group, where nobody else hears it: one that connects shows the token of the rank
it wants, and is shown its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dynatrain_megatron.engine.link import Link
from dynatrain_megatron.engine.ring import NUM_SLOTS, Ring, slot_bytes
from dynatrain_megatron.engine.transport import Transport

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"=II{_TOKEN_BYTES}s")  # rank, bytes of a slot, the other's token

Way = tuple[int, int]
"""From one rank to another."""


@dataclass(frozen=True, slots=True)
class Links:
    """This rank's links by peer, and what kept others from being made, on any rank.

    ``ring_bytes`` is the memory of a rank's own rings, the most that any rank has: the same number
    on all of them.
    """

    by_peer: dict[int, Link]
    problems: list[str]
    ring_bytes: int


def meet(transport: Transport, ways: Iterable[Way], *, ring_bytes: int, timeout_s: float) -> Links:
    """Share a ring for each of ``ways``, which are the same on all ranks; collective.

    A rank's own rings take ``ring_bytes`` together at most, or two pages each if that is more.
    Where a way cannot be had neither of its ranks has it.
    """
    meeting = _Meeting(transport, frozenset(ways), ring_bytes, timeout_s)
    try:
        return meeting.hold()
    except BaseException:
        meeting.leave()
        raise
    finally:
        meeting.door.close()


class _Meeting:
    """What one rank has in hand while it meets its peers.

    Every step that waits for a peer comes after one in which all have done what it waits for.
    """

    def __init__(
        self, transport: Transport, ways: frozenset[Way], ring_bytes: int, timeout_s: float
    ) -> None:
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._transport = transport
        self._rank = transport.rank
        self._ways = ways
        self._timeout_s = timeout_s
        counts = [sum(src == rank for src, _ in ways) for rank in range(transport.size)]
        self._slot_bytes = slot_bytes(ring_bytes, counts[self._rank])
        self._ring_bytes = max(NUM_SLOTS * n * slot_bytes(ring_bytes, n) for n in counts)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._connections: dict[int, socket.socket] = {}
        self._outgoing: dict[int, Ring] = {}
        self._incoming: dict[int, Ring] = {}
        self._problems: list[str] = []

    def hold(self) -> Links:
        name = "dynatrain-" + secrets.token_hex(_TOKEN_BYTES)
        with self._trying("cannot open a socket"):
            self.door.bind(b"\0" + name.encode())
            self.door.listen(self._transport.size)
        cards = self._tell([name, self._token.hex()])
        tokens = [bytes.fromhex(token) for _, token in cards]
        peers = {rank for way in self._ways if self._rank in way for rank in way}
        for peer in sorted(peer for peer in peers if peer < self._rank):
            with self._trying(f"cannot connect to rank {peer}"):
                self._connect(peer, cards[peer][0])
        told = self._tell(sorted(self._connections))
        called = list(self._connections.items())
        for peer, connection in called:
            with self._trying(f"cannot greet rank {peer}"):
                self._greet(peer, connection, tokens[peer])
        self._receive({rank for rank, calls in enumerate(told) if self._rank in calls}, tokens)
        for peer, connection in called:
            with self._trying(f"is not greeted by rank {peer}"):
                if self._hear(connection) != peer:
                    raise OSError("it is another rank")
        return self._agree()

    def leave(self) -> None:
        """Give everything back."""
        for held in (self._connections, self._outgoing, self._incoming):
            for thing in held.values():
                thing.close()

    def _connect(self, peer: int, name: str) -> None:
        connection = self._connections[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(b"\0" + name.encode())
        except OSError:
            self._connections.pop(peer).close()
            raise

    def _greet(self, peer: int, connection: socket.socket, token: bytes) -> None:
        """Show that this is a rank of the group, and hand over the ring to ``peer`` if any."""
        hello = _HELLO.pack(self._rank, self._slot_bytes, token)
        fds = []
        if (self._rank, peer) in self._ways:
            self._outgoing[peer] = Ring.create(self._slot_bytes)
            fds = [self._outgoing[peer].fd]
        socket.send_fds(connection, [hello], fds)

    def _hear(self, connection: socket.socket) -> int:
        """Be greeted; returns the rank it is, and keeps its ring. Raises ``OSError`` for others."""
        flags = socket.MSG_CMSG_CLOEXEC
        hello, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1, flags)
        rank, nbytes, token = _HELLO.unpack(hello.ljust(_HELLO.size, b"\0"))
        if not secrets.compare_digest(token, self._token):
            for fd in fds:
                os.close(fd)
            raise OSError("it is no rank of this group")
        for fd in fds:
            self._incoming[rank] = Ring(fd, nbytes)
        return int(rank)

    def _receive(self, expected: set[int], tokens: list[bytes]) -> None:
        """Let those in that have connected, whatever else knocks."""
        deadline = time.monotonic() + self._timeout_s
        while expected and (left := deadline - time.monotonic()) > 0:
            with self._trying("cannot let in who has connected"):
                self.door.settimeout(left)
                connection, _ = self.door.accept()
                connection.settimeout(left)
                try:
                    peer = self._hear(connection)
                except OSError:
                    connection.close()
                    raise
                expected.discard(peer)
                self._connections[peer] = connection
                self._greet(peer, connection, tokens[peer])

    def _agree(self) -> Links:
        """Keep what works at both ends, and give the rest back."""
        answers = self._tell([sorted(self._connections), sorted(self._incoming), self._problems])
        used = {
            (src, dst)
            for src, dst in self._ways
            if src in answers[dst][1] and dst in answers[src][0]
        }
        links: dict[int, Link] = {}
        for peer, connection in self._connections.items():
            out, back = (self._rank, peer) in used, (peer, self._rank) in used
            outgoing = self._outgoing.pop(peer) if out else None
            incoming = self._incoming.pop(peer) if back else None
            if out or back:
                links[peer] = Link(peer, connection, outgoing, incoming)
        self._connections = {p: c for p, c in self._connections.items() if p not in links}
        self.leave()
        problems = [text for _, _, texts in answers for text in texts]
        return Links(links, problems, self._ring_bytes if used else 0)

    def _tell(self, what: object) -> list[Any]:
        rows = self._transport.all_gather(json.dumps(what).encode(), timeout_s=self._timeout_s)
        return [json.loads(row) for row in rows]

    @contextlib.contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._problems.append(f"rank {self._rank} {what}: {error}")
