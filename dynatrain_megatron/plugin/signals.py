"""Signals that tell a process to leave the job or to read a request: heard at once, on a thread."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from dynatrain_megatron.plugin.membership import Membership

logger = logging.getLogger(__name__)


class Signals:
    """Listens for signals, on the main thread of a process with Megatron's ``args``.

    Python runs its own handlers only between two of its instructions, which the main thread may not
    reach while it waits for other ranks. So the number of the signal comes through a socket, which
    a thread reads. Where Megatron listens for the same signal (--exit-signal-handler) it is left
    alone: the job saves and ends, as its flags say. The signal that asks is left alone also where
    the script itself listens for it.
    """

    def __init__(
        self, leave: str | None, ask: str | None, membership: Membership, args: Namespace
    ) -> None:
        """``leave`` and ``ask`` are names of signals; where they are one it means to leave."""
        self._membership = membership
        self._actions: dict[int, Callable[[int], None]] = {}
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        exits = args.exit_signal if getattr(args, "exit_signal_handler", False) else None
        if leave is not None and getattr(signal, leave) == exits:
            logger.warning(
                "%s ends the job, as --exit-signal-handler says, and no process leaves it for that "
                "signal; elastic.leave_signal names another",
                leave,
            )
        elif leave is not None:
            self._actions[getattr(signal, leave)] = self._leave
        if ask is not None and ask != leave:
            number = getattr(signal, ask)
            free = (signal.SIG_DFL, signal.SIG_IGN)
            if number == exits or signal.getsignal(number) not in free:
                logger.info("%s has another meaning here; control.signal names another", ask)
            else:
                self._actions[number] = self._ask
        if not self._actions:
            return
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in self._actions:
            self._before[number] = signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, name="dynatrain signals", daemon=True).start()

    def restore(self) -> None:
        """Put back what the signals did before.

        The one that asks is ignored from now on: a request that comes late must not end a process
        that saves its last checkpoint.
        """
        if not self._before:
            return
        for number, handler in self._before.items():
            asks = self._actions[number] == self._ask
            signal.signal(number, signal.SIG_IGN if asks else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._before = {}
        self._write.close()

    def _listen(self) -> None:
        with self._read:
            while numbers := self._read.recv(64):
                for number in self._actions.keys() & set(numbers):
                    self._actions[number](number)

    def _leave(self, number: int) -> None:
        if self._membership.has_notice or not self._membership.can_leave():
            os._exit(128 + number)  # nobody would go on: as without a handler
        self._membership.has_notice = True

    def _ask(self, _number: int) -> None:
        # On a thread of its own: a file system that hangs must not hold up a notice.
        threading.Thread(
            target=self._membership.read_request, name="dynatrain request", daemon=True
        ).start()
