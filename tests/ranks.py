"""Run a function, or a whole Megatron job, on several forked ranks of this machine.

The parent imports torch and Megatron once, with the CPU platform, and forks; a rank therefore
starts in milliseconds. Each rank is its own process group, its output goes to a file, and its
result or traceback comes back through a pipe. Whatever happens in the parent, also Ctrl-C, no rank
outlives the call; if the parent is killed, the kernel kills the ranks.

    def worker(rank: int, factor: int) -> int:
        torch.distributed.init_process_group("gloo")
        return rank * factor

    assert run_ranks(4, worker, 10) == [0, 10, 20, 30]
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import random
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dynatrain_megatron import platform
from dynatrain_megatron.elastic.store import StoreAddress, StoreServer

# A small Llama-shaped model: 4 layers, 4 heads, 2 query groups, padded vocabulary 1024, mock data.
# Layout flags and --bf16 are for the test to add; the CPU platform adds what a CPU needs.
TINY_LLAMA: list[str] = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "4"),
    *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"),
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000", "--num-workers", "0"),
]

# What a Megatron job imports, and much later than at its start: a rank would take seconds for it.
_PRELOADED = (
    "dynatrain_megatron.plugin.gpt_steps",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text",
    "megatron.training",
    "multiprocessing.managers",
    "torch._dynamo",
)

# How long the other ranks may take to end by themselves once one has failed.
_GRACE_S = 3.0
# How long a rank may take to write the stacks of its threads.
_DUMP_S = 1.0
_TAIL_LINES = 60
_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("<Q")


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not end; the message has tracebacks and output."""


@dataclass(frozen=True, slots=True)
class MegatronRun:
    """What a Megatron job left: the output of each rank, and the directory it ran in."""

    logs: list[str]
    run_dir: Path


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120,
    log_dir: Path | None = None,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world`` forked ranks; returns their results in rank order.

    Each rank has the environment variables that torchrun sets, one thread, and its output in
    ``log_dir``/rank<r>.log (a temporary directory by default). Results have to be picklable;
    ``fn`` and ``args`` need not be.

    Raises:
        RankFailure: if a rank raises, dies, or has not ended after ``timeout_s`` seconds.
    """
    with contextlib.ExitStack() as cleanup:
        if log_dir is None:
            log_dir = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
        log_dir.mkdir(parents=True, exist_ok=True)
        _import_hosts()
        ranks = _start(world, fn, args, log_dir)
        try:
            _collect(ranks, time.monotonic() + timeout_s)
            _raise_failures(ranks, timeout_s)
        finally:
            _kill(ranks)
    return [rank.result for rank in ranks]


def run_megatron(
    world: int,
    flags: Sequence[str],
    overrides: Sequence[str] | None,
    run_dir: Path,
    timeout_s: float = 300,
    inside: Callable[[], None] | None = None,
) -> MegatronRun:
    """Train with our own entry on ``world`` ranks; ``overrides`` None leaves --dynatrain out.

    ``inside`` runs on each rank before the entry does, to attach what a test wants to see.

    Raises:
        RankFailure: as :func:`run_ranks`; an exit code other than 0 is a failure too.
    """
    argv = list(flags)
    if overrides is not None:
        # Of all checks the one that sees most; what is given later counts.
        argv += ["--dynatrain", f"run_dir={run_dir}", "engine.verify=fingerprint", *overrides]

    def train(rank: int) -> None:
        from dynatrain_megatron.plugin import pretrain_gpt

        # Saving a checkpoint spawns a helper, which imports the main module: here the test runner
        # with all that it imports. It needs nothing of it.
        sys.modules["__main__"] = types.ModuleType("__main__")
        if inside is not None:
            inside()
        pretrain_gpt.main(argv)

    run_ranks(world, train, timeout_s=timeout_s, log_dir=run_dir)
    return MegatronRun([_log(run_dir, rank).read_text() for rank in range(world)], run_dir)


@contextlib.contextmanager
def store_apart() -> Iterator[StoreAddress]:
    """A store in a process of its own, for ranks that are forked inside.

    Whoever forks while a store's threads run in it may fork a lock that one of them holds.
    """
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            server = StoreServer("127.0.0.1")
            os.write(tell, str(server.address).encode())
            os.close(tell)
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    owner = os.getpid()
    try:
        with os.fdopen(told) as reader:
            address = StoreAddress.parse(reader.read())
        yield address
    finally:
        if os.getpid() == owner:  # and not a rank that leaves the block on its way to its end
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def alive(pid: int) -> bool:
    """Whether there is such a process, if only for its parent to ask how it ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(slots=True)
class _Rank:
    """A running rank as the parent sees it."""

    rank: int
    pid: int
    read_fd: int
    release_fd: int
    log: Path
    received: bytearray = field(default_factory=bytearray)
    done: bool = False
    result: Any = None
    failure: str | None = None
    ended_at: float = float("inf")

    def finish(self, result: Any, failure: str | None) -> None:
        """Note how the rank ended; the first note counts."""
        if not self.done:
            self.done, self.result, self.failure = True, result, failure
            self.ended_at = time.monotonic()


@functools.cache
def _import_hosts() -> None:
    """Import once what every rank needs, so that forked ranks share it."""
    with warnings.catch_warnings():
        # Megatron warns of each library that it does not find.
        warnings.simplefilter("ignore")
        platform.install("cpu")
        for module in _PRELOADED:
            importlib.import_module(module)
    import torch

    # A child that was forked from a parent with a thread pool hangs in its first parallel loop.
    torch.set_num_threads(1)
    # What was imported stays: keep the children's collector from copying its pages.
    gc.collect()
    gc.freeze()


