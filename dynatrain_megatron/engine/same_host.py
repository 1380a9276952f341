"""The same-host transport: ranks read each other's memory instead of being sent messages.

State does not change during a switch, so whoever needs a piece of it can copy it straight from the
memory of the process that holds it into its place: one copy, no staging memory, no sockets. The
sender only tells where a message lies, and waits until it has been read::

    sender                      receiver
    start   where it lies  ->
            (goes on)           wait   reads, row by row where it lies in rows
    wait                   <-          done, or failed

Peers on other hosts, and those whose memory may not be read, get their messages through
torch.distributed as ever; each pair of ranks by itself, each way by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dynatrain_megatron.engine import process_memory
from dynatrain_megatron.engine.rows import NUM_NUMBERS, Rows
from dynatrain_megatron.engine.transport import (
    Message,
    Terms,
    TorchTransport,
    Transfer,
    Transport,
    by_peer,
    failures_of,
)
from dynatrain_megatron.errors import TransitionError

# Tags: gloo keeps messages of different tags apart. 0 is the messages' own.
_PLACES, _ANSWER = 1, 2
_READ, _FAILED = 0, 1
_TOKEN_BYTES = 16

_Given = dict[int, list[torch.Tensor]]
"""The tensors of messages by peer."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The processes this rank can read, by rank, and the ranks that can read this one.

    On all ranks alike: ``ways`` are all pairs (rank read, its reader), and ``problems`` what keeps
    other ranks of one host from being such pairs.
    """

    processes: dict[int, int]
    readers: frozenset[int]
    ways: frozenset[tuple[int, int]]
    problems: tuple[str, ...]


def probe(transport: Transport, host: str, timeout_s: float) -> Neighbours:
    """Try to read a secret of every other rank of this host; collective.

    ``host`` names the host of this rank, ranks where it is empty have none in common with others.
    """
    process_memory.allow_reading()
    token = secrets.token_bytes(_TOKEN_BYTES)
    kept = ctypes.create_string_buffer(token, _TOKEN_BYTES)
    own = (host, os.getpid(), ctypes.addressof(kept), token.hex())
    cards = transport.all_gather(json.dumps(own).encode(), timeout_s=timeout_s)
    processes: dict[int, int] = {}
    problems: list[str] = []
    for rank, (its_host, pid, address, expected) in enumerate(map(json.loads, cards)):
        if rank == transport.rank or not host or its_host != host:
            continue
        problem = _try_to_read(pid, address, bytes.fromhex(expected))
        if problem:
            problems.append(f"rank {transport.rank} cannot read rank {rank}: {problem}")
        else:
            processes[rank] = pid
    answer = json.dumps((sorted(processes), problems)).encode()
    answers = [json.loads(row) for row in transport.all_gather(answer, timeout_s=timeout_s)]
    ways = {(src, dst) for dst, (found, _) in enumerate(answers) for src in found}
    return Neighbours(
        processes,
        frozenset(dst for src, dst in ways if src == transport.rank),
        frozenset(ways),
        tuple(text for _, texts in answers for text in texts),
    )


def _try_to_read(pid: int, address: int, expected: bytes) -> str:
    """Why these bytes cannot be read there; empty where they can."""
    found = np.zeros(len(expected), dtype=np.uint8)
    here, there = (np.array([[at, len(expected)]]) for at in (found.ctypes.data, address))
    try:
        process_memory.read(pid, here, there)
    except OSError as error:
        return str(error)
    # Containers number their processes each for itself: this may be another process.
    return "" if found.tobytes() == expected else f"process {pid} is another one here"


class SameHostTransport(TorchTransport):
    """Reads from neighbours, sends and receives with all others; gloo, tensors in host memory."""

    # Shorter rows take longer to be read one by one than to be copied to staging memory and read
    # there: the kernel looks up the other process's pages for each. Rows here cost it next to
    # nothing.
    _GIVEN = Terms(part_bytes=1, row_bytes=1 << 12, is_read=True)
    _WANTED = Terms(part_bytes=1, row_bytes=1, is_read=True)

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, neighbours: Neighbours
    ) -> None:
        super().__init__(group, device)
        self.neighbours = neighbours

    def terms(self, peer: int, *, sending: bool) -> Terms:
        if not self._is_near(peer, sending):
            return super().terms(peer, sending=sending)
        return self._GIVEN if sending else self._WANTED

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        given = by_peer([m for m in sends if self._is_near(m[0], sending=True)])
        wanted = by_peer([m for m in receives if self._is_near(m[0], sending=False)])
        far = super().start(
            [m for m in sends if m[0] not in given], [m for m in receives if m[0] not in wanted]
        )
        return _Reads(self, given, wanted, far) if given or wanted else far

    def _is_near(self, peer: int, sending: bool) -> bool:
        return peer in (self.neighbours.readers if sending else self.neighbours.processes)

    def post(self, peer: int, tag: int, numbers: torch.Tensor, *, sending: bool) -> _Control:
        """Send or receive numbers that are no message."""
        call = self.group.send if sending else self.group.recv
        return _Control(numbers, call([numbers], peer, tag))


class _Control(NamedTuple):
    """Numbers under way."""

    numbers: torch.Tensor
    work: dist.Work

    def wait(self, timeout_s: float) -> torch.Tensor:
        self.work.wait(timedelta(seconds=timeout_s))
        return self.numbers


class _Reads(Transfer):
    """Messages that are read, beside those of the same window that are sent."""

    def __init__(
        self, transport: SameHostTransport, given: _Given, wanted: _Given, far: Transfer
    ) -> None:
        self._transport = transport
        self._given = given  # they have to live until they have been read
        self._wanted = wanted
        self._far = far
        self._sent: list[_Control] = []
        with failures_of(self._doing("telling where messages lie")):
            self._places = {
                peer: transport.post(
                    peer,
                    _PLACES,
                    torch.empty((len(tensors), NUM_NUMBERS), dtype=torch.int64),
                    sending=False,
                )
                for peer, tensors in wanted.items()
            }
            self._answers = {
                peer: transport.post(
                    peer, _ANSWER, torch.empty(1, dtype=torch.uint8), sending=False
                )
                for peer in given
            }
            for peer, tensors in given.items():
                places = torch.tensor([Rows.of(tensor).numbers() for tensor in tensors])
                self._sent.append(transport.post(peer, _PLACES, places, sending=True))

    def wait(self, *, timeout_s: float) -> None:
        size, rank = self._transport.size, self._transport.rank
        # Each rank begins with another one.
        waiting = sorted(self._wanted, key=lambda peer: (peer - rank) % size)
        try:
            while waiting:
                self._read(waiting[0], timeout_s)
                self._answer(waiting.pop(0), _READ)
        finally:
            for peer in waiting:
                with contextlib.suppress(RuntimeError):
                    self._answer(peer, _FAILED)
        with failures_of(self._doing(f"being read by ranks {sorted(self._given)}")):
            for peer, answer in self._answers.items():
                if int(answer.wait(timeout_s)) != _READ:
                    raise TransitionError(f"rank {peer} could not read from rank {rank}")
            for control in self._sent:
                control.wait(timeout_s)
        self._far.wait(timeout_s=timeout_s)

    def _read(self, peer: int, timeout_s: float) -> None:
        tensors = self._wanted[peer]
        doing = self._doing(f"reading {len(tensors)} messages from rank {peer}")
        with failures_of(doing):
            places = self._places[peer].wait(timeout_s).tolist()
        here = np.concatenate([Rows.of(tensor).spans() for tensor in tensors])
        there = np.concatenate([Rows.from_numbers(numbers).spans() for numbers in places])
        pid = self._transport.neighbours.processes[peer]
        try:
            process_memory.read(pid, here, there)
        except OSError as error:
            raise TransitionError(f"{doing} (process {pid}) failed: {error}") from error

    def _answer(self, peer: int, code: int) -> None:
        numbers = torch.tensor([code], dtype=torch.uint8)
        self._sent.append(self._transport.post(peer, _ANSWER, numbers, sending=True))

    def _doing(self, what: str) -> str:
        return f"rank {self._transport.rank}: {what}"
