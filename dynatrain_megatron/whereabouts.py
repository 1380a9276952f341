"""Where this process is in a switch: its phase, and what it waits for there.

The thread that switches notes it as it goes, which is one assignment. Others learn of it by the
process's signs of life (:mod:`dynatrain_megatron.plugin.membership`), and look only when a switch
does not go on: then they can name who is missing, in which phase, at what.

::

    begin(phase)        a phase begins; faults on purpose happen here
    waiting("…")        inside, nothing is done here but to wait for other processes
    here()              any thread: where the switching thread is
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dynatrain_megatron import faults
from dynatrain_megatron.errors import SwitchAborted, SwitchRefused
from dynatrain_megatron.faults import Phase

READY = "ready"
"""In place of a phase, where a process has prepared a switch and trains on."""


@dataclass(frozen=True, slots=True)
class Place:
    """A phase, and in words what is waited for there; empty where the process is at work itself.

    ``since`` is when that began, by the process's own monotonic clock. Outside a switch ``phase``
    is empty.
    """

    phase: str = ""
    waits_for: str = ""
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """For how long; on the process itself."""
        return time.monotonic() - self.since


@dataclass(frozen=True, slots=True)
class LastWord:
    """What a process told of its place with its last sign of life: as :class:`Place`, ``seconds``
    as they were then.
    """

    phase: str = ""
    waits_for: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.phase in ("", READY):
            return "last heard of before it began to switch"
        doing = f"waiting ({self.waits_for})" if self.waits_for else "at work"
        return f"last heard of in phase {self.phase}, {doing} for {self.seconds:.1f} s"


def to_text(count: int, place: Place) -> str:
    """A sign of life, the ``count``-th, that tells where the process is."""
    return json.dumps([count, place.phase, place.waits_for, round(place.seconds, 1)])


def from_text(text: str | bytes) -> LastWord:
    """What :func:`to_text` told; of an empty text nothing."""
    return LastWord(*json.loads(text)[1:]) if text else LastWord()


class _Thread:
    """The thread that switches, where it is, and who hears of it as phases begin."""

    ident = 0
    place = Place()
    hears: Callable[[], None] | None = None
    begun: frozenset[str] = frozenset()


def begin(phase: str, rank: int) -> None:
    """``phase`` begins on ``rank``: note it, and let the faults happen that are armed for it."""
    if threading.get_ident() == _Thread.ident:
        _Thread.place = Place(phase)
        if phase == Phase.memory:  # with which each stage begins
            _Thread.begun = frozenset()
        if phase not in _Thread.begun:
            _Thread.begun |= {phase}
            if _Thread.hears is not None:
                _Thread.hears()
    if phase in _PHASES:
        faults.inject(Phase(phase), rank)


@contextlib.contextmanager
def switching(hears: Callable[[], None]) -> Iterator[None]:
    """This thread switches inside; ``hears`` is called as each phase begins, in each stage once.

    Where that fails for good the place stays: others may ask for it until the process has ended.
    """
    _Thread.ident, _Thread.begun, _Thread.hears = threading.get_ident(), frozenset(), hears
    _Thread.place = Place("begin")
    try:
        yield
    except Exception as error:
        if isinstance(error, SwitchRefused | SwitchAborted):
            _Thread.place = Place()
        raise
    else:
        _Thread.place = Place()
    finally:
        _Thread.ident, _Thread.hears = 0, None


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Inside, the thread that switches waits for others: ``what`` says for what.

    Where the wait fails the place stays as it is, so that whoever handles the error can tell that
    it came of others.
    """
    if threading.get_ident() != _Thread.ident:
        yield
        return
    outer = _Thread.place
    _Thread.place = Place(outer.phase, what)
    yield
    _Thread.place = Place(outer.phase, outer.waits_for)


def goes_on() -> None:
    """What is waited for comes bit by bit, and some of it has just come."""
    if threading.get_ident() == _Thread.ident:
        _Thread.place = Place(_Thread.place.phase, _Thread.place.waits_for)


def here() -> Place:
    """Where the thread that switches is; any thread."""
    return _Thread.place


_PHASES = frozenset(Phase)
