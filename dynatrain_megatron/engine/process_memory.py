"""Reading the memory of other processes of this host, by Linux's process_vm_readv.

It takes the permission to trace the other process: the same user, and where Yama restricts tracing
(``ptrace_scope`` 1) the consent of the process read, given by :func:`allow_reading`. Some
containers forbid it altogether. Whether it works is tried, not guessed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from pathlib import Path

from dynatrain_megatron.engine.spans import Spans
from dynatrain_megatron.vps.boxes import IntArray

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_ANYONE = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)


def host_id() -> str:
    """What processes of one host have in common; empty where the kernel does not tell.

    A running kernel and a host name: containers that share a kernel and call themselves
    differently are different hosts, here as in the topology.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {socket.gethostname()}"
    except OSError:
        return ""


def allow_reading() -> None:
    """Let other processes of this user read this one, where they need its consent."""
    try:
        restricted = _PTRACE_SCOPE.read_text().strip() == "1"
    except OSError:
        return
    if restricted:
        _libc.prctl(_PR_SET_PTRACER, _ANYONE, 0, 0, 0)


def read(pid: int, here: IntArray, there: IntArray) -> None:
    """Copy memory of process ``pid``: what lies ``there`` fills ``here``.

    Both are spans of memory, (address, bytes) [n, 2], with equally many bytes in all; where one
    span ends is each side's own affair. Spans of another process cost the kernel more (0.3 us each,
    about) than those here. Raises ``OSError`` as the kernel does: no such process, no permission, a
    bad address.
    """
    sides = (Spans(here), Spans(there))
    at, total = 0, sides[0].bytes
    assert total == sides[1].bytes
    while at < total:
        stop = min(side.reach(at) for side in sides)
        # A call may end early, at its own limit of bytes or before a fault, which the next tells.
        at += _readv(pid, *(side.between(at, stop) for side in sides))


def _readv(pid: int, here: IntArray, there: IntArray) -> int:
    """One call; returns the bytes copied."""
    try:
        call = _libc.process_vm_readv
    except AttributeError as error:
        raise OSError("the C library has no process_vm_readv") from error
    call.restype = ctypes.c_ssize_t
    done = call(
        ctypes.c_int(pid),
        ctypes.c_void_p(here.ctypes.data),
        ctypes.c_ulong(len(here)),
        ctypes.c_void_p(there.ctypes.data),
        ctypes.c_ulong(len(there)),
        ctypes.c_ulong(0),
    )
    if done > 0:
        return int(done)
    code = ctypes.get_errno() if done < 0 else errno.EFAULT
    raise OSError(code, os.strerror(code))
