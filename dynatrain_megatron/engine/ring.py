"""A ring of slots in a memory file, by which one process hands bytes to another of its host.

::

    writer      memory of the state -> slot 0    slot 1 <- the next bytes
    reader                             slot 0 -> memory of the state
                copied in and copied out at the same time, each by its own process

The file is a ``memfd``: no name, no directory, no limit of a container's ``/dev/shm``, and gone
with the last process that has it open. Slots are few, so that what was copied in is still in the
processor's caches when it is copied out. Which slots are full is told elsewhere (:mod:`.link`).
"""

from __future__ import annotations

import ctypes
import mmap
import os

from dynatrain_megatron.engine.spans import Spans
from dynatrain_megatron.vps.boxes import IntArray

NUM_SLOTS = 2
_LARGEST_SLOT = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def slot_bytes(ring_bytes: int, num_rings: int) -> int:
    """Of each slot, if ``num_rings`` share ``ring_bytes``: whole pages, one at the least."""
    share = ring_bytes // (NUM_SLOTS * max(1, num_rings))
    return max(1, min(_LARGEST_SLOT, share) // mmap.PAGESIZE) * mmap.PAGESIZE


class Ring:
    """Either process's end: the open file ``fd``, of slots of ``slot_bytes``."""

    def __init__(self, fd: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slot_bytes = slot_bytes
        self._next = 0

    @classmethod
    def create(cls, slot_bytes: int) -> Ring:
        """A new one, its memory taken now. Raises ``OSError`` where there is none to be had."""
        if not hasattr(os, "memfd_create"):
            raise OSError("the system has no memfd_create")
        ring = cls(os.memfd_create("dynatrain-ring"), slot_bytes)
        try:
            os.posix_fallocate(ring.fd, 0, NUM_SLOTS * slot_bytes)
        except OSError:
            ring.close()
            raise
        return ring

    def write(self, spans: Spans, start: int, stop: int) -> None:
        """Fill the next slot with bytes ``[start, stop)`` of ``spans``; raises ``OSError``."""
        self._move("pwritev", spans, start, stop)

    def read(self, spans: Spans, start: int, stop: int) -> None:
        """Empty the next slot into bytes ``[start, stop)`` of ``spans``; raises ``OSError``."""
        self._move("preadv", spans, start, stop)

    def _move(self, function: str, spans: Spans, start: int, stop: int) -> None:
        place = self._next * self.slot_bytes - start
        self._next = (self._next + 1) % NUM_SLOTS
        at = start
        while at < stop:
            some = spans.between(at, min(stop, spans.reach(at)))
            at += _call(function, self.fd, some, place + at)

    def close(self) -> None:
        """Give the file back; the memory goes when the other process has done so too."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def _call(name: str, fd: int, spans: IntArray, place: int) -> int:
    """Move spans of memory to or from a place in a file; returns the bytes moved, some or all."""
    try:
        function = getattr(_libc, name)
    except AttributeError as error:
        raise OSError(f"the C library has no {name}") from error
    function.restype = ctypes.c_ssize_t
    done = function(
        ctypes.c_int(fd),
        ctypes.c_void_p(spans.ctypes.data),
        ctypes.c_int(len(spans)),
        ctypes.c_long(place),
    )
    if done > 0:
        return int(done)
    if done == 0:
        raise OSError("the ring's file has lost its memory")
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))
