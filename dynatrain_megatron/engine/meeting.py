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
# Ranks that have connected greet each other at once, so they need not be waited for long; and the
# all-gather at the end, in which the others wait meanwhile, must not time out.
_MEETING_S = 10.0
_MEETING_SHARE = 1 / 4
_OTHER_CALLERS = 128
_GREETING_SHARE = 1 / 5  # of that, for one that has connected and may be no rank
_HELLO = struct.Struct(f"=II{_TOKEN_BYTES}s")  # rank, bytes of a slot, the other's token

Way = tuple[int, int]
"""From one rank to another."""


@dataclass(frozen=True, slots=True)
class Rings:
    """This rank's links by peer, and what kept others from being made, on any rank.

    ``ring_bytes`` is the memory of a rank's own rings, the most that any rank has: the same number
    on all of them.
    """

    by_peer: dict[int, Link]
    problems: list[str]
    ring_bytes: int


def meet(transport: Transport, ways: Iterable[Way], *, ring_bytes: int, timeout_s: float) -> Rings:
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
        self._meeting_s = min(_MEETING_S, timeout_s * _MEETING_SHARE)
        counts = [sum(src == rank for src, _ in ways) for rank in range(transport.size)]
        self._slot_bytes = slot_bytes(ring_bytes, counts[self._rank])
        self._ring_bytes = max(NUM_SLOTS * n * slot_bytes(ring_bytes, n) for n in counts)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._connections: dict[int, socket.socket] = {}
        self._outgoing: dict[int, Ring] = {}
        self._incoming: dict[int, Ring] = {}
        self._problems: list[str] = []

    def hold(self) -> Rings:
        for peer in sorted(dst for src, dst in self._ways if src == self._rank):
            with self._trying(f"cannot make a ring for rank {peer}"):
                self._outgoing[peer] = Ring.create(self._slot_bytes)
        name = "dynatrain-" + secrets.token_hex(_TOKEN_BYTES)
        with self._trying("cannot open a socket"):
            self.door.bind(b"\0" + name.encode())
            self.door.listen(self._transport.size + _OTHER_CALLERS)
        cards = self._tell([name, self._token.hex()])
        tokens = [bytes.fromhex(token) for _, token in cards]
        peers = {rank for way in self._ways if self._rank in way for rank in way}
        for peer in sorted(peer for peer in peers if peer < self._rank):
            with self._trying(f"cannot connect to rank {peer}"):
                self._connections[peer] = _call(cards[peer][0], self._meeting_s)
        told = self._tell(sorted(self._connections))
        deadline = time.monotonic() + self._meeting_s
        called = list(self._connections.items())
        for peer, connection in called:
            with self._trying(f"cannot greet rank {peer}", connection):
                self._greet(peer, connection, tokens[peer])
        self._receive({r for r, calls in enumerate(told) if self._rank in calls}, tokens, deadline)
        for peer, connection in ((p, c) for p, c in called if c.fileno() >= 0):
            with self._trying(f"is not greeted by rank {peer}", connection):
                connection.settimeout(max(0.0, deadline - time.monotonic()))
                if self._hear(connection) != peer:
                    raise OSError("it is another rank")
        return self._agree()

    def leave(self) -> None:
        """Give everything back."""
        for held in (self._connections, self._outgoing, self._incoming):
            for thing in held.values():
                thing.close()

    def _greet(self, peer: int, connection: socket.socket, token: bytes) -> None:
        """Show that this is a rank of the group, and hand over the ring to ``peer`` if any."""
        hello = _HELLO.pack(self._rank, self._slot_bytes, token)
        fds = [self._outgoing[peer].fd] if peer in self._outgoing else []
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

    def _receive(self, expected: set[int], tokens: list[bytes], deadline: float) -> None:
        """Let those in that have connected, whatever else knocks."""
        while expected and (left := deadline - time.monotonic()) > 0:
            self.door.settimeout(left)
            with self._trying("cannot let in who has connected"):
                connection, _ = self.door.accept()
                connection.settimeout(self._meeting_s * _GREETING_SHARE)
                with self._trying("cannot let in who has connected", connection):
                    peer = self._hear(connection)
                    expected.discard(peer)
                    self._connections[peer] = connection
                    self._greet(peer, connection, tokens[peer])

    def _agree(self) -> Rings:
        """Keep what works at both ends, and give the rest back."""
        self._connections = {p: c for p, c in self._connections.items() if c.fileno() >= 0}
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
        # Whatever else was met on the way does not matter.
        problems = []
        for src, dst in sorted(self._ways - used):
            reasons = "; ".join(answers[src][2] + answers[dst][2])
            problems.append(f"rank {src} shares no ring with rank {dst} ({reasons})")
        return Rings(links, problems, self._ring_bytes if used else 0)

    def _tell(self, what: object) -> list[Any]:
        rows = self._transport.all_gather(json.dumps(what).encode(), timeout_s=self._timeout_s)
        return [json.loads(row) for row in rows]

    @contextlib.contextmanager
    def _trying(self, what: str, connection: socket.socket | None = None) -> Iterator[None]:
        """Note it where the system does not let this rank do it, and close ``connection``."""
        try:
            yield
        except OSError as error:
            self._problems.append(f"rank {self._rank} {what}: {error}")
            if connection is not None:
                connection.close()


def _call(name: str, timeout_s: float) -> socket.socket:
    """Connect to another rank's socket; raises ``OSError``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(b"\0" + name.encode())
    except OSError:
        connection.close()
        raise
    return connection
