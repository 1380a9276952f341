"""A transport between threads that delivers late, in odd orders and in parts, and poisons memory.

It does whatever the contract of transports allows and asks for it to be kept. Nothing moves by
itself: ranks that wait carry messages, any of those under way, whoever's they are. So what a rank
sends is read long after it was handed over, or before the receiver asks for it; what it receives is
overwritten at once, and right when it has waited::

    rank 0   start           packs the next window …            wait
    rank 1   start   wait: carries half of 0's message, one of 2's, the rest of 0's …
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from dynatrain_megatron.engine import Transport
from dynatrain_megatron.engine.transport import Message, Terms, Transfer, as_bytes
from dynatrain_megatron.errors import TransitionError

POISON = 0xA5
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(tensor: torch.Tensor) -> None:
    """Overwrite memory with bits that nobody has put there."""
    nbytes = tensor.element_size()
    value = int.from_bytes(bytes([POISON] * nbytes), "little", signed=nbytes > 1)
    tensor.view(_INTS[nbytes]).fill_(value)


def poison_storage(storage: torch.UntypedStorage) -> None:
    """The same for all of a storage."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)


class UseAfterFree(AssertionError):
    """A message lies in memory that was given back before the message had been carried."""


class _Parcel:
    """One message: both ends of it once both are known, and how far it has been carried."""

    def __init__(self, src: int, dst: int) -> None:
        self.src, self.dst = src, dst
        self.sent: torch.Tensor | None = None
        self.into: torch.Tensor | None = None
        self.buffered: torch.Tensor | None = None
        self.is_noted = False
        self.half_done = False
        self.is_taken = False
        self.has_arrived = False

    def can_go_on(self, *, to_buffer: bool) -> bool:
        if self.has_arrived or (self.sent is None and self.buffered is None):
            return False
        return self.into is not None or (to_buffer and not self.is_taken)

    def carry(self, chance: random.Random) -> None:
        """One step: into the network's own memory, half of the way, or to the end."""
        source = self.buffered
        if source is None:
            assert self.sent is not None
            source = _there(self.sent)
            if self.into is None or chance.random() < 0.1:
                self.buffered = source.contiguous().clone()
                self.sent, self.is_taken = None, True
                return
        assert self.into is not None
        into = _there(self.into)
        if source.is_contiguous() and into.is_contiguous():
            given, got = as_bytes(source), as_bytes(into)
            half = len(given) // 2
            if not self.half_done and half and chance.random() < 0.5:
                got[half:].copy_(given[half:])
                self.half_done = True
                return
            if self.half_done:
                given, got = given[:half], got[:half]
            got.copy_(given)
        else:
            data = as_bytes(source.contiguous().clone())
            into.copy_(data.view(into.dtype).view(into.shape))
        self.sent = self.buffered = None
        self.is_taken = self.has_arrived = True


def _there(tensor: torch.Tensor) -> torch.Tensor:
    last = tensor.storage_offset() + 1
    last += sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and tensor.untyped_storage().nbytes() < last * tensor.element_size():
        raise UseAfterFree(f"{tuple(tensor.shape)} {tensor.dtype}")
    return tensor


class _Network:
    """What the ends of a mesh share; everything in it is used by whoever has ``changed``."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.chance = random.Random(seed)
        self.eager = self.chance.choice([0.0, 0.3, 0.9])
        self.buffers = self.chance.random() < 0.5
        self.able: list[_Parcel] = []  # those that can be carried on
        self.lone_sends: dict[tuple[int, int], deque[_Parcel]] = defaultdict(deque)
        self.lone_receives: dict[tuple[int, int], deque[_Parcel]] = defaultdict(deque)
        self.rounds: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.gone: set[int] = set()

    def send(self, src: int, dst: int, tensor: torch.Tensor) -> _Parcel:
        parcel = self._parcel(src, dst, self.lone_receives, self.lone_sends)
        parcel.sent = tensor
        _check_sizes(parcel)
        self._note(parcel)
        return parcel

    def receive(self, src: int, dst: int, tensor: torch.Tensor) -> _Parcel:
        parcel = self._parcel(src, dst, self.lone_sends, self.lone_receives)
        parcel.into = tensor
        _check_sizes(parcel)
        poison(tensor)
        self._note(parcel)
        return parcel

    def _parcel(
        self,
        src: int,
        dst: int,
        others: dict[tuple[int, int], deque[_Parcel]],
        own: dict[tuple[int, int], deque[_Parcel]],
    ) -> _Parcel:
        """The oldest whose other end is known, or a new one: a pair's messages keep their order."""
        if others[src, dst]:
            return others[src, dst].popleft()
        parcel = _Parcel(src, dst)
        own[src, dst].append(parcel)
        return parcel

    def _note(self, parcel: _Parcel) -> None:
        if not parcel.is_noted and parcel.can_go_on(to_buffer=self.buffers):
            parcel.is_noted = True
            self.able.append(parcel)

    def step(self) -> bool:
        """Carry any message a step further; whether there was one."""
        if not self.able:
            return False
        number = self.chance.randrange(len(self.able))
        parcel = self.able[number]
        parcel.carry(self.chance)
        if not parcel.can_go_on(to_buffer=self.buffers):
            parcel.is_noted = False
            self.able[number] = self.able[-1]
            self.able.pop()
        if parcel.is_taken:
            self.changed.notify_all()
        return True

    def leave(self, rank: int) -> None:
        """Nobody touches this rank's memory from now on."""
        with self.changed:
            self.gone.add(rank)
            self.able = [p for p in self.able if rank not in (p.src, p.dst)]
            self.changed.notify_all()


