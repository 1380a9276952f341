"""Jobs whose processes come and go, and somebody outside who drives them; for :mod:`elastic`.

Ranks of a job are forked from a process that has imported Megatron. Processes that join it are
forked as well (:meth:`Driver.let_start`), or start from nothing as a user's would
(:meth:`Driver.spawn`, which runs this file). Each process notes when its steps end, and how long
the plugin's hooks took in each.

    python elastic_job.py NOTES -- MEGATRON FLAGS… --dynatrain …
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 900.0
ENTRY = Path(__file__)
IN_STEPS = ("on_step_end", "on_training_log")
"""What the session does in every step."""


# ------------------------------------------------------------------------ in a process


class Notes:
    """What one process writes down: a line for each step's end, and when its start got how far."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"steps-{os.getpid()}.jsonl").open("w", buffering=1)
        self._stages = directory / f"stages-{os.getpid()}.json"
        self.stages = {"begun": time.time()}
        self._hooks_s = 0.0

    def attach(self) -> None:
        """Watch the session's methods that Megatron's hooks call; before the plugin is attached."""
        from dynatrain_megatron.plugin.session import Session

        def watched(name: str) -> None:
            real = getattr(Session, name)

            def handler(session: Any, original: Callable[..., Any], call: Any) -> Any:
                if name == "on_validate_args":
                    self.stage("parsed")
                inner = 0.0

                def timed(*args: Any, **kwargs: Any) -> Any:
                    nonlocal inner
                    begin = time.perf_counter()
                    try:
                        return original(*args, **kwargs)
                    finally:
                        inner += time.perf_counter() - begin

                timed.__wrapped__ = original  # type: ignore[attr-defined]
                begin = time.perf_counter()
                try:
                    return real(session, timed, call)
                finally:
                    self._hooks_s += time.perf_counter() - begin - inner
                    if name == "on_step_end" and session.job is not None:
                        self._step(session.job)

            setattr(Session, name, handler)

        for name in ("on_validate_args", *IN_STEPS):
            watched(name)

    def stage(self, name: str) -> None:
        """The start has got so far."""
        self.stages[name] = time.time()
        self._stages.write_text(json.dumps(self.stages))

    def _step(self, job: Any) -> None:
        if job.built is not None:
            line = {"iteration": job.iteration, "rank": job.args.rank, "at": time.time()}
            line |= {"hooks_s": self._hooks_s, "thread_s": _thread_seconds()}
            self._file.write(json.dumps(line) + "\n")
        self._hooks_s = 0.0


def _thread_seconds() -> float:
    """Seconds for which the plugin's own thread has been on a processor."""
    for thread in threading.enumerate():
        if thread.name == "dynatrain" and thread.native_id:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
                return int(text.split()[0]) / 1e9
    return 0.0


def train(argv: Sequence[str], notes: Notes) -> int:
    """One process's training, by the package's own entry; its exit code."""
    from dynatrain_megatron.plugin import pretrain_gpt

    notes.attach()
    try:
        pretrain_gpt.main(argv)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


# ------------------------------------------------------------------------ outside of the job


@dataclass(frozen=True)
class Setting:
    """How a job is run: Megatron's ``flags``, the plugin's ``overrides``, and where.

    ``start`` processes begin it, ``others`` are forked to join when they are told. ``cores`` are
    those of processes that start later, whatever they are; the job's first ones have the rest.
    """

    flags: Sequence[str]
    overrides: Sequence[str]
    directory: Path
    start: int
    others: int = 0
    cores: frozenset[int] = frozenset()

    def argv(self, store: object, *, joins: bool) -> list[str]:
        key = "join" if joins else "store"
        own = [f"run_dir={self.directory}", "platform=cpu", f"elastic.{key}={store}"]
        cache = ["--data-cache-path", str(self.directory / "cache")]
        return [*self.flags, *cache, "--dynatrain", *own, *self.overrides]


def run(setting: Setting, drive: Callable[[Driver], Any]) -> Any:
    """Run a job, and ``drive`` beside it in a process of its own, until that returns; its result.

    Where the job runs out of iterations ``drive`` has to see that itself.
    """
    from ranks import run_ranks

    from tests.ranks import store_apart

    last = setting.start + setting.others

    def process(number: int) -> Any:
        # What is outside waits mostly, and starts others, which have its cores.
        mine = setting.cores if number >= setting.start else _rest(setting.cores)
        os.sched_setaffinity(0, mine or os.sched_getaffinity(0))
        if number == last:
            with contextlib.closing(Driver(store, setting)) as driver:
                return drive(driver)
        client = store.connect(timeout_s=2 * TIMEOUT_S)
        client.set(f"bench/pid/{number}", str(os.getpid()))
        joins = number >= setting.start
        if joins:
            client.wait([f"bench/go/{number}"])
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="1")
        else:
            os.environ["WORLD_SIZE"] = str(setting.start)
        return train(setting.argv(store, joins=joins), Notes(setting.directory))

    with store_apart() as store:
        (result,) = run_ranks(last + 1, process, timeout_s=6 * TIMEOUT_S, wait_for=[last])
    return result


