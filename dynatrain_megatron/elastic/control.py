"""How somebody outside a job asks something of it: through its store, with the job's secret, or by
a file in its run directory and a signal. (Through a socket there: :mod:`.endpoint`.)

A running job leaves a file in its run directory that only its owner may read: where its store is,
what it is called there, and a secret. Requests carry an HMAC of their text and number made with
that secret, so that whoever can reach the store and not the file asks in vain, and no request can
be made from another.

A process of the job that is told by a signal to do so takes the request that lies in the run
directory. What became of the last request, however it came, lies there too.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynatrain_megatron.elastic.store import StoreAddress
from dynatrain_megatron.errors import ConfigError

JOB_FILE = "job.json"
REQUEST_FILE = "request.json"
ANSWER_FILE = "answer.json"
MOST_CHARS = 1 << 16
"""Of a request."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """What is needed to ask something of a job: its store, its name there, its secret."""

    store: str
    job: str
    secret: str

    def write(self, run_dir: Path) -> None:
        """Leave it in ``run_dir``, for the owner's eyes only."""
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / JOB_FILE
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as opened:
            opened.write(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> JobFile:
        """That of the job that writes to ``run_dir``; raises :class:`ConfigError`."""
        path = run_dir / JOB_FILE
        try:
            read = json.loads(path.read_text())
            found = cls(*(str(read[name]) for name in ("store", "job", "secret")))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is not there: no job with --dynatrain has begun to train with "
                f"run_dir={run_dir}; name the run directory of a running job"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        StoreAddress.parse(found.store)
        return found


def take_request(run_dir: Path) -> str | None:
    """The request that lies in ``run_dir``, which is gone then; None where there is none.

    Of several processes one gets it. Raises :class:`ConfigError` where it might be somebody else's
    than the owner's of this process, or cannot be read.
    """
    path = run_dir / REQUEST_FILE
    own = path.with_name(f".{REQUEST_FILE}.{os.uname().nodename}.{os.getpid()}")
    try:
        path.rename(own)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be taken: {error.strerror}") from error
    try:
        file = os.open(own, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_CHARS:
                raise ConfigError(f"{path} is no file of at most {MOST_CHARS} bytes")
            mode = stat.S_IMODE(found.st_mode)
            if found.st_uid != os.geteuid() or mode & 0o022:
                raise ConfigError(
                    f"{path} must belong to user {os.geteuid()}, who runs the job, and nobody else "
                    f"may write to it, but it belongs to user {found.st_uid} with mode {mode:04o}; "
                    f"write it anew after umask 077"
                )
            return opened.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    finally:
        own.unlink(missing_ok=True)


def leave_answer(run_dir: Path, answer: dict[str, Any]) -> None:
    """Put ``answer`` into ``run_dir``, over the one before; raises OSError."""
    path = run_dir / ANSWER_FILE
    new = path.with_name(f".{ANSWER_FILE}.{os.getpid()}.{threading.get_ident()}")
    new.write_text(json.dumps(answer) + "\n")
    new.replace(path)


def signed(text: str, number: int, secret: str) -> str:
    """The request ``text`` as the ``number``-th one of somebody who knows the secret."""
    return json.dumps({"request": text, "mac": _mac(text, number, secret)})


def opened(message: str, number: int, secret: str) -> str | None:
    """The text of a request; None where it is not of somebody who knows the secret."""
    try:
        read: Any = json.loads(message) if len(message) <= 2 * MOST_CHARS else None
        text, mac = str(read["request"]), str(read["mac"])
        # JSON can name halves of characters, which no text encodes: those are a ValueError too.
        known = hmac.compare_digest(mac.encode(), _mac(text, number, secret).encode())
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return text if known and len(text) <= MOST_CHARS else None


def _mac(text: str, number: int, secret: str) -> str:
    return hmac.new(secret.encode(), f"{number}:{text}".encode(), hashlib.sha256).hexdigest()
