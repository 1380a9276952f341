"""A job on two emulated hosts, each with a torchrun of its own, behind links of 25 MB/s."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.elastic.control import JobFile
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.store import JobStore, StoreAddress
from tests.host import around
from tests.hosts.emulated import Host, Network
from tests.hosts.events import across
from tests.ranks import TINY_LLAMA, run_megatron

ROOT = Path(__file__).parents[2]
MEGABITS = 200
TIMEOUT_S = 100.0
FLAGS = [
    *TINY_LLAMA,
    *("--global-batch-size", "12", "--train-iters", "4000"),
    *("--lr-decay-iters", "40"),
]
RECIPES = dict(
    re.findall(
        r"```bash recipe=(\w+)\n(.*?)\n```",
        (ROOT / "docs" / "elastic.md").read_text(),
        re.DOTALL,
    )
)
"""What the page tells users to run."""
TOPOLOGY = "speeds: {far_gb_s: 0.025}\n"
"""What the user knows of the link, and no machine tells."""


@dataclass
class Launched:
    """A torchrun on a host, and what it said."""

    process: subprocess.Popen[str]
    log: Path

    def said(self) -> str:
        return self.log.read_text()


class Jobs:
    """Starts what a user would start, and ends all of it."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.run_dir = where / "run"
        self._running: list[Launched] = []

    def store(self, head: str) -> str:
        """On this machine, which is no host of the job; its address."""
        log = self.where / "store.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {RECIPES['store']}"],
                stdout=out,
                text=True,
                env=environment(HEAD=head),
            )
        self._running.append(Launched(process, log))
        wait_until("the store", lambda: log.read_text().endswith("\n"))
        return log.read_text().strip()

    def torchrun(
        self, recipe: str, host: Host, name: str, more: str = "", **known: str
    ) -> Launched:
        """As the page says, on a host."""
        log, command = self.where / f"{name}.log", f"exec {RECIPES[recipe]} {more}"
        given = environment(RUN_DIR=str(self.run_dir), FLAGS=" ".join(FLAGS), **known)
        with log.open("w") as out:
            process = host.run("bash", "-c", command, stdout=out, stderr=out, env=given, cwd=ROOT)
        self._running.append(Launched(process, log))
        return self._running[-1]

    def here(self, recipe: str, **known: str) -> str:
        """As the page says, on this machine; what it prints."""
        given = environment(RUN_DIR=str(self.run_dir), **known)
        command = ["bash", "-ec", RECIPES[recipe]]
        ran = subprocess.run(command, capture_output=True, text=True, env=given, timeout=TIMEOUT_S)
        assert ran.returncode == 0, (recipe, ran.stdout, ran.stderr)
        return ran.stdout

    def end(self) -> None:
        for launched in self._running:
            with contextlib.suppress(ProcessLookupError):
                launched.process.terminate()
        for launched in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launched.process.wait(5)
            launched.process.kill()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    started = Jobs(tmp_path)
    try:
        yield started
    finally:
        started.end()
        for log in sorted(tmp_path.glob("*.log")):
            print(f"-- {log.name}\n{log.read_text()[-6000:]}")


def environment(**known: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GLOO_")}
    path = f"{Path(sys.executable).parent}:{own['PATH']}"
    return {**own, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **known}


def wait_until(what: str, is_so: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("two_hosts", [MEGABITS], indirect=True)
def test_hosts_join_and_leave(two_hosts: Network, jobs: Jobs, tmp_path: Path) -> None:
    """Two torchruns join the job of a third; one of them leaves, then the host that began it."""
    a, b = two_hosts.hosts
    topology = tmp_path / "topology.yaml"
    topology.write_text(TOPOLOGY)
    store = jobs.store(two_hosts.head)
    first = jobs.torchrun("launch", a, "first", f"topology={topology}", STORE=store, NPROC="2")
    passing = jobs.torchrun("join", b, "passing", STORE=store, NPROC="1")
    staying = jobs.torchrun("join", b, "staying", STORE=store, NPROC="1")

    wait_until("the job", (jobs.run_dir / "job.json").exists)
    file = JobFile.read(jobs.run_dir)
    directory = Directory(JobStore(StoreAddress.parse(file.store), file.job, timeout_s=30))

    def status() -> dict[str, Any]:
        return directory.status() or {"iteration": 0, "waiting": (), "members": ()}

    wait_until("both to wait", lambda: len(status()["waiting"]) == 2)
    said = jobs.here("grow")
    assert "waiting: host-b" in said
    assert "done at iteration" in said

    def pids_of(launched: Launched) -> str:
        found = [uid.split(":")[1] for uid in members() if is_below(uid, launched)]
        assert found, (members(), launched.log)
        return " ".join(found)

    def members() -> list[str]:
        return list(status()["members"])

    wait_until("four members", lambda: len(members()) == 4)
    assert [uid.partition(":")[0] for uid in members()] == ["host-a", "host-a", "host-b", "host-b"]
    for launched, left in ((passing, 3), (first, 1)):
        jobs.here("leave", PIDS=pids_of(launched))
        assert launched.process.wait(60) == 0
        wait_until(f"{left} members", lambda left=left: len(members()) == left)
        at = status()["iteration"]
        wait_until("it trains on", lambda at=at: status()["iteration"] > at + 2)
    # Nobody would take the place of the last one: its torchrun ends at once, not after 30 s.
    begin = time.monotonic()
    staying.process.send_signal(signal.SIGTERM)
    assert staying.process.wait(25) != 0
    print(f"ended in {time.monotonic() - begin:.1f} s")

    assert "GLOO_SOCKET_IFNAME=dte" in passing.said()
    events = around.events(jobs.run_dir)
    worlds = [event["world"] for event in events]
    assert worlds in ([4, 3, 1], [4, 3, 2, 1])  # two that were told may be heard one by one
    assert_crossed_once(events[0])
    steps = around.steps(jobs.run_dir)
    assert [step["iteration"] for step in steps] == list(range(1, len(steps) + 1))
    few = [*FLAGS, "--train-iters", str(min(30, len(steps)))]
    static = run_megatron(1, few, [], tmp_path / "static")
    for step, other in zip(steps, around.steps(static.run_dir), strict=False):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-6), step


def is_below(uid: str, launched: Launched) -> bool:
    """Whether a process was started by that torchrun; processes are this machine's."""
    pid = int(uid.split(":")[1])
    while pid > 1 and pid != launched.process.pid:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == launched.process.pid


def assert_crossed_once(event: dict[str, Any]) -> None:
    """Two ranks of the other node lacked the same: half of what arrived came from this one."""
    print(json.dumps({name: event[name] for name in ("nodes", "bytes", "bytes_matrix")}))
    assert event["nodes"] == [0, 0, 1, 1]
    assert (
        across(event, event["nodes"]) * 2
        == event["bytes"]["moved"]
        == event["bytes"]["lower_bound"]
    )
