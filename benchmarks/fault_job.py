"""One Megatron job of two forked ranks in which switches fail on purpose, and what is seen of it.

Ranks end as processes of a real job do, by an exception or a signal, with the interpreter's own
clean-up. Where one hangs or is stopped for good, it is killed once all others have ended, as a
launcher would; until then, and only then, what they do is theirs.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_cases import RANKS, Case, Outcome

from dynatrain_megatron.faults import Kind

ENGINE_S, ELASTIC_S, SILENT_S = 8.0, 4.0, 3.0
SLACK_S = 15.0
"""On top of all time limits: ranks share two cores with each other and with those of other jobs."""

SLOW_S = 0.5
_MOST_S = 900.0  # for a job of many cases
_PR_SET_PDEATHSIG = 1
_FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention"
    " --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
    " --global-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 200"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 200 --normalization RMSNorm --swiglu"
    " --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights"
    " --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer --log-interval 1"
    " --eval-iters 0 --eval-interval 1000 --num-workers 0"
)


class RankEnded(BaseException):
    """Brings a forked rank to the end of the program, through no code that is not its own."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of one case, in the words of a table's row; ``problems`` is empty if all is well.

    ``seconds`` is from the fault until the last rank that could had its outcome; ``ended`` is when
    the one that hangs had ended by itself. ``told`` is what the error of each of the others says.
    """

    outcome: Outcome | None
    seconds: float | None
    problems: list[str]
    told: list[str]
    ended: float | None = None


def lasting(cases: Sequence[Case], store: str, folder: Path) -> list[Seen]:
    """Cases of one promise, after which the job goes on: in one job, a step between two.

    Those that commit compare the whole state; those that do not are found out by what is default.
    """
    commits = cases[0].promised is Outcome.commits
    layouts = ["dp2" if commits and n % 2 else "pp2" for n in range(len(cases))]
    steps = [f"{{iteration: {n + 1}, layout: {to}}}" for n, to in enumerate(layouts)]
    iterations = ["--train-iters", str(len(cases) + 2)]
    static = _run(iterations, (), (), store, folder / "static")
    waits = ["engine.timeout_s=60", "elastic.timeout_s=60"]
    waits += [f"engine.verify={'fingerprint' if commits else 'messages'}"]
    waits += [f"engine.keep_source={cases[0].keep}", f"schedule=[{', '.join(steps)}]"]
    codes = _run(iterations, waits, cases, store, folder / "run")
    broken = [] if static == codes == [0, 0] else [f"exit codes {static} and {codes}, not 0"]
    broken += _other_losses(folder, tolerance=1e-6 if commits else 0.0)
    found = _lines(folder / "run")
    return [
        _lasting_case(case, number, [f for f in found if f["case"] == number], broken)
        for number, case in enumerate(cases)
    ]


def ending(case: Case, store: str, folder: Path) -> Seen:
    """A case after which the job ends."""
    patience = ENGINE_S if case.kind is not Kind.stop else 60.0  # which signs of life have to tell
    waits = [f"engine.timeout_s={patience}", f"elastic.timeout_s={ELASTIC_S}"]
    waits += [f"engine.keep_source={case.keep}", "engine.verify=messages"]
    waits += ["schedule=[{iteration: 2, layout: pp2}]"]
    most_s = ENGINE_S + ELASTIC_S + SLACK_S
    flags = ["--train-iters", "4"]
    codes, ends, pids = _run_until_others_end(flags, waits, case, store, folder, most_s)
    at = next(iter(_faults(folder)), None)
    if at is None:
        return Seen(None, None, ["the fault did not happen"], _tails(folder))
    lost = case.kind in (Kind.kill, Kind.hang, Kind.stop)
    others = [rank for rank in RANKS if rank != case.rank or not lost]
    late = [rank for rank in others if ends[rank] is None]
    if late:
        why = f"rank {late[0]} had not ended {most_s:g} s after the fault"
        return Seen(None, None, [why], _tails(folder))
    told = [_error(folder, rank) for rank in others]
    problems = []
    for rank, text in zip(others, told, strict=True):
        if codes[rank] != 1:
            problems.append(f"rank {rank} ended with code {codes[rank]}")
        for what in (f":{pids[case.rank]}:", f"phase {case.phase}"):
            if what not in text and not (rank == case.rank and what.startswith(":")):
                problems.append(f"rank {rank} does not tell of {what}")
    steps = [line["iteration"] for line in _json(folder / "steps.jsonl")]
    if steps != [1, 2]:
        problems.append(f"steps were {steps}, not 1 and 2")
    ended = ends[case.rank] if case.kind is Kind.hang else None
    if case.kind is Kind.hang:
        says = f"it hangs, last heard of in phase {case.phase}"
        if ended is None or says not in _log(folder, case.rank).read_text(errors="replace"):
            problems.append("the rank that hangs did not end, or does not say where it hangs")
    return Seen(
        Outcome.ends,
        max(end for rank in others if (end := ends[rank]) is not None) - at,
        problems,
        told,
        None if ended is None else ended - at,
    )


# ----------------------------------------------------------------------- what was seen


def _lasting_case(case: Case, number: int, found: list[dict[str, Any]], broken: list[str]) -> Seen:
    outcomes = {each["outcome"] for each in found}
    if len(found) != len(RANKS) or len(outcomes) != 1:
        return Seen(None, None, [f"case {number} has {found}", *broken], [])
    problems = list(broken)
    outcome = Outcome(outcomes.pop())
    if outcome is Outcome.goes_on:
        problems += [
            f"rank {each['rank']}: state is other than before"
            for each in found
            if each["before"] != each["after"] or each["layouts"][0] != each["layouts"][1]
        ]
        told = [each["told"] for each in found]
        if case.kind in (Kind.exception, Kind.oom):
            what = f"rank {case.rank}: injected {case.kind} in phase {case.phase}"
            problems += [f"not told: {what}" for text in told if what not in text]
    at = next((each["fault_at"] for each in found if each["fault_at"]), None)
    if at is None:
        return Seen(outcome, None, [*problems, "the fault did not happen"], [])
    return Seen(outcome, max(each["at"] for each in found) - at, problems, [])


def _other_losses(folder: Path, tolerance: float) -> list[str]:
    """Where losses are not those of the run without switches."""
    run, static = (_json(folder / name / "steps.jsonl") for name in ("run", "static"))
    if [a["iteration"] for a in run] != [b["iteration"] for b in static]:
        return ["other iterations than without switches"]
    for number, (a, b) in enumerate(zip(run, static, strict=True)):
        if abs(a["loss"] - b["loss"]) > tolerance * b["loss"]:
            return [f"loss of step {number + 1} is {a['loss']}, not {b['loss']}"]
    return []


def _error(folder: Path, rank: int) -> str:
    """The error that a rank ended with, as its traceback ends; empty if there was none."""
    lines = _log(folder, rank).read_text(errors="replace").splitlines()
    ours = [line for line in lines if line.startswith("dynatrain_megatron.errors.")]
    return ours[-1] if ours else ""


def _tails(folder: Path) -> list[str]:
    return [_log(folder, rank).read_text(errors="replace")[-2000:] for rank in RANKS]


def _faults(folder: Path) -> list[float]:
    return [line["at"] for line in _json(folder / "faults.jsonl")]


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [line for rank in RANKS for line in _json(folder / f"cases-{rank}.jsonl")]


def _json(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


# ----------------------------------------------------------------------- in a rank


def _note_and_arm(cases: Sequence[Case], rank: int, folder: Path) -> None:
    """Arm a case before each switch; what comes of it goes to a file."""
    from dynatrain_megatron import faults
    from dynatrain_megatron.errors import SwitchAborted, SwitchRefused
    from dynatrain_megatron.plugin import membership, session
    from dynatrain_megatron.transition import attempt

    happened: list[float] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            happened.append(record.created)
            with (folder / "faults.jsonl").open("a") as file:
                file.write(json.dumps({"at": record.created, "rank": rank}) + "\n")

    logging.getLogger(faults.__name__).addHandler(Noted())
    if cases[0].promised is Outcome.ends:
        membership.SILENT_S = attempt.SILENT_S = SILENT_S
    real, numbers = session.switch, itertools.count()

    def switch(job: Any, *rest: Any) -> Any:
        number = next(numbers)
        case = cases[number]
        faults.arm([faults.Fault((case.rank,), case.phase, case.kind, case.at, SLOW_S)])
        happened.clear()
        before, source = _digest(job), str(job.layout)
        outcome, told = Outcome.commits, ""
        try:
            return real(job, *rest)
        except (SwitchRefused, SwitchAborted) as error:
            outcome, told = Outcome.goes_on, str(error)
            raise
        except BaseException as error:
            outcome, told = Outcome.ends, str(error)
            raise
        finally:
            line = {
                "case": number,
                "rank": rank,
                "outcome": outcome,
                "told": told,
                "at": time.time(),
                "fault_at": happened[0] if happened else None,
                "before": before,
                "after": "" if outcome is Outcome.ends else _digest(job),
                "layouts": [source, str(job.layout)],
            }
            with (folder / f"cases-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    session.switch = switch


def _digest(job: Any) -> str:
    """Of all that a step depends on: parameters, optimizer, random streams, position."""
    import torch

    from dynatrain_megatron.adapters.state import HostState

    digest = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    for chunk in job.model:
        for tensor in (*chunk.parameters(), *chunk.module.buffers()):
            add(tensor)
    for shard in HostState(job.model, job.optimizer, job.args).shards():
        for tensor in shard.states.values():
            add(tensor)
        step = shard.inner.state[shard.key].get("step")
        digest.update(str(None if step is None else float(step)).encode())
    add(torch.get_rng_state())
    position = job.iteration, job.args.consumed_train_samples, job.scheduler.num_steps
    digest.update(str(position).encode())
    return digest.hexdigest()


def _train(
    rank: int,
    port: int,
    flags: Sequence[str],
    overrides: Sequence[str],
    cases: Sequence[Case],
    store: str,
    folder: Path,
) -> int:
    """The life of a rank, in its own process; its exit code."""
    try:
        _settle(rank, port, folder)
        argv = [*_FLAGS.split(), *flags, "--data-cache-path", str(folder / "cache"), "--dynatrain"]
        argv += [f"run_dir={folder}", f"elastic.store={store}", *overrides]
        from dynatrain_megatron.plugin import pretrain_gpt

        sys.modules["__main__"] = types.ModuleType("__main__")
        if cases:
            _note_and_arm(cases, rank, folder)
        pretrain_gpt.main(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def die_with_parent() -> None:
    """No process of a job outlives the one that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _settle(rank: int, port: int, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    die_with_parent()
    file = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(RANKS)),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(len(RANKS)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


# ----------------------------------------------------------------------- ranks as processes


def _start(
    flags: Sequence[str],
    overrides: Sequence[str],
    cases: Sequence[Case],
    store: str,
    folder: Path,
) -> list[int]:
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    pids = []
    sys.stdout.flush()
    for rank in RANKS:
        pid = os.fork()
        if pid == 0:
            raise RankEnded(_train(rank, port, flags, overrides, cases, store, folder))
        pids.append(pid)
    return pids


def _run(
    flags: Sequence[str],
    overrides: Sequence[str],
    cases: Sequence[Case],
    store: str,
    folder: Path,
) -> list[int]:
    """A job that is to end by itself; exit codes."""
    pids = _start(flags, overrides, cases, store, folder)
    codes, _ = _wait(pids, time.time() + _MOST_S, lambda _: False)
    return codes


def _run_until_others_end(
    flags: Sequence[str],
    overrides: Sequence[str],
    case: Case,
    store: str,
    folder: Path,
    most_s: float,
) -> tuple[list[int], list[float | None], list[int]]:
    """Exit codes, when each rank ended by itself, and process ids.

    A rank that was made to hang is given time to end too, one that was stopped is not.
    """
    pids = _start(flags, overrides, [case], store, folder)

    def is_over(ends: list[float | None]) -> bool:
        happened = _faults(folder)
        if happened and time.time() > happened[0] + most_s:
            return True
        others = [ends[rank] for rank in RANKS if rank != case.rank]
        return case.kind is Kind.stop and None not in others

    codes, ends = _wait(pids, time.time() + 120.0, is_over)
    return codes, ends, pids


def _wait(
    pids: Sequence[int], deadline: float, is_over: Callable[[list[float | None]], bool]
) -> tuple[list[int], list[float | None]]:
    """Until all have ended, or it is over for the rest, which are killed."""
    codes: list[int | None] = [None] * len(pids)
    ends: list[float | None] = [None] * len(pids)
    try:
        while None in codes and time.time() < deadline and not is_over(ends):
            for rank, pid in enumerate(pids):
                if codes[rank] is None:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        codes[rank], ends[rank] = os.waitstatus_to_exitcode(status), time.time()
            time.sleep(0.02)
    finally:
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                os.kill(pid, signal.SIGKILL)
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [code for code in codes if code is not None], ends
