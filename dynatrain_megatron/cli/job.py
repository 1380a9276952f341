"""How commands find the job they are about; no command itself."""

import argparse
import functools
import os
import time
from pathlib import Path
from typing import Any

from dynatrain_megatron.elastic.beats import Beats
from dynatrain_megatron.elastic.control import JobFile
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.endpoint import asked
from dynatrain_megatron.elastic.store import JobStore, StoreAddress
from dynatrain_megatron.errors import ConfigError, WorldError

_CONNECT_S = 10.0
_SAYS_WITHIN_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which job is meant."""
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the job's run directory (dynatrain-run)"
    )
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="instead: the job's store")
    parser.add_argument("--json", action="store_true", help="print answers as JSON lines")


class RunningJob:
    """A job that is asked from outside: through the socket in its run directory as long as somebody
    listens there, else through its store. It does not matter which: numbers are the same.
    """

    def __init__(self, run_dir: Path | None, file: JobFile | None = None) -> None:
        """``file`` says where its store is, and is that of ``run_dir`` unless given."""
        self._run_dir = run_dir
        self._has_socket = run_dir is not None
        self._file = file

    def status(self) -> dict[str, Any] | None:
        """What the job says that it is doing; None where the store knows nothing of it.

        This and all others raise ConfigError where there is no job, or WorldError where nobody
        answers.
        """
        if (reply := self._through_socket({"status": None})) is not None:
            found: dict[str, Any] = reply["status"]
            return found
        return self._directory.status()

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self._through_socket({"status": None}) is None and self._directory.has_ended

    def ask(self, request: dict[str, Any]) -> int:
        """Ask something of it; returns the answer's number."""
        if (reply := self._through_socket({"ask": request})) is not None:
            return int(reply["number"])
        directory = self._directory
        assert self._file is not None
        return directory.ask(request, self._file.secret)

    def answer_of(self, number: int) -> dict[str, Any] | None:
        """What became of a request so far."""
        if (reply := self._through_socket({"answer": number})) is not None:
            answer: dict[str, Any] | None = reply["answer"]
            return answer
        return self._directory.answer_of(number)

    def seems_dead(self, members: tuple[str, ...], seconds: float) -> bool:
        """Whether none of these processes of it has given a sign of life for so long."""
        if not members or self._through_socket({"status": None}) is not None:
            return False
        return len(self._beats.silent(members, seconds)) == len(members)

    def _through_socket(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if not self._has_socket:
            return None
        assert self._run_dir is not None
        try:
            reply = asked(self._run_dir, message)
        except (ConfigError, WorldError):
            if "ask" in message:  # it may have been heard
                raise
            reply = None
        self._has_socket = reply is not None  # who listened has gone, or its rank has
        return reply

    @functools.cached_property
    def _directory(self) -> Directory:
        if self._file is None:
            assert self._run_dir is not None
            self._file = JobFile.read(self._run_dir)
        address = StoreAddress.parse(self._file.store)
        return Directory(JobStore(address, self._file.job, timeout_s=_CONNECT_S))

    @functools.cached_property
    def _beats(self) -> Beats:
        return Beats(self._directory)


def find(args: argparse.Namespace) -> RunningJob:
    """The job that is meant, which answers.

    Raises ConfigError where there is none, or WorldError where nobody answers.
    """
    if args.endpoint is None:
        found = RunningJob(args.run_dir or Path("dynatrain-run"))
    else:
        if args.run_dir is not None:
            raise ConfigError("--run-dir and --endpoint exclude each other")
        names = ("DYNATRAIN_JOB", "DYNATRAIN_SECRET")
        job, secret = (os.environ.get(name, "") for name in names)
        if not job or not secret:
            raise ConfigError(
                f"--endpoint needs {' and '.join(names)} in the environment: job and secret of "
                "job.json in the job's run directory"
            )
        found = RunningJob(None, JobFile(args.endpoint, job, secret))
    found.status()  # so that a store that is gone is said before anything is asked
    return found


def status_of(job: RunningJob) -> dict[str, Any]:
    """What the job said last. Raises ConfigError where it says nothing within a few seconds."""
    deadline = time.monotonic() + _SAYS_WITHIN_S
    while (status := job.status()) is None:
        if time.monotonic() > deadline:
            raise ConfigError(
                "the store knows no such job: job.json, or DYNATRAIN_JOB, is of one that has gone, "
                "or has not begun to train"
            )
        time.sleep(0.1)
    return status
