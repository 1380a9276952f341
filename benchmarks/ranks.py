"""Forked ranks of this host for benchmarks: each runs a function and hands back what it returns.

Megatron is imported once, with the CPU platform, before the fork, so that a rank starts in
milliseconds. What ranks print goes to files; the end of one is shown where a rank fails.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import queue
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynatrain_megatron import platform

_PRELOADED = ("dynatrain_megatron.plugin.gpt_steps", "megatron.training", "torch._dynamo")
_TAIL_LINES = 25
_PR_SET_PDEATHSIG = 1


def run_ranks[Result](
    world: int, work: Callable[[int], Result], *, timeout_s: float, wait_for: Sequence[int] = ()
) -> list[Result]:
    """``work(rank)`` on so many ranks with torchrun's environment variables; results by rank.

    With ``wait_for`` only the results of these ranks are waited for, and returned. Raises
    ``RuntimeError`` with the first traceback where a rank fails, dies or takes longer than
    ``timeout_s``. No rank outlives the call.
    """
    import_hosts()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world)]
        ranks = [
            context.Process(target=_life, args=(r, world, port, work, logs[r], results))
            for r in range(world)
        ]
        sys.stdout.flush()
        for process in ranks:
            process.start()
        try:
            deadline = time.monotonic() + timeout_s
            return _collect(ranks, wait_for or range(world), results, logs, deadline)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def import_hosts() -> None:
    """Import once, before any fork, what every rank needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of each library that it does not find
        platform.install("cpu")
        for module in _PRELOADED:
            importlib.import_module(module)
    import torch

    torch.set_num_threads(1)  # a child of a parent with a thread pool hangs in its first loop
    gc.collect()
    gc.freeze()


def _life(
    rank: int, world: int, port: int, work: Callable[[int], Any], log: Path, results: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        results.put((rank, work(rank), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    time.sleep(3600)  # the parent ends all together: until then others may need this rank's sockets


def _collect(
    ranks: list[Any], wanted: Sequence[int], results: Any, logs: list[Path], deadline: float
) -> list[Any]:
    found: dict[int, Any] = {}
    while not found.keys() >= set(wanted):
        try:
            rank, result, failure = results.get(timeout=1.0)
        except queue.Empty:
            dead = [r for r, process in enumerate(ranks) if not process.is_alive()]
            if not dead and time.monotonic() < deadline:
                continue
            rank = dead[0] if dead else next(r for r in range(len(ranks)) if r not in found)
            failure = "it died" if dead else "it took too long"
        if failure is not None:
            raise RuntimeError(f"rank {rank}: {failure}\n{_tail(logs[rank])}")
        found[rank] = result
    return [found[rank] for rank in wanted]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-_TAIL_LINES:])
