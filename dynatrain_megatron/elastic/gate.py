"""A gate that lets a thread make groups only while the main thread stands still.

Communicators that are made in the background beside training can deadlock on GPUs. So the thread
that makes them waits before each few, and the main thread lets it make some at every step boundary
and waits meanwhile::

    main     train | boundary: let it pass | train | boundary: let it pass | ...
    thread         . 1  2  3  4            .       . 5  6  7  8
"""

from __future__ import annotations

import threading
import time


class Gate:
    """Holds a thread up before each few groups that it makes; nobody where ``is_open``."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._condition = threading.Condition()
        self._permits = 0
        self._waiting = False
        self._is_done = False
        self._is_open = is_open

    @property
    def is_open(self) -> bool:
        """Whether nobody is held up."""
        return self._is_open

    def __call__(self) -> None:
        """The thread that makes groups, before each few of them: wait until it may."""
        with self._condition:
            self._waiting = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_open or self._permits > 0)
            self._waiting = False
            self._permits = max(0, self._permits - 1)

    def done(self) -> None:
        """The thread has made its last group; what it still does disturbs nobody."""
        with self._condition:
            self._is_done = True
            self._condition.notify_all()

    def let_pass(self, count: int, thread: threading.Thread, *, timeout_s: float) -> bool:
        """Let ``thread`` pass so often; returns when it waits again, or has made its last group.

        Which of both is the result, true also where it has ended. Those that it does not make
        within ``timeout_s`` it may make later.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._permits += count
            self._condition.notify_all()
            while thread.is_alive() and not self._is_done and time.monotonic() < deadline:
                if self._waiting and not self._permits:
                    return False
                self._condition.wait(0.01)  # a thread that ends tells nobody
            return self._is_done or not thread.is_alive()

    def open(self) -> None:
        """Hold nobody up from now on."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()