def _rest(cores: frozenset[int]) -> set[int]:
    return os.sched_getaffinity(0) - cores


class Driver:
    """Starts processes that join, asks for switches, and sees what comes of it."""

    def __init__(self, store: Any, setting: Setting) -> None:
        """Wait for the job to tell of itself."""
        from dynatrain_megatron.elastic.directory import Directory, JobCard
        from dynatrain_megatron.elastic.store import JobStore

        self.setting = setting
        self.spawned: list[subprocess.Popen[bytes]] = []
        self._store = store
        self._client = store.connect(timeout_s=TIMEOUT_S)
        card = JobCard.read(store, timeout_s=TIMEOUT_S)
        self.directory = Directory(JobStore(store, card.name, timeout_s=TIMEOUT_S))

    def close(self) -> None:
        """End what it started; the rest of the job stands still then, and is not heard of it."""
        for number in range(self.setting.start + self.setting.others):
            if self.spawned and self._client.check([f"bench/pid/{number}"]):
                self.signal([number], signal.SIGSTOP)
        for process in self.spawned:
            process.kill()
            process.wait()

    def let_start(self, *numbers: int) -> None:
        """Let forked processes begin to join."""
        for number in numbers:
            self._client.set(f"bench/go/{number}", "")

    def spawn(self, count: int) -> None:
        """Start so many processes that join, from nothing."""
        log = (self.setting.directory / "joiners.log").open("ab")
        argv = self.setting.argv(self._store, joins=True)
        command = [sys.executable, str(ENTRY), str(self.setting.directory), "--", *argv]
        own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for _ in range(count):
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own})
            self.spawned.append(process)

    def signal(self, numbers: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to forked processes."""
        for process in numbers:
            os.kill(int(self._client.get(f"bench/pid/{process}")), number)

    def wait_until(self, what: str, is_so: Callable[[], Any]) -> None:
        """Look again and again."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not happen within {TIMEOUT_S:g} s")
            time.sleep(0.05)

    def wait_for_arrivals(self, count: int) -> None:
        """Until so many processes have come to wait for the job, those gone since included."""
        self.wait_until(f"{count} arrivals", lambda: len(self.directory.arrivals(0)) >= count)

    def wait_for_steps(self, count: int) -> None:
        """Until the job has done so many steps more."""
        begin = self.iteration
        self.wait_until(f"{count} steps", lambda: self.iteration >= begin + count)

    @property
    def iteration(self) -> int:
        paths = self.setting.directory.glob("steps-*.jsonl")
        return max((int(line["iteration"]) for path in paths for line in _lines(path)), default=0)

    def events(self) -> list[dict[str, Any]]:
        """What the job has told so far."""
        return events_of(self.setting.directory)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Ask for a switch; its event, once steps have been made after it."""
        from dynatrain_megatron.elastic.control import JobFile

        before = len(self.events())
        number = self.directory.ask(request, JobFile.read(self.setting.directory).secret)
        answer: dict[str, Any] = {}

        def is_answered() -> bool:
            answer.update(self.directory.answer_of(number) or {})
            return answer.get("state", "announced") != "announced"

        self.wait_until(f"an answer to {request}", is_answered)
        if answer["state"] != "done":
            raise RuntimeError(f"{request} was answered {answer}")
        self.wait_for_steps(4)  # what an ordinary one takes is known then
        return self.events()[before]


def steps_of(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The steps as this rank, whichever process that was, noted them; in order."""
    lines = [line for path in directory.glob("steps-*.jsonl") for line in _lines(path)]
    return sorted((line for line in lines if line["rank"] == rank), key=lambda line: line["at"])


def stages_of(directory: Path, pids: Sequence[int]) -> list[dict[str, float]]:
    """When these processes got how far in starting."""
    return [json.loads((directory / f"stages-{pid}.json").read_text()) for pid in pids]


def events_of(directory: Path) -> list[dict[str, Any]]:
    """The switches of a job."""
    return [event for event in _lines(directory / "events.jsonl") if event["event"] == "switch"]


def losses_of(directory: Path) -> list[dict[str, Any]]:
    """The records of ``steps.jsonl``."""
    return list(_lines(directory / "steps.jsonl"))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may still be in the making
                yield json.loads(line)


def main() -> int:
    """A process that joins, from nothing."""
    notes = Notes(Path(sys.argv[1]))
    return train(sys.argv[sys.argv.index("--") + 1 :], notes)


if __name__ == "__main__":
    sys.exit(main())
