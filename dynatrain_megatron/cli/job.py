"""How commands find the job they are about; no command itself."""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

from dynatrain_megatron.elastic.control import JobFile
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.store import JobStore, StoreAddress
from dynatrain_megatron.errors import ConfigError

_CONNECT_S = 10.0
_SAYS_WITHIN_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which job is meant."""
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the job's run directory (dynatrain-run)"
    )
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="instead: the job's store")
    parser.add_argument("--json", action="store_true", help="print answers as JSON lines")


def find(args: argparse.Namespace) -> tuple[Directory, str]:
    """The job's lists and its secret. Raises ConfigError, or WorldError where nobody answers."""
    if args.endpoint is None:
        file = JobFile.read(args.run_dir or Path("dynatrain-run"))
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
        file = JobFile(args.endpoint, job, secret)
    address = StoreAddress.parse(file.store)
    directory = Directory(JobStore(address, file.job, timeout_s=_CONNECT_S))
    directory.status()  # so that a store that is gone is said before anything is asked
    return directory, file.secret


def status_of(directory: Directory) -> dict[str, Any]:
    """What the job said last. Raises ConfigError where it says nothing within a few seconds."""
    deadline = time.monotonic() + _SAYS_WITHIN_S
    while (status := directory.status()) is None:
        if time.monotonic() > deadline:
            raise ConfigError(
                "the store knows no such job: job.json, or DYNATRAIN_JOB, is of one that has gone, "
                "or has not begun to train"
            )
        time.sleep(0.1)
    return status


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
