"""The socket in a job's run directory, through which its owner asks something of the job.

A Unix socket that nobody else may connect to: it is not on the network, and needs no secret. The
process of rank 0 listens, so it is of use on that one's host; from elsewhere a job is asked through
its store, see :mod:`.control`. A connection carries a line of JSON each way::

    {"ask": {"world": 4}}   ->  {"number": 3}
    {"answer": 3}           ->  {"answer": {"state": "announced", ..}}, or null: none so far
    {"status": null}        ->  {"status": {"iteration": 7, ..}}
    all else                ->  {"error": ".."}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dynatrain_megatron.elastic.control import MOST_CHARS
from dynatrain_megatron.errors import ConfigError, DynaTrainError, WorldError

logger = logging.getLogger(__name__)

SOCKET = "control.sock"
_TICK_S = 0.2
_CLIENT_S = 5.0  # of each wait for a client
_AGAIN_S = 5.0  # after the socket could not be made
_BACKLOG = 16

Reply = Callable[[dict[str, Any]], dict[str, Any]]


class Endpoint:
    """Listens in ``run_dir``, on a thread, as long as ``serves`` says that it is this process's
    turn; ``reply`` answers, and refuses by a :class:`DynaTrainError`.

    Where the run directory's file system has no sockets, a warning says so once.
    """

    def __init__(self, run_dir: Path, serves: Callable[[], bool], reply: Reply) -> None:
        self._run_dir = run_dir
        self._serves = serves
        self._reply = reply
        self._listening: socket.socket | None = None
        self._inode = 0
        self._has_warned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain control", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more; the socket is gone then."""
        self._stopping.set()
        self._thread.join(2 * _CLIENT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._serves():
                self._close()
                self._stopping.wait(_TICK_S)
                continue
            if self._listening is None:
                self._open()
            if self._listening is None:
                self._stopping.wait(_AGAIN_S)
                continue
            try:
                connection, _ = self._listening.accept()
                with connection:
                    connection.settimeout(_CLIENT_S)
                    connection.sendall(_line(self._answer(connection)))
            except TimeoutError:  # nobody has come, or one who says nothing
                continue
            except OSError:  # a client was lost, or there are no more files to be had
                logger.debug("nobody was answered at %s", self._run_dir / SOCKET, exc_info=True)
                self._stopping.wait(_TICK_S)
        self._close()

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        try:
            message = _read(connection)  # all of it, or who is refused might not hear why
            _check_peer(connection)
            return self._reply(message)
        except OSError:
            raise
        except DynaTrainError as error:
            return {"error": str(error)}
        except Exception as error:  # torch's store raises RuntimeError; the next one is answered
            return {"error": f"{type(error).__name__}: {error}"}

    def _open(self) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            with _short(self._run_dir) as folder:
                # Under another name until nobody else may connect to it.
                new = folder / f".{SOCKET}.{os.getpid()}"
                new.unlink(missing_ok=True)
                listening.bind(str(new))
                new.chmod(0o600)
                listening.listen(_BACKLOG)
                listening.settimeout(_TICK_S)
                self._inode = new.stat().st_ino
                new.replace(folder / SOCKET)
        except OSError as error:
            listening.close()
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "no socket can be made in %s (%s): the job can be asked through its store",
                    self._run_dir,
                    error.strerror,
                )
            return
        self._listening = listening

    def _close(self) -> None:
        if self._listening is None:
            return
        self._listening.close()
        self._listening = None
        path = self._run_dir / SOCKET
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == self._inode:  # and not of whoever has taken over
                path.unlink()


def asked(run_dir: Path, message: dict[str, Any]) -> dict[str, Any] | None:
    """What the job that writes to ``run_dir`` answers; None where it does not listen there.

    Raises :class:`ConfigError` where it refuses to, and :class:`WorldError` where it was lost in
    between: then it may have heard what was asked, or not.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(2 * _CLIENT_S)
        try:
            with _short(run_dir) as folder:
                connection.connect(str(folder / SOCKET))
        except OSError:
            return None
        try:
            connection.sendall(_line(message))
            answer = _read(connection)
        except (OSError, ConfigError) as error:
            raise WorldError(f"the job at {run_dir / SOCKET} gave no answer: {error}") from error
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    return answer


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[Path]:
    """Another path of ``folder``: a socket's may have 107 characters, which many a run's has not
    room for."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)


def _check_peer(connection: socket.socket) -> None:
    """Raises :class:`ConfigError` unless who has connected is this process's user, or root.

    The socket's mode says the same; some file systems do not heed it.
    """
    form = struct.Struct("3i")
    sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    user = form.unpack(sent)[1]
    if user not in (0, os.geteuid()):
        raise ConfigError(f"this job is user {os.geteuid()}'s; user {user} may not ask")


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read(connection: socket.socket) -> dict[str, Any]:
    """The line that the other end sends. Raises :class:`ConfigError` where it is not one of ours,
    and OSError."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(MOST_CHARS)
        if not part:
            break
        data += part
        if len(data) > MOST_CHARS:
            raise ConfigError(f"a message is a line of at most {MOST_CHARS} bytes")
    try:
        read = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a message is a line of JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError("a message is a JSON object")
    return read
