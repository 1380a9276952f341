"""A thread that makes worlds while the main thread trains; one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from dynatrain_megatron.errors import WorldError


class Abandonable(Protocol):
    """What can be given up before it was ever in force."""

    def abandon(self) -> None:
        """End it; local."""


class Building[T: Abandonable]:
    """Something, called ``what`` in messages, that a thread of its own is making."""

    def __init__(self, what: str, make: Callable[[], T]) -> None:
        self.what = what
        self._make = make
        self._lock = threading.Lock()
        self._built: T | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        # A thread that hangs in torch must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"build {what}", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the thread has returned, with a result or without."""
        return not self._thread.is_alive()

    @property
    def thread(self) -> threading.Thread:
        """That which makes it."""
        return self._thread

    def wait(self, *, timeout_s: float) -> bool:
        """Whether the thread returns within that time."""
        self._thread.join(timeout_s)
        return self.is_done

    def result(self, *, timeout_s: float) -> T:
        """What was made; waits for it. Raises what making it raised, :class:`WorldError` mostly."""
        self._thread.join(timeout_s)
        if not self.is_done:
            raise WorldError(f"{self.what} is still being built after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._built is not None
        return self._built

    def abandon(self) -> None:
        """Nobody wants it any more: end it, now or when the thread is done with it."""
        with self._lock:
            self._is_abandoned = True
            built, self._built = self._built, None
            if built is not None:
                self._error = self._abandoned()
        if built is not None:
            built.abandon()

    def _run(self) -> None:
        try:
            built = self._make()
        except BaseException as error:
            self._error = error
            return
        with self._lock:
            if not self._is_abandoned:
                self._built = built
                return
            self._error = self._abandoned()
        built.abandon()

    def _abandoned(self) -> WorldError:
        return WorldError(f"{self.what} was abandoned")


_latest: Building[Any] | None = None


def start[T: Abandonable](what: str, make: Callable[[], T]) -> Building[T]:
    """Make something in a thread of its own.

    Raises :class:`WorldError` while an earlier build is under way, which includes one that has
    failed elsewhere and still waits here.
    """
    global _latest
    if _latest is not None and not _latest.is_done:
        raise WorldError(
            f"{_latest.what} is still being built on this process; build {what} when that has "
            "ended, at the latest after its timeout"
        )
    _latest = Building(what, make)
    return _latest
