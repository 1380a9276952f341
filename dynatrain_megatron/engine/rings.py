"""The transport over rings, for ranks of one host that may not read each other's memory.

State is copied twice, by its sender into a ring and by its receiver out of it, at the same time and
with no staging memory but the ring: rows are gathered and scattered on the way. Each rank does what
it can for all its peers by turns, in its own thread and only while it waits::

    wait    fill a slot for rank 1, empty one of rank 1, fill one for rank 2, …
            nothing to do: sleep until some peer has filled or emptied a slot

All other messages go through another transport. Why ranks cannot wait for each other for ever: a
stream goes on whenever both its ranks wait, for whatever transfer, and needs nothing else; so the
first transfer that is unfinished anywhere ends once all its ranks wait for it.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Mapping, Sequence

from dynatrain_megatron import whereabouts
from dynatrain_megatron.engine.link import Link, Stream
from dynatrain_megatron.engine.transport import Message, Terms, Transfer, Transport, by_peer
from dynatrain_megatron.errors import TransitionError


class RingTransport(Transport):
    """Through ``links`` where there are any, and through ``others`` else; tensors in host memory.

    ``ring_bytes`` is what all rings of a rank take at the most, the same number on all ranks.
    """

    # Shorter rows take longer to be gathered one by one than to be copied to staging memory first.
    _GIVEN = Terms(part_bytes=1, row_bytes=1 << 8, is_read=True)
    _WANTED = Terms(part_bytes=1, row_bytes=1, is_read=True)

    def __init__(self, others: Transport, links: Mapping[int, Link], ring_bytes: int) -> None:
        self.rank, self.size, self.device = others.rank, others.size, others.device
        self.held_bytes = ring_bytes
        self._others = others
        self.links = links
        self._failed = ""
        self._poll = select.poll()
        self._by_fd = {link.socket.fileno(): link for link in links.values()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def terms(self, peer: int, *, sending: bool) -> Terms:
        if not self._is_linked(peer, sending=sending):
            return self._others.terms(peer, sending=sending)
        return self._GIVEN if sending else self._WANTED

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        if self._failed:
            raise TransitionError(f"rank {self.rank}: an earlier transfer failed: {self._failed}")
        given = by_peer([m for m in sends if self._is_linked(m[0], sending=True)])
        wanted = by_peer([m for m in receives if self._is_linked(m[0], sending=False)])
        rest = self._others.start(
            [m for m in sends if m[0] not in given], [m for m in receives if m[0] not in wanted]
        )
        streams = []
        for tensors_by_peer, put in ((given, Link.write), (wanted, Link.read)):
            for peer, tensors in tensors_by_peer.items():
                streams.append(Stream(tensors))
                put(self.links[peer], streams[-1])
        return _Streams(self, streams, rest) if streams else rest

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        return self._others.all_gather(data, timeout_s=timeout_s)

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self._failed = self._failed or "the transport is closed"
        self._others.close()

    def carry(self, streams: Sequence[Stream], timeout_s: float) -> None:
        """Move what has been started, whatever it belongs to, until ``streams`` are done.

        Raises :class:`TransitionError` where a peer fails or nothing moves for ``timeout_s``; all
        links are closed then, so that no peer waits for this rank.
        """
        try:
            with whereabouts.waiting(f"rank {self.rank}: streams through rings"):
                self._carry(streams, timeout_s)
        except TransitionError as error:
            self._failed = str(error)
            for link in self.links.values():
                link.close()
            raise TransitionError(f"rank {self.rank}: {error}") from error

    def _carry(self, streams: Sequence[Stream], timeout_s: float) -> None:
        moved_at = time.monotonic()
        while not all(stream.is_done for stream in streams):
            # Every link has its turn.
            moved = sum(link.step() for link in self.links.values())
            now = time.monotonic()
            if moved:
                moved_at = now
                whereabouts.goes_on()
            left = moved_at + timeout_s - now
            if left <= 0:
                idle = sorted(link.peer for link in self.links.values() if link.is_wanted)
                raise TransitionError(
                    f"nothing has come from ranks {idle} or been taken by them for {timeout_s:g} s"
                )
            for fd, _ in self._poll.poll(0 if moved else math.ceil(1000 * left)):
                link = self._by_fd[fd]
                link.hear()
                if link.is_gone:
                    self._poll.unregister(fd)

    def _is_linked(self, peer: int, *, sending: bool) -> bool:
        link = self.links.get(peer)
        return link is not None and (link.outgoing if sending else link.incoming) is not None


class _Streams(Transfer):
    """Messages that go through rings, beside those of the same window that do not."""

    def __init__(self, transport: RingTransport, streams: list[Stream], rest: Transfer) -> None:
        self._transport = transport
        self._streams = streams
        self._rest = rest

    def wait(self, *, timeout_s: float) -> None:
        self._transport.carry(self._streams, timeout_s)
        self._rest.wait(timeout_s=timeout_s)
