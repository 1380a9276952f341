"""Ranks that are threads of one process, and messages from one's memory to the other's.

No pytest is needed here: benchmarks/gpu_smoke.py builds on it where there may be none.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dynatrain_megatron.engine.transport import Message, Terms, Transfer, Transport, as_bytes
from dynatrain_megatron.errors import TransitionError


class _Parcel(NamedTuple):
    """Memory of another thread, and what it waits for before it touches it again."""

    tensor: torch.Tensor
    taken: threading.Event


class LocalTransport(Transport):
    """Ranks that are threads of one process, with no process group.

    Make all ends of a mesh at once with :meth:`mesh`. Nothing is copied before the receiver waits,
    so that it shows where a sender touches its memory too early.
    """

    def __init__(
        self, rank: int, mailboxes: list[list[queue.Queue[_Parcel]]], hosts: Sequence[int]
    ) -> None:
        self.rank = rank
        self.size = len(mailboxes)
        self.device = torch.device("cpu")
        self._mailboxes = mailboxes  # [src][dst]
        self._hosts = hosts

    @classmethod
    def mesh(cls, size: int, hosts: Sequence[int] | None = None) -> list[LocalTransport]:
        """The ``size`` ends of one mesh; between ranks of one of ``hosts`` messages are "read"."""
        mailboxes: list[list[queue.Queue[_Parcel]]] = [
            [queue.Queue() for _ in range(size)] for _ in range(size)
        ]
        return [cls(rank, mailboxes, hosts or range(size)) for rank in range(size)]

    def terms(self, peer: int, *, sending: bool) -> Terms:
        if self._hosts[peer] == self._hosts[self.rank]:
            return Terms(part_bytes=1, row_bytes=24 if sending else 1, is_read=True)
        return Terms(part_bytes=64)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        return _LocalTransfer(self, [self.put(*message) for message in sends], receives)

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        own = torch.tensor(list(data), dtype=torch.uint8)
        for peer in range(self.size):
            self.put(peer, own)
        parts = [self.take(peer, timeout_s).tensor for peer in range(self.size)]
        return [part.numpy().tobytes() for part in parts]

    def put(self, peer: int, tensor: torch.Tensor) -> threading.Event:
        """Let ``peer`` take ``tensor``; returns what says that it has."""
        parcel = _Parcel(tensor, threading.Event())
        self._mailboxes[self.rank][peer].put(parcel)
        return parcel.taken

    def take(self, peer: int, timeout_s: float) -> _Parcel:
        """What ``peer`` has put next."""
        try:
            return self._mailboxes[peer][self.rank].get(timeout=timeout_s)
        except queue.Empty:
            raise TransitionError(
                f"rank {self.rank}: nothing from rank {peer} within {timeout_s} s "
                f"({threading.current_thread().name})"
            ) from None


class _LocalTransfer(Transfer):
    def __init__(
        self,
        transport: LocalTransport,
        sent: Sequence[threading.Event],
        receives: Sequence[Message],
    ) -> None:
        self._transport = transport
        self._sent = sent
        self._receives = receives

    def wait(self, *, timeout_s: float) -> None:
        rank = self._transport.rank
        for peer, tensor in self._receives:
            parcel = self._transport.take(peer, timeout_s)
            if parcel.tensor.nbytes != tensor.nbytes:
                raise TransitionError(
                    f"rank {rank}: expected {tensor.nbytes} bytes from rank {peer}, "
                    f"got {parcel.tensor.nbytes}"
                )
            data = as_bytes(parcel.tensor.contiguous()).clone()
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
            parcel.taken.set()
        if not all(taken.wait(timeout_s) for taken in self._sent):
            raise TransitionError(f"rank {rank}: not all it sent was taken within {timeout_s} s")
