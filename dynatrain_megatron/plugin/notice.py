"""The signal that tells a process to leave the job: heard at once, obeyed at a step boundary."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from argparse import Namespace
from typing import Any

from dynatrain_megatron.plugin.membership import Membership

logger = logging.getLogger(__name__)


class Notice:
    """Listens for a signal, on the main thread of a process with Megatron's ``args``.

    Python runs its own handlers only between two of its instructions, which the main thread may not
    reach while it waits for other ranks. So the number of the signal comes through a socket, which
    a thread reads. Where Megatron listens for the same signal (--exit-signal-handler) it is left
    alone: the job saves and ends, as its flags say.
    """

    def __init__(self, name: str | None, membership: Membership, args: Namespace) -> None:
        self._membership = membership
        self._before: Any = None
        self._number: int | None = None
        if name is None or threading.current_thread() is not threading.main_thread():
            return
        number = getattr(signal, name)
        if getattr(args, "exit_signal_handler", False) and number == args.exit_signal:
            logger.warning(
                "%s ends the job, as --exit-signal-handler says, and no process leaves it for that "
                "signal; elastic.leave_signal names another",
                name,
            )
            return
        self._number = number
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._before = signal.signal(number, lambda *_: None)
        threading.Thread(
            target=self._listen, args=(number,), name="dynatrain notice", daemon=True
        ).start()

    def restore(self) -> None:
        """Put back what the signal did before."""
        if self._number is None:
            return
        signal.signal(self._number, self._before)
        signal.set_wakeup_fd(self._wakeup)
        self._number = None
        self._write.close()

    def _listen(self, number: int) -> None:
        with self._read:
            while numbers := self._read.recv(64):
                if number not in numbers:
                    continue
                if self._membership.has_notice or not self._membership.can_leave():
                    os._exit(128 + number)  # nobody would go on: as without a handler
                self._membership.has_notice = True