def _start(world: int, fn: Callable[..., Any], args: Sequence[Any], log_dir: Path) -> list[_Rank]:
    port = _free_port()
    ranks: list[_Rank] = []
    sys.stdout.flush()
    sys.stderr.flush()
    # Garbage of the parent may hold threads, which a child does not have and cannot end.
    gc.freeze()
    try:
        for rank in range(world):
            read_fd, write_fd = os.pipe()
            wait_fd, release_fd = os.pipe()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                for other in (read_fd, release_fd, *_fds(ranks)):
                    os.close(other)
                _child(rank, world, port, fn, args, _log(log_dir, rank), write_fd, wait_fd, parent)
            os.close(write_fd)
            os.close(wait_fd)
            ranks.append(_Rank(rank, pid, read_fd, release_fd, _log(log_dir, rank)))
            # Both sides set the group, so that neither can be too early.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
    except BaseException:
        _kill(ranks)
        raise
    return ranks


def _child(
    rank: int,
    world: int,
    port: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    log: Path,
    write_fd: int,
    wait_fd: int,
    parent: int,
) -> NoReturn:
    """The life of a rank; never returns into the parent's code."""
    code = 1
    try:
        import torch

        torch.set_num_threads(1)
        os.setpgid(0, 0)
        _die_with(parent)
        _redirect_output(log)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        message = pickle.dumps(_outcome(fn, rank, args))
        sys.stdout.flush()
        _write_all(write_fd, _LENGTH.pack(len(message)) + message)
        if pickle.loads(message)[1] is None:
            # Others may still need this rank's sockets and store; the parent says when all are
            # done. A failed rank goes at once, which wakes those who wait for it.
            os.read(wait_fd, 1)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _outcome(fn: Callable[..., Any], rank: int, args: Sequence[Any]) -> tuple[Any, str | None]:
    try:
        result = fn(rank, *args)
        pickle.dumps(result)
        return result, None
    except SystemExit as error:
        if error.code in (None, 0):
            return None, None
        return None, f"exited with code {error.code}"
    except BaseException:
        text = traceback.format_exc()
        print(text, flush=True)
        return None, text


def _collect(ranks: list[_Rank], deadline: float) -> None:
    """Read results until all ranks are done, the deadline has passed, or a failure's grace has."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.read_fd, selectors.EVENT_READ, rank)
        while not all(rank.done for rank in ranks):
            until = min([deadline, *(r.ended_at + _GRACE_S for r in ranks if r.failure)])
            left = until - time.monotonic()
            if left <= 0:
                return
            for key, _ in selector.select(min(left, 0.5)):
                if _read(key.data):
                    selector.unregister(key.fd)
            for rank in ranks:
                if not rank.done and _has_died(rank):
                    # Its last words may have come between the two looks.
                    while not _read(rank):
                        continue


def _read(rank: _Rank) -> bool:
    """Take what the rank has written; True once it is done."""
    chunk = os.read(rank.read_fd, 1 << 20)
    rank.received += chunk
    if len(rank.received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(rank.received)
        if len(rank.received) >= _LENGTH.size + length:
            rank.finish(*pickle.loads(bytes(rank.received[_LENGTH.size :])))
    if not chunk and not rank.done:
        rank.finish(None, "died without a result")
    return rank.done


def _has_died(rank: _Rank) -> bool:
    return os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _raise_failures(ranks: list[_Rank], timeout_s: float) -> None:
    running = [rank for rank in ranks if not rank.done]
    failed = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.ended_at)
    if not running and not failed:
        return
    for rank in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    if running:
        time.sleep(_DUMP_S)
    parts: list[str] = []
    if not failed:
        names = ", ".join(str(rank.rank) for rank in running)
        parts.append(f"after {timeout_s:g} s these ranks were still running: {names}")
    same: dict[str | None, list[int]] = {}
    for rank in failed:
        same.setdefault(rank.failure, []).append(rank.rank)
    for failure, numbers in same.items():
        names = ", ".join(map(str, sorted(numbers)))
        parts.append(f"rank {names} of {len(ranks)} failed: {failure}")
    if failed and running:
        names = ", ".join(str(rank.rank) for rank in running)
        parts.append(f"ranks still running then: {names}")
    for rank in (failed[:1] or running) + (running if failed else []):
        parts.append(f"--- end of the output of rank {rank.rank} ---\n{_tail(rank.log)}")
    raise RankFailure("\n".join(parts))


def _kill(ranks: list[_Rank]) -> None:
    """End all ranks and everything they have started, and wait until they are gone."""
    for rank in ranks:
        # Ranks that are done end by themselves now; time is given to those only.
        os.close(rank.release_fd)
        os.close(rank.read_fd)
    for rank in ranks:
        if not (rank.done and rank.failure is None and _ends_within(rank, 2.0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        # What a rank has forked is in its process group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(rank.pid, 0)


def _ends_within(rank: _Rank, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not _has_died(rank):
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _redirect_output(log: Path) -> None:
    """Send this process's output to ``log``, also what C++ writes, and stacks on SIGUSR1."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    file = os.open(log, flags, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _fds(ranks: Sequence[_Rank]) -> Iterator[int]:
    for rank in ranks:
        yield rank.read_fd
        yield rank.release_fd


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _free_port() -> int:
    # Below the range from which the kernel gives ports to connections: between this look and the
    # start of the store, no other process gets it by chance.
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _log(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank{rank}.log"


def _tail(log: Path) -> str:
    if not log.exists():
        return "(none)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
