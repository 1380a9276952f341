"""What can go wrong in a switch, case by case, and what is promised then.

A case is a fault on purpose (:mod:`dynatrain_megatron.faults`) on one rank of a job of two, which
both stay. What is promised is docs/protocol.md's table, put into a function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from dynatrain_megatron.faults import Kind, Phase

RANKS = (0, 1)


class Keep(StrEnum):
    """``engine.keep_source``, but for ``auto``, which is one of them."""

    always = "always"
    never = "never"


class Outcome(StrEnum):
    """What becomes of the job: it goes on as if nothing had been asked, it goes on in the new
    layout, or all its processes end, each with an error that says who failed in which phase.
    """

    goes_on = "goes on"
    commits = "commits"
    ends = "ends"


_ONCE_A_STAGE = (Phase.memory, Phase.pack, Phase.wire, Phase.unpack, Phase.verify)
_LOST = (Kind.kill, Kind.hang, Kind.stop)
_RAISED = (Kind.exception, Kind.oom, Kind.bitflip)


@dataclass(frozen=True, slots=True)
class Case:
    """``kind`` happens on ``rank`` the ``at``-th time that ``phase`` begins there.

    With ``never`` that is in the ``at``-th stage, for phases of which each stage has one.
    """

    phase: Phase
    kind: Kind
    rank: int
    keep: Keep
    at: int = 1

    @property
    def promised(self) -> Outcome:
        """What the documentation says."""
        if self.kind is Kind.slow:
            return Outcome.commits
        if self.kind in _LOST or self.phase is Phase.commit:
            return Outcome.ends
        return Outcome.goes_on

    @property
    def named(self) -> str:
        """The phase as tables have it."""
        return f"{self.phase}, later stage" if self.at > 1 else str(self.phase)

    def __str__(self) -> str:
        return f"keep_source={self.keep}: {self.kind} on rank {self.rank} in {self.named}"


def cases(keep: Keep) -> Iterator[Case]:
    """Every phase × kind × rank; where the old state goes by stages, in the first and a later."""
    for phase in Phase:
        staged = keep is Keep.never and phase in _ONCE_A_STAGE
        for kind in Kind:
            if kind is Kind.bitflip and phase is not Phase.wire:
                continue
            # Who dies in the first stage of several dies as with `always`: not twice.
            first = () if staged and kind in _LOST else (1,)
            for at in (*first, *((2,) if staged else ())):
                for rank in RANKS:
                    yield Case(phase, kind, rank, keep, at)


def quick() -> list[Case]:
    """Each phase and each kind once."""
    always, never = Keep.always, Keep.never
    kinds = (Kind.exception, Kind.oom)
    found = [
        Case(phase, kinds[n % 2], n // 2 % 2, always)
        for n, phase in enumerate(Phase)
        if phase is not Phase.commit
    ]
    return [
        *found,
        Case(Phase.wire, Kind.bitflip, 1, always),
        Case(Phase.vote, Kind.slow, 0, always),
        Case(Phase.wire, Kind.kill, 1, always),
        Case(Phase.unpack, Kind.hang, 0, always),
        Case(Phase.vote, Kind.stop, 1, always),
        Case(Phase.commit, Kind.exception, 0, always),
        Case(Phase.wire, Kind.exception, 1, never, at=2),
    ]
