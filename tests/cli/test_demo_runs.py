"""Starting, following and ending the demo's jobs, with small programs in torchrun's place."""

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest

from dynatrain_megatron.cli import demo_runs
from dynatrain_megatron.cli.demo_data import TextDataset
from dynatrain_megatron.cli.demo_runs import Job, JobFailed, follow_steps, run_job
from dynatrain_megatron.config import split_argv
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe.report import Step
from tests.composed import config_of

LINE = '{"iteration": %d, "loss": 2.5, "grad_norm": null, "layout": "tp2"}\n'


def _job(directory: Path, program: str) -> Job:
    return Job("static", directory, (sys.executable, "-c", program, str(directory)))


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and only waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_steps_are_taken_once_and_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    steps = follow_steps(path)
    assert next(steps) == []
    path.write_text(LINE % 1 + (LINE % 2)[:20])
    assert next(steps) == [Step(1, 2.5, "tp2")]
    assert next(steps) == []
    path.write_text(LINE % 1 + LINE % 2 + LINE % 3)
    assert [step.iteration for step in next(steps)] == [2, 3]


def test_a_skipped_step_has_no_loss() -> None:
    step = demo_runs.parse_step({"iteration": 3, "loss": None, "layout": "tp2"})
    assert step.iteration == 3
    assert math.isnan(step.loss)


@pytest.mark.parametrize("folder", ["plain-1.run", "it's a, folder=[with] {all}"])
def test_the_command_says_what_was_planned(tmp_path: Path, folder: str) -> None:
    job = demo_runs.make_job(
        "switched",
        tmp_path / folder,
        dataset=TextDataset(tmp_path / "text", 1, 10),
        layout=ParallelLayout(tp=2, dp=2),
        iterations=10,
        schedule=[(3, ParallelLayout(pp=4)), (7, ParallelLayout(dp=4))],
    )
    flags, overrides = split_argv(job.command)
    assert overrides is not None
    config = config_of(overrides)
    assert config.run_dir == str(tmp_path / folder)
    assert [(step.iteration, step.layout_changes) for step in config.steps()] == [
        (3, {"tp": 1, "pp": 4}),
        (7, {"tp": 1, "pp": 1}),
    ]
    assert flags[flags.index("--nproc-per-node") + 1] == "4"
    assert flags[flags.index("--tensor-model-parallel-size") + 1] == "2"
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == "1"


def test_all_steps_of_a_job_arrive(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; file = pathlib.Path(sys.argv[1], 'steps.jsonl').open('w');"
        f"[file.write({LINE!r} % i) for i in range(1, 6)]"
    )
    seen: list[int] = []
    run_job(_job(tmp_path / "run", program), lambda step: seen.append(step.iteration))
    assert seen == [1, 2, 3, 4, 5]
    assert (tmp_path / "run" / "command.sh").read_text().startswith(sys.executable)


FAILING = """
import pathlib, sys
ranks = pathlib.Path(sys.argv[1], 'ranks', 'none_x', 'attempt_0')
for rank, text in enumerate(['fine', 'Traceback: rank 1 lost', 'Traceback: no disk left', 'fine']):
    (ranks / str(rank)).mkdir(parents=True)
    (ranks / str(rank) / 'stderr.log').write_text('first line\\n' * 30 + text + '\\n\\n')
print(%r)
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("report", "rank", "last"),
    [
        ("Root Cause (first observed failure):\n[0]:\n  rank      : 2 (local_rank: 2)", 2, "disk"),
        ("killed", 1, "rank 1 lost"),
    ],
)
def test_a_failure_shows_the_first_failing_ranks_last_lines(
    tmp_path: Path, report: str, rank: int, last: str
) -> None:
    with pytest.raises(JobFailed) as caught:
        run_job(_job(tmp_path / "run", FAILING % report), lambda step: None)
    told = str(caught.value)
    assert f"the static run ended with exit code 1; rank {rank} failed first" in told
    assert str(tmp_path / "run/ranks/none_x/attempt_0" / str(rank) / "stderr.log") in told
    shown = [line for line in told.splitlines() if line.startswith("    ")]
    assert len(shown) == demo_runs.TAIL_LINES
    assert last in shown[-1]


def test_a_failure_before_any_rank_shows_torchruns_words(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="no such module") as caught:
        run_job(_job(tmp_path / "run", "import sys; sys.exit('no such module')"), lambda step: None)
    assert "failed first" not in str(caught.value)
    assert str(tmp_path / "run" / "torchrun.log") in str(caught.value)


# A parent with a child of its own session, as torchrun and its ranks are; the child's id is told.
WITH_CHILD = """
import pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],
                         start_new_session=True)
def end(*_):
    if {polite}:
        child.terminate(); child.wait(); sys.exit(1)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1], 'child').write_text(str(child.pid))
pathlib.Path(sys.argv[1], 'steps.jsonl').write_text({line!r})
deadline = time.monotonic() + 60
while time.monotonic() < deadline: time.sleep(0.1)
"""


@pytest.mark.parametrize("polite", [True, False])
def test_an_interrupt_leaves_no_process_behind(
    tmp_path: Path, polite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_runs, "END_S", 20.0 if polite else 1.0)

    def interrupt(_step: Step) -> None:
        raise KeyboardInterrupt

    job = _job(tmp_path / "run", WITH_CHILD.format(polite=polite, line=LINE % 1))
    with pytest.raises(KeyboardInterrupt):
        run_job(job, interrupt)
    child = int((tmp_path / "run" / "child").read_text())
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)


def test_a_silent_job_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_runs, "SILENCE_LIMIT_S", 1.0)
    program = (
        "import os, pathlib, sys, time;"
        "pathlib.Path(sys.argv[1], 'pid').write_text(str(os.getpid())); time.sleep(60)"
    )
    with pytest.raises(JobFailed, match="the static run was silent for 1 s"):
        run_job(_job(tmp_path / "run", program), lambda step: None)
    assert not _alive(int((tmp_path / "run" / "pid").read_text()))


def test_the_users_thread_count_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    program = (
        "import json, os, pathlib, sys;"
        "pathlib.Path(sys.argv[1], 'env').write_text(json.dumps(dict(os.environ)))"
    )
    run_job(_job(tmp_path / "run", program), lambda step: None)
    environment = json.loads((tmp_path / "run" / "env").read_text())
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["HOME"] == os.environ["HOME"]
