"""A link: what joins two processes of one host, a socket and a ring each way it is used.

Messages of one window to one peer are a stream of bytes, which goes through the ring slot by slot.
Over the socket the two tell each other which slots are full and which are free again; it closes
when either process ends, so that the other one does not wait for it in vain::

    writer                                        reader
    fills a slot        -- how many bytes ->      empties it into its place
    fills the next one
                        <-- a slot is free --
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from dynatrain_megatron.engine.ring import NUM_SLOTS, Ring
from dynatrain_megatron.engine.rows import Rows
from dynatrain_megatron.engine.spans import Spans
from dynatrain_megatron.errors import TransitionError

_NOTE = struct.Struct("=I")  # bytes in the slot that is full now, or
_FREE = _NOTE.pack(0)


class Stream:
    """The bytes of some tensors, one after the other, of which ``at`` have been moved.

    The tensors have to live until all have.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.spans = Spans(np.concatenate([Rows.of(tensor).spans() for tensor in tensors]))
        self.at = 0

    @property
    def is_done(self) -> bool:
        return self.at == self.spans.bytes

    def next_stop(self, slot_bytes: int) -> int:
        """Where the part that begins at ``at`` ends."""
        return min(self.spans.bytes, self.at + slot_bytes)


class Link:
    """This process's end. ``peer`` is the other's rank; ``outgoing`` and ``incoming`` its rings.

    Nothing here waits: whoever waits does so on ``socket`` (SOCK_SEQPACKET, not blocking).
    """

    def __init__(
        self, peer: int, connection: socket.socket, outgoing: Ring | None, incoming: Ring | None
    ) -> None:
        connection.setblocking(False)
        self.peer = peer
        self.socket = connection
        self.outgoing = outgoing
        self.incoming = incoming
        self.is_gone = False
        self._to_write: deque[Stream] = deque()
        self._to_read: deque[Stream] = deque()
        self._free = NUM_SLOTS
        self._full: deque[int] = deque()

    @property
    def is_wanted(self) -> bool:
        """Whether anything is left to be written or read."""
        return bool(self._to_write or self._to_read)

    def write(self, stream: Stream) -> None:
        """Put ``stream`` behind those to be written."""
        assert self.outgoing is not None
        if not stream.is_done:
            self._to_write.append(stream)

    def read(self, stream: Stream) -> None:
        """Put ``stream`` behind those to be read."""
        assert self.incoming is not None
        if not stream.is_done:
            self._to_read.append(stream)

    def step(self) -> bool:
        """Fill one slot and empty one, as far as possible; whether anything was done.

        Raises :class:`TransitionError` where the peer has another stream in mind or has ended
        before what is asked for could be done.
        """
        try:
            wrote, read = self._fill(), self._empty()
        except OSError as error:
            raise TransitionError(f"ring shared with rank {self.peer}: {error}") from error
        if self.is_gone and (self._to_write or (self._to_read and not self._full)):
            raise TransitionError(f"rank {self.peer} has ended or given up")
        return wrote or read

    def hear(self) -> None:
        """Take the notes that have come."""
        while not self.is_gone:
            try:
                note = self.socket.recv(_NOTE.size)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it left without hearing all of ours; its own last notes come yet
            if not note:
                self.is_gone = True
                return
            (nbytes,) = _NOTE.unpack(note)
            if nbytes:
                self._full.append(nbytes)
            else:
                self._free += 1

    def close(self) -> None:
        """Give everything back; the peer sees it. May be called again."""
        self.is_gone = True
        # A process forked from this one may have the socket open too.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for ring in (self.outgoing, self.incoming):
            if ring is not None:
                ring.close()

    def _fill(self) -> bool:
        if not (self._to_write and self._free and not self.is_gone):
            return False
        assert self.outgoing is not None
        stream = self._to_write[0]
        stop = stream.next_stop(self.outgoing.slot_bytes)
        self.outgoing.write(stream.spans, stream.at, stop)
        self._free -= 1
        self._tell(_NOTE.pack(stop - stream.at))
        _advance(self._to_write, stop)
        return True

    def _empty(self) -> bool:
        if not (self._to_read and self._full):
            return False
        assert self.incoming is not None
        stream, nbytes = self._to_read[0], self._full.popleft()
        stop = stream.next_stop(self.incoming.slot_bytes)
        if nbytes != stop - stream.at:
            raise TransitionError(
                f"expected {stop - stream.at} bytes from rank {self.peer}, got {nbytes}"
            )
        self.incoming.read(stream.spans, stream.at, stop)
        self._tell(_FREE)
        _advance(self._to_read, stop)
        return True

    def _tell(self, note: bytes) -> None:
        # To one that has gone: that shows when something is wanted of it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.send(note)


def _advance(streams: deque[Stream], at: int) -> None:
    streams[0].at = at
    if streams[0].is_done:
        streams.popleft()