def _check_sizes(parcel: _Parcel) -> None:
    known = [t for t in (parcel.sent, parcel.buffered, parcel.into) if t is not None]
    if len({tensor.nbytes for tensor in known}) > 1:
        raise TransitionError(
            f"from rank {parcel.src} to rank {parcel.dst}: one end has a message of "
            f"{known[0].nbytes} bytes, the other one of {known[1].nbytes}"
        )


class LateTransport(Transport):
    """One end; make all of a mesh at once. Ranks of one of ``hosts`` are "read" from.

    Raises :class:`UseAfterFree` where memory was given back too early.
    """

    def __init__(
        self, rank: int, network: _Network, hosts: Sequence[int], part_bytes: int = 64
    ) -> None:
        self.rank = rank
        self.size = network.size
        self.device = torch.device("cpu")
        self._network = network
        self._hosts = hosts
        self._part_bytes = part_bytes
        self._round = 0

    @classmethod
    def mesh(
        cls,
        size: int,
        hosts: Sequence[int] | None = None,
        *,
        part_bytes: int = 64,
        seed: int = 0,
    ) -> list[LateTransport]:
        network = _Network(size, seed)
        return [cls(rank, network, hosts or range(size), part_bytes) for rank in range(size)]

    def terms(self, peer: int, *, sending: bool) -> Terms:
        if self._hosts[peer] == self._hosts[self.rank]:
            return Terms(part_bytes=1, row_bytes=24 if sending else 1, is_read=True)
        return Terms(self._part_bytes)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        network = self._network
        with network.changed:
            gone = {peer for peer, _ in (*sends, *receives)} & network.gone
            if gone:
                raise TransitionError(f"rank {self.rank}: ranks {sorted(gone)} have given up")
            sent = [network.send(self.rank, peer, tensor) for peer, tensor in sends]
            received = [network.receive(peer, self.rank, tensor) for peer, tensor in receives]
            while network.chance.random() < network.eager and network.step():
                continue
            network.changed.notify_all()
        return _LateTransfer(self.rank, network, sent, received)

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        network, number = self._network, self._round
        self._round += 1
        deadline = time.monotonic() + timeout_s
        with network.changed:
            found = network.rounds[number]
            found[self.rank] = data
            network.changed.notify_all()
            while len(found) < self.size:
                missing = set(range(self.size)) - found.keys()
                _check_there(self.rank, missing & network.gone, missing, deadline)
                if not network.step():
                    network.changed.wait(deadline - time.monotonic())
            return [found[rank] for rank in range(self.size)]

    def close(self) -> None:
        self._network.leave(self.rank)


class _LateTransfer(Transfer):
    def __init__(
        self, rank: int, network: _Network, sent: list[_Parcel], received: list[_Parcel]
    ) -> None:
        self._rank = rank
        self._network = network
        self._sent = sent
        self._received = received

    def wait(self, *, timeout_s: float) -> None:
        network = self._network
        deadline = time.monotonic() + timeout_s
        with network.changed:
            while True:
                peers = {p.src for p in self._received if not p.has_arrived}
                peers |= {p.dst for p in self._sent if not p.is_taken}
                if not peers:
                    return
                _check_there(self._rank, peers & network.gone, peers, deadline)
                if not network.step():
                    network.changed.wait(deadline - time.monotonic())


def _check_there(rank: int, gone: set[int], peers: set[int], deadline: float) -> None:
    if gone:
        raise TransitionError(f"rank {rank}: ranks {sorted(gone)} have given up")
    if time.monotonic() > deadline:
        raise TransitionError(f"rank {rank}: nothing from ranks {sorted(peers)} in time")
