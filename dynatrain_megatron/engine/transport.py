"""Transports: how the bytes of one window get from rank to rank.

One small interface, one conformance test for all (tests/engine/test_transport.py). A transport
carries transfers and the few control values around them, and nothing else.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dynatrain_megatron.errors import TransitionError

Message = tuple[int, torch.Tensor]
"""A peer's rank and a contiguous one-dimensional uint8 tensor."""


class Transport(ABC):
    """Point-to-point messages among ``size`` ranks, and one small all-gather.

    ``device`` is where message tensors must lie.
    """

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, timeout_s: float
    ) -> None:
        """Complete all these messages; called by each rank that has any, for the same window.

        Messages between two ranks match in the order given, which must be the same at both ends.
        When it returns, sent tensors may be reused and received ones read. Raises
        :class:`TransitionError` where a peer fails or ``timeout_s`` passes.
        """

    @abstractmethod
    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        """Collective over all ranks: everyone's ``data`` (lengths may differ), by rank."""


class TorchTransport(Transport):
    """Over a torch.distributed group (gloo: CPU tensors; NCCL: CUDA tensors).

    ``rank`` and peers are ranks in the group. The group must be initialised on all its ranks and
    must carry nothing else meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device
        self._global_rank = dist.get_process_group_ranks(group)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, timeout_s: float
    ) -> None:
        ops = [
            dist.P2POp(dist.irecv, tensor, self._global_rank[peer], self.group)
            for peer, tensor in receives
        ]
        ops += [
            dist.P2POp(dist.isend, tensor, self._global_rank[peer], self.group)
            for peer, tensor in sends
        ]
        if not ops:
            return
        try:
            for work in dist.batch_isend_irecv(ops):
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            peers = sorted({peer for peer, _ in (*sends, *receives)})
            raise TransitionError(
                f"rank {self.rank}: transfer with ranks {peers} failed: {error}"
            ) from error

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._wait(dist.all_gather(lengths, length, self.group, async_op=True), timeout_s)
        longest = max(1, *(int(n) for n in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(dist.all_gather(rows, padded, self.group, async_op=True), timeout_s)
        return [row[: int(n)].cpu().numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def _wait(self, work: dist.Work, timeout_s: float) -> None:
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransitionError(f"rank {self.rank}: all-gather failed: {error}") from error


class LocalTransport(Transport):
    """Ranks that are threads of one process: for tests, with no process group.

    Make all ends of a mesh at once with :meth:`mesh`.
    """

    def __init__(self, rank: int, mailboxes: list[list[queue.Queue[bytes]]]) -> None:
        self.rank = rank
        self.size = len(mailboxes)
        self.device = torch.device("cpu")
        self._mailboxes = mailboxes  # [src][dst]

    @classmethod
    def mesh(cls, size: int) -> list[LocalTransport]:
        """The ``size`` ends of one mesh."""
        mailboxes: list[list[queue.Queue[bytes]]] = [
            [queue.Queue() for _ in range(size)] for _ in range(size)
        ]
        return [cls(rank, mailboxes) for rank in range(size)]

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, timeout_s: float
    ) -> None:
        for peer, tensor in sends:
            self._mailboxes[self.rank][peer].put(tensor.numpy().tobytes())
        for peer, tensor in receives:
            data = self._take(peer, timeout_s)
            if len(data) != tensor.numel():
                raise TransitionError(
                    f"rank {self.rank}: expected {tensor.numel()} bytes from rank {peer}, "
                    f"got {len(data)}"
                )
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        for peer in range(self.size):
            self._mailboxes[self.rank][peer].put(data)
        return [self._take(peer, timeout_s) for peer in range(self.size)]

    def _take(self, peer: int, timeout_s: float) -> bytes:
        try:
            return self._mailboxes[peer][self.rank].get(timeout=timeout_s)
        except queue.Empty:
            raise TransitionError(
                f"rank {self.rank}: nothing from rank {peer} within {timeout_s} s "
                f"({threading.current_thread().name})"
            ) from None
