"""Starting the demo's training jobs: the command line, the ranks, their progress, their end.

A job is an ordinary torchrun of the package's entry point, exactly what a user would type; the
command is kept in the run's folder. All output of the ranks goes to files there, and progress is
read from steps.jsonl, which the job's last rank writes.
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynatrain_megatron.cli.demo_data import END_OF_DOCUMENT, VOCAB_SIZE, TextDataset
from dynatrain_megatron.errors import DynaTrainError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe.report import Step

ENTRY = "dynatrain_megatron.plugin.pretrain_gpt"
POLL_S = 0.2
SILENCE_LIMIT_S = 420.0
"""A job that neither logs nor trains for this long is ended. Longer than its own group timeout,
so that Megatron reports a stuck collective itself."""
END_S = 45.0
"""What torchrun gets to end its ranks; it waits 30 s before it kills them."""
TAIL_LINES = 20

# A Llama-shaped model that steps in well under a second on two cores: RMSNorm, SwiGLU, rotary
# positions, fewer key-value groups than heads (and than TP4), separate input and output embeddings.
MODEL_FLAGS = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4"
    " --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu"
    " --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear"
    " --attention-dropout 0 --hidden-dropout 0 --seq-length 128 --max-position-embeddings 128"
).split()
TRAINING_FLAGS = (
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine"
    " --lr-warmup-iters 2 --weight-decay 0.01 --clip-grad 1.0 --seed 1234"
    " --use-distributed-optimizer --distributed-timeout-minutes 5"
    " --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0 --split 100,0,0"
).split()


@dataclass(frozen=True, slots=True)
class Job:
    """A training job of the demo: its short name, its folder and its torchrun command."""

    name: str
    directory: Path
    command: tuple[str, ...]


class JobFailed(DynaTrainError):
    """A training job ended with an error; the message shows the failing rank's last lines."""


def make_job(
    name: str,
    directory: Path,
    *,
    dataset: TextDataset,
    layout: ParallelLayout,
    iterations: int,
    schedule: Sequence[tuple[int, ParallelLayout]] = (),
) -> Job:
    """The job that trains for `iterations` from `layout` and switches as `schedule` says.

    An empty schedule is the never-switched job; both write steps.jsonl into `directory`.
    """
    steps = ", ".join(
        f"{{iteration: {iteration}, layout: {{tp: {target.tp}, pp: {target.pp}}}}}"
        for iteration, target in schedule
    )
    overrides = [f"run_dir={_hydra_text(str(directory))}", "platform=cpu", f"schedule=[{steps}]"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(layout.world)]
    torchrun += ["--redirects", "3", "--log-dir", str(directory / "ranks")]
    flags = ["--tensor-model-parallel-size", str(layout.tp)]
    flags += ["--pipeline-model-parallel-size", str(layout.pp)]
    flags += ["--train-iters", str(iterations), "--lr-decay-iters", str(iterations)]
    flags += ["--data-path", str(dataset.prefix)]
    flags += ["--data-cache-path", str(dataset.prefix.parent / "cache")]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]
    flags += ["--null-tokenizer-eod-id", str(END_OF_DOCUMENT)]
    flags += ["--make-vocab-size-divisible-by", "64"]
    command = [*torchrun, "-m", ENTRY, *MODEL_FLAGS, *TRAINING_FLAGS, *flags]
    return Job(name, directory, (*command, "--dynatrain", *overrides))


def _hydra_text(text: str) -> str:
    """`text` as Hydra's grammar takes it: plain where nothing in it has a meaning there."""
    if re.fullmatch(r"[\w./+-]+", text):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def run_job(job: Job, on_step: Callable[[Step], None]) -> None:
    """Run `job` to its end in an empty folder, handing over each training step as it is logged.

    Raises JobFailed when a rank fails or nothing happens for SILENCE_LIMIT_S. Whatever ends this
    function, KeyboardInterrupt included, no rank is left running.
    """
    job.directory.mkdir(parents=True)
    (job.directory / "command.sh").write_text(shlex.join(job.command) + "\n")
    steps = follow_steps(job.directory / "steps.jsonl")
    with (job.directory / "torchrun.log").open("wb") as log:
        # Its own session: Ctrl-C reaches only us, and we end the ranks in order.
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
    try:
        _watch(process, job, steps, on_step)
    finally:
        _end(process)
    if process.returncode != 0:
        raise JobFailed(_describe_failure(job, f"ended with exit code {process.returncode}"))


