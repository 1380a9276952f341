"""Transports: how the bytes of one window get from rank to rank.

One small interface, one conformance test for all (tests/engine/test_transport.py). A transport
carries transfers and the few control values around them, and nothing else.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dynatrain_megatron import whereabouts
from dynatrain_megatron.engine.rows import Rows
from dynatrain_megatron.errors import TransitionError

Message = tuple[int, torch.Tensor]
"""A peer's rank and what to send to it, or where to put what comes from it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a transport asks of messages from one rank to another.

    A part of the state of at least ``part_bytes`` is a message by itself, smaller ones share one;
    this number is the same at both ends. A message is carried as it lies if it is contiguous, or
    has rows of at least ``row_bytes`` where that is given; otherwise its bytes must be copied to
    staging memory first. ``is_read`` says that the receiver reads from the sender's memory, into
    memory of any form.
    """

    part_bytes: int
    row_bytes: int | None = None
    is_read: bool = False

    def fit(self, view: torch.Tensor) -> bool:
        """Whether ``view`` can be sent from, or received into, where it lies."""
        if view.is_contiguous():
            return True
        return self.row_bytes is not None and Rows.of(view).nbytes >= self.row_bytes


class Transfer(ABC):
    """Messages under way."""

    @abstractmethod
    def wait(self, *, timeout_s: float) -> None:
        """Return when sent tensors may be written and received ones read.

        On a GPU it is the current stream that may, if not the host.

        Raises :class:`TransitionError` where a peer fails or ``timeout_s`` passes.
        """


class Transport(ABC):
    """Point-to-point messages among ``size`` ranks, and one small all-gather.

    ``device`` is where message tensors must lie. ``held_bytes`` is memory that a rank holds for
    messages until :meth:`close`, the most that any rank does: the same number on all.
    """

    rank: int
    size: int
    device: torch.device
    held_bytes: int = 0

    @abstractmethod
    def terms(self, peer: int, *, sending: bool) -> Terms:
        """What is asked of messages to ``peer``, or of those from it."""

    def reaches(self, view: torch.Tensor) -> bool:
        """Whether ``view`` is in the memory that message tensors must lie in."""
        return view.device.type == self.device.type

    @abstractmethod
    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Put all these messages on their way; called by each rank that has any.

        Messages between two ranks match in the order given, over all calls, and have the same
        number of bytes at both ends; shapes and dtypes may differ. Transfers are waited for in the
        order they were started in. Tensors must fit the :meth:`terms`; on a GPU they are ready when
        all that is on the current stream is done. Raises
        :class:`TransitionError` where a peer has failed already.
        """

    @abstractmethod
    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        """Collective over all ranks: everyone's ``data`` (lengths may differ), by rank."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, timeout_s: float
    ) -> None:
        """Start these messages and wait for them."""
        self.start(sends, receives).wait(timeout_s=timeout_s)

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Give back what this end holds; may be called again, and nothing else after it.

        Peers that wait for something of this rank learn that it will not come. Process groups are
        whoever's made them.
        """


class TorchTransport(Transport):
    """Over a torch.distributed group (gloo: CPU tensors; NCCL: CUDA tensors).

    ``rank`` and peers are ranks in the group, which may be one of any world. It must be initialised
    on all its ranks and must carry nothing else meanwhile.
    """

    # An operation costs as much as copying so many bytes twice, packing and unpacking them.
    _TERMS = Terms(part_bytes=1 << 19)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.device = device

    def terms(self, peer: int, *, sending: bool) -> Terms:
        return self._TERMS

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        doing = f"rank {self.rank}: transfer with ranks {peers}"
        with failures_of(doing):
            return _TorchTransfer(doing, self._started(sends, receives) if peers else [])

    def _started(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[dist.Work]:
        # Not by torch.distributed's functions: those only know groups of the world in force.
        together = self.device.type != "cpu"
        if together:
            self.group._start_coalescing(self.device)
        works = [self.group.recv([as_bytes(tensor)], peer, 0) for peer, tensor in receives]
        works += [self.group.send([as_bytes(tensor)], peer, 0) for peer, tensor in sends]
        return [self.group._end_coalescing(self.device)] if together else works

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._all_gather(lengths, length, timeout_s)
        longest = max(1, *(int(n) for n in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        self._all_gather(rows, padded, timeout_s)
        return [row[: int(n)].cpu().numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def _all_gather(self, parts: list[torch.Tensor], own: torch.Tensor, timeout_s: float) -> None:
        with failures_of(f"rank {self.rank}: all-gather"):
            self.group.allgather([parts], [own]).wait(timedelta(seconds=timeout_s))


class _TorchTransfer(Transfer):
    def __init__(self, doing: str, works: Sequence[dist.Work]) -> None:
        self._doing = doing
        self._works = works

    def wait(self, *, timeout_s: float) -> None:
        with failures_of(self._doing):
            for work in self._works:
                work.wait(timedelta(seconds=timeout_s))


def by_peer(messages: Sequence[Message]) -> dict[int, list[torch.Tensor]]:
    """The tensors of messages by peer, in the order given."""
    found: dict[int, list[torch.Tensor]] = {}
    for peer, tensor in messages:
        found.setdefault(peer, []).append(tensor)
    return found


@contextlib.contextmanager
def failures_of(doing: str) -> Iterator[None]:
    """A wait for other ranks: what torch raises inside becomes a :class:`TransitionError`.

    ``doing`` says what is done, in the error and to those who want to know where this rank is.
    """
    try:
        with whereabouts.waiting(doing):
            yield
    except RuntimeError as error:
        raise TransitionError(f"{doing} failed: {error}") from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dim of bytes, in place; raises ValueError where it is another."""
    if not tensor.is_contiguous():
        raise ValueError(f"strides {tensor.stride()} of shape {tuple(tensor.shape)} leave gaps")
    # A tensor of one element is contiguous whatever its strides are, and view() would keep them.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
