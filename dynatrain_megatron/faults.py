"""Faults made on purpose, to see what a switch does when something fails: for drills and tests.

A job is told of them by ``faults=[{rank: 1, phase: wire, kind: kill}]``. The parts of a switch call
:func:`inject` where a phase begins, which does nothing unless a fault is armed for that phase and
rank. Each fault happens once on each of its ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """Where in a switch a fault can be. ``pack``, ``wire`` and ``unpack`` begin once a window."""

    quiesce = "quiesce"
    groups = "groups"
    build = "build"
    plan = "plan"
    memory = "memory"
    pack = "pack"
    wire = "wire"
    unpack = "unpack"
    rebuild = "rebuild"
    verify = "verify"
    vote = "vote"
    commit = "commit"


class Kind(StrEnum):
    """What happens: an exception is raised, the process dies or stops answering, and so on.

    ``bitflip`` changes one bit of a message that the rank receives, when its checksum has been made
    and before it is looked at. ``hang`` stops the phase alone, ``stop`` the whole process, by
    SIGSTOP. ``oom`` is what torch raises when memory has run out. ``slow`` goes on after some time.
    """

    exception = "exception"
    kill = "kill"
    hang = "hang"
    stop = "stop"
    bitflip = "bitflip"
    oom = "oom"
    slow = "slow"


class InjectedFault(RuntimeError):
    """The exception of a fault: like one that nobody foresaw, it is none of the package's own."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault on each of ``ranks``, the ``at``-th time that ``phase`` begins there.

    ``seconds`` is how long a slow rank takes.
    """

    ranks: tuple[int, ...]
    phase: Phase
    kind: Kind
    at: int = 1
    seconds: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind} in phase {self.phase}"


class _Armed:
    """The faults of this process, and how often each rank has come by them."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        self.passed: Counter[tuple[int, int]] = Counter()  # by number of the fault, and rank
        self.flips: Counter[int] = Counter()


_armed = _Armed(())


def arm(faults: Iterable[Fault]) -> None:
    """From now on these faults happen in this process, and no others."""
    global _armed
    _armed = _Armed(faults)


def inject(phase: Phase, rank: int) -> None:
    """Let happen what is to happen as ``phase`` begins on ``rank``; mostly nothing."""
    armed = _armed
    for number, fault in enumerate(armed.faults):
        if fault.phase is phase and rank in fault.ranks:
            armed.passed[number, rank] += 1
            if armed.passed[number, rank] == fault.at:
                logger.warning("rank %d: injected fault: %s", rank, fault)
                _happen(fault, rank, armed)


def takes_flip(rank: int) -> bool:
    """Whether a bit of the message that ``rank`` has just received is to be flipped, once."""
    if not _armed.flips[rank]:
        return False
    _armed.flips[rank] -= 1
    return True


def _happen(fault: Fault, rank: int, armed: _Armed) -> None:
    match fault.kind:
        case Kind.exception:
            raise InjectedFault(f"rank {rank}: injected {fault}")
        case Kind.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        case Kind.stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Kind.hang:
            threading.Event().wait()
        case Kind.bitflip:
            armed.flips[rank] += 1
        case Kind.oom:
            import torch

            raise torch.OutOfMemoryError(f"rank {rank}: injected {fault}")
        case Kind.slow:
            time.sleep(fault.seconds)