def follow_steps(path: Path) -> Iterator[list[Step]]:
    """Yield, each time it is asked, the steps that were added to `path` since the last time.

    A line is taken once its end is written; a file that is not there yet has no steps.
    """
    offset = 0
    while True:
        data = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        offset += len(whole)
        yield [parse_step(json.loads(line)) for line in whole.splitlines() if line.strip()]


def parse_step(record: Mapping[str, Any]) -> Step:
    """A line of steps.jsonl as a Step; a step that Megatron skipped has no loss, here NaN."""
    loss = math.nan if record["loss"] is None else float(record["loss"])
    return Step(int(record["iteration"]), loss, record["layout"])


def _environment() -> dict[str, str]:
    """The ranks' environment: unbuffered logs, and threads that fit the machine."""
    threads = max(1, (os.cpu_count() or 1) // 4)
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}


def _watch(
    process: subprocess.Popen[bytes],
    job: Job,
    steps: Iterator[list[Step]],
    on_step: Callable[[Step], None],
) -> None:
    last_size = -1
    last_change = time.monotonic()
    while True:
        ended = process.poll() is not None
        for step in next(steps):
            on_step(step)
        if ended:
            return
        size = sum(file.stat().st_size for file in job.directory.rglob("*") if file.is_file())
        if size != last_size:
            last_size, last_change = size, time.monotonic()
        elif time.monotonic() - last_change > SILENCE_LIMIT_S:
            _end(process)
            raise JobFailed(_describe_failure(job, f"was silent for {SILENCE_LIMIT_S:.0f} s"))
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks; by force where it takes too long or we are pressed."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for pid in (*_descendants(process.pid), process.pid):
            _kill(pid)
        process.wait()


def _descendants(pid: int) -> list[int]:
    """All processes below `pid`, where the system lists them in /proc."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [*_descendants(child), child]
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


# ---------------------------------------------------------------- what went wrong


def _describe_failure(job: Job, what: str) -> str:
    torchrun_log = job.directory / "torchrun.log"
    rank, log = failing_rank(job.directory)
    shown = log if log is not None else torchrun_log
    who = "" if rank is None else f"; rank {rank} failed first"
    lines = "\n".join(f"    {line}" for line in tail(shown, TAIL_LINES))
    return (
        f"the {job.name} run {what}{who}. The last lines of {shown}:\n{lines}\n"
        f"torchrun's own log: {torchrun_log}\nthe command: {job.directory / 'command.sh'}"
    )


def failing_rank(directory: Path) -> tuple[int | None, Path | None]:
    """The rank that torchrun names as the first to fail, and its log; None where it names none.

    Without torchrun's word it is the rank with a traceback whose log was written first.
    """
    report = (directory / "torchrun.log").read_text(errors="replace")
    logs = {
        int(path.parent.name): path for path in directory.glob("ranks/*/attempt_0/*/stderr.log")
    }
    named = re.search(r"Root Cause.*?rank\s*:\s*(\d+)", report, re.DOTALL)
    if named is not None and int(named[1]) in logs:
        return int(named[1]), logs[int(named[1])]
    broken = [
        (path.stat().st_mtime, rank)
        for rank, path in logs.items()
        if "Traceback" in path.read_text(errors="replace")
    ]
    if broken:
        rank = min(broken)[1]
        return rank, logs[rank]
    return None, None


def tail(path: Path, num_lines: int) -> Iterable[str]:
    """The last lines of a text file that are not empty."""
    with path.open(errors="replace") as file:
        return deque((line.rstrip() for line in file if line.strip()), maxlen=num_lines)
