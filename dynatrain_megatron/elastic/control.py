"""How somebody outside a job asks something of it: through its store, with the job's secret.

A running job leaves a file in its run directory that only its owner may read: where its store is,
what it is called there, and a secret. Requests carry an HMAC of their text and number made with
that secret, so that whoever can reach the store and not the file asks in vain, and no request can
be made from another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynatrain_megatron.elastic.store import StoreAddress
from dynatrain_megatron.errors import ConfigError

JOB_FILE = "job.json"
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
