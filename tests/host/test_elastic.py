"""A job whose processes come, go and change places, beside one that never changed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.cli import main
from dynatrain_megatron.elastic import live
from dynatrain_megatron.elastic.control import JobFile
from dynatrain_megatron.elastic.directory import Directory, JobCard
from dynatrain_megatron.elastic.endpoint import asked
from dynatrain_megatron.elastic.store import JobStore, StoreAddress
from tests.host import around
from tests.ranks import TINY_LLAMA, alive, run_megatron, run_ranks, store_apart

FLAGS = [
    *TINY_LLAMA,
    *("--use-distributed-optimizer", "--global-batch-size", "12", "--train-iters", "400"),
    *("--lr-decay-iters", "40", "--exit-interval", "1000"),
]
TIMEOUT_S = 150.0
HAS_WANDB = importlib.util.find_spec("wandb") is not None


class Driver:
    """Outside the job: starts processes, asks for switches, and sees what comes of it."""

    def __init__(self, store: StoreAddress, run_dir: Path) -> None:
        self.client = store.connect(timeout_s=TIMEOUT_S)
        card = JobCard.read(store, timeout_s=TIMEOUT_S)
        self.directory = Directory(JobStore(store, card.name, timeout_s=TIMEOUT_S))
        self.run_dir = run_dir
        self.by_socket = False

    def let_start(self, *numbers: int) -> None:
        for number in numbers:
            self.client.set(f"test/go/{number}", "")

    def pid(self, number: int) -> int:
        return int(self.client.get(f"test/pid/{number}"))

    def wait_until(self, what: str, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    def wait_for_arrivals(self, count: int) -> None:
        self.wait_until("arrivals", lambda: len(self.directory.arrivals(0)) >= count)

    def ask(self, **request: Any) -> dict[str, Any]:
        if self.by_socket:
            reply = asked(self.run_dir, {"ask": request})
            assert reply is not None, "rank 0 listens at the socket in the run directory"
            number = reply["number"]
        else:
            number = self.directory.ask(request, JobFile.read(self.run_dir).secret)
        answers: list[dict[str, Any]] = []

        def is_answered() -> bool:
            answer = self.directory.answer_of(number)
            answers[:] = [] if answer is None else [answer]
            return bool(answers) and answers[0]["state"] != "announced"

        self.wait_until(f"answer to {request}", is_answered)
        return answers[0]

    def uid(self, number: int) -> str:
        pid = f":{self.pid(number)}:"
        return next(uid for uid in self.directory.arrivals(0) if pid in uid)

    def members(self) -> list[str]:
        status = self.directory.status()
        return [] if status is None else list(status["members"])

    def end(self) -> None:
        """Let the job end at its next step."""
        self.client.set("test/end", "")


def run_elastic(
    start: int,
    others: int,
    flags: Sequence[str],
    overrides: Sequence[str],
    run_dir: Path,
    drive: Callable[[Driver], Any],
    extra: dict[int, list[str]] | None = None,
    overrides_of: dict[int, list[str]] | None = None,
) -> tuple[list[int], Any]:
    """A job of ``start`` processes and ``others`` that join when told; exit codes, and a result.

    ``drive`` runs beside it, in a process of its own; the job trains until it has returned its
    result. ``extra`` are flags that some processes have more, ``overrides_of`` their overrides.
    """

    def process(number: int) -> Any:
        if number == start + others:
            driver = Driver(store, run_dir)
            try:
                return drive(driver)
            finally:
                driver.let_start(*range(start, start + others))
                driver.end()
        pid = os.fork()  # into one that may be killed
        if pid == 0:
            code = 99
            try:
                code = train(number)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def train(number: int) -> int:
        client = store.connect(timeout_s=2 * TIMEOUT_S)
        client.set(f"test/pid/{number}", str(os.getpid()))
        argv = [*flags, *(extra or {}).get(number, ()), "--dynatrain", f"run_dir={run_dir}"]
        argv += [*overrides, *(overrides_of or {}).get(number, ())]
        if number < start:
            os.environ["WORLD_SIZE"] = str(start)
            argv.append(f"elastic.store={store}")
        else:
            client.wait([f"test/go/{number}"])
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="1")
            argv.append(f"elastic.join={store}")
        return ends_with(argv, lambda: bool(client.check(["test/end"])))

    with store_apart() as store:
        *codes, result = run_ranks(
            start + others + 1, process, timeout_s=2 * TIMEOUT_S, log_dir=run_dir
        )
    return codes, result


def ends_with(argv: list[str], is_over: Callable[[], bool]) -> int:
    """Train until ``is_over``; the exit code."""
    from megatron.training import training

    from dynatrain_megatron.plugin import pretrain_gpt

    sys.modules["__main__"] = types.ModuleType("__main__")
    real = training.checkpoint_and_decide_exit

    def decide(*args: Any, **kwargs: Any) -> bool:
        import torch
        import torch.distributed as dist

        over = torch.tensor([int(is_over())])
        dist.broadcast(over, src=0)
        time.sleep(0.02)
        return bool(over) or bool(real(*args, **kwargs))

    with signature_of(real, decide):
        try:
            pretrain_gpt.main(argv)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@contextmanager
def signature_of(real: Any, replaced: Any) -> Iterator[None]:
    """``replaced`` in the place of Megatron's function, looking like it to the hooks."""
    import functools

    from megatron.training import training

    training.checkpoint_and_decide_exit = functools.wraps(real)(replaced)
    try:
        yield
    finally:
        training.checkpoint_and_decide_exit = real


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.host
def test_two_four_three_others_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two join, one leaves, rank 0 is told to go while another joins, and it shrinks again."""
    static = run_megatron(2, [*FLAGS, "--train-iters", "160"], [], tmp_path / "static")

    def drive(driver: Driver) -> None:
        driver.let_start(2, 3, 4)  # all at once: what follows takes few steps
        driver.wait_for_arrivals(3)
        driver.by_socket = True
        grown = driver.ask(layout={"tp": 2, "world": 4})
        assert grown["state"] == "done", grown
        driver.by_socket = False
        in_place = driver.ask(layout={"tp": 1, "pp": 2, "world": 4})
        assert in_place["state"] == "done", in_place
        figures = (tmp_path / "run" / "job.prom").read_text()
        assert 'dynatrain_layout{run="run",axis="world"} ' in figures
        # Over the bridge of the switch before; who leaves builds nothing.
        shrunk = driver.ask(layout={"tp": 1, "world": 3})
        assert shrunk["state"] == "done", shrunk
        os.kill(driver.pid(0), signal.SIGTERM)  # one still waits, and is taken in for it
        driver.wait_until("rank 0 is gone", lambda: len(around.events(tmp_path / "run")) == 4)
        gone = f":{driver.pid(0)}:"
        driver.wait_until("it is told", lambda: not any(gone in uid for uid in driver.members()))
        driver.wait_until(
            "who has rank 0 now listens", lambda: asked(tmp_path / "run", {"status": None})
        )
        # By a file and a signal, which reaches all; one of them takes it.
        (tmp_path / "run" / "request.json").write_text('{"layout": {"tp": 5}}')
        refused = answer_to_signal(driver)
        assert refused["state"] == "refused" and "tp*pp*cp=5" in refused["reason"], refused
        (tmp_path / "run" / "request.json").write_text('{"layout": {"tp": 2, "world": 2}}')
        last = answer_to_signal(driver)
        assert last["state"] == "done" and last["layout"] == "tp2", last

    def answer_to_signal(driver: Driver) -> dict[str, Any]:
        answer = tmp_path / "run" / "answer.json"
        before = json.loads(answer.read_text())["number"]
        for uid in driver.members():
            os.kill(int(uid.split(":")[-2]), signal.SIGUSR1)

        def read() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(answer.read_text())
            return found

        def is_answered() -> bool:
            return read()["number"] == before + 1 and read()["state"] != "announced"

        driver.wait_until("answer to the signal", is_answered)
        return read()

    board = ["--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-log-interval", "1"]
    if HAS_WANDB:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        board += ["--wandb-project", "tests", "--wandb-exp-name", "elastic"]
        board += ["--wandb-save-dir", str(tmp_path / "wandb")]
    figures = ["control.metrics_file=job.prom"]
    codes, _ = run_elastic(2, 3, [*FLAGS, *board], figures, tmp_path / "run", drive)
    assert codes == [0] * 5
    assert not (tmp_path / "run" / "job.prom").exists()  # of a job that has ended
    events = around.events(tmp_path / "run")
    assert [(event["joined"], event["left"]) for event in events] == [
        (2, 0), (0, 0), (0, 1), (1, 1), (0, 1)
    ]  # fmt: skip
    assert [event["origin"] for event in events] == [*["request"] * 3, "notice", "request"]
    got, expected = steps_of(tmp_path / "run"), steps_of(static.run_dir)
    assert [step["iteration"] for step in got] == list(range(1, len(got) + 1))
    assert len(got) <= len(expected)  # every step after every switch is held against the other run
    for step, other in zip(got, expected, strict=False):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-6), step
        assert step["consumed_samples"] == other["consumed_samples"]
    # The last rank writes the curve: five processes in turn, and no step twice or never.
    curves = [around.scalars(tmp_path / "board")]
    if HAS_WANDB:
        files = sorted((tmp_path / "wandb").rglob("run-*.wandb"))
        assert len({path.stem for path in files}) == 1 < len(files)  # one run in several parts
        curves.append(around.wandb_curves(tmp_path / "wandb"))
    for written in curves:
        steps = [step["iteration"] for step in got]
        assert sorted(step for step, _ in written["lm loss"]) == steps
        around.assert_tells_of_switches(around.own(written), events)


@pytest.mark.host
def test_parked_faulty_and_moved_elsewhere(tmp_path: Path) -> None:
    """One parks and comes back; joiners fail in every way they can; the job moves to others."""

    def drive(driver: Driver) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def iteration() -> int:
            status = driver.directory.status()
            return 0 if status is None else int(status["iteration"])

        driver.wait_until("a step", lambda: iteration() > 1)
        # Down to one rank and back, by the command itself.
        base = ["switch", "--run-dir", str(tmp_path / "run"), "--json", "--wait"]
        assert main([*base, "--world", "1"]) == 0
        driver.wait_for_arrivals(1)
        begin = time.monotonic()
        assert main([*base, "--target", "{tp: 2, world: 2}"]) == 0
        seen["back_s"] = time.monotonic() - begin
        assert main(["status", "--run-dir", str(tmp_path / "run")]) == 0
        # Wrong flags: named, and nobody is disturbed. Too many: refused.
        driver.let_start(2)
        driver.wait_until("wrong flags", lambda: not alive(driver.pid(2)))
        assert driver.ask(world=3)["state"] == "refused"
        # One that waits is killed, another stopped: they are forgotten.
        driver.let_start(3, 4)
        driver.wait_for_arrivals(3)
        os.kill(driver.pid(3), signal.SIGSTOP)
        os.kill(driver.pid(4), signal.SIGKILL)
        begin, before = time.monotonic(), iteration()
        seen["lost"] = driver.ask(layout={"tp": 1, "world": 3})
        seen["lost_s"], seen["steps"] = time.monotonic() - begin, iteration() - before
        # Both of the job are told to go while two wait: the job moves to those.
        driver.let_start(5, 6)
        driver.wait_for_arrivals(5)
        for number in (0, 1):
            os.kill(driver.pid(number), signal.SIGTERM)
        moved = {driver.uid(5), driver.uid(6)}
        driver.wait_until("the job is elsewhere", lambda: set(driver.members()) == moved)
        at = iteration()
        driver.wait_until("it trains there", lambda: iteration() > at + 2)
        os.kill(driver.pid(3), signal.SIGKILL)
        return seen

    codes, seen = run_elastic(
        2,
        5,
        FLAGS,
        ["elastic.on_leave=park", "elastic.connect_timeout_s=4"],
        tmp_path / "run",
        drive,
        extra={2: ["--hidden-size", "128"]},
    )
    assert codes == [0, 0, 2, -9, -9, 0, 0]
    told = (tmp_path / "run" / "rank2.log").read_text()
    assert "this process cannot join: hidden_size is 64 in the job and 128 here" in told
    assert seen["lost"]["state"] in ("called off", "refused"), seen
    assert seen["steps"] > 0
    events = [event for event in around.events(tmp_path / "run") if event["ok"]]
    assert [event["world"] for event in events] == [1, 2, 2]
    # The last of them was told by a process that had just come.
    assert [e["source"] for e in events[1:]] == [e["target"] for e in events[:-1]]
    assert 0 < events[0]["iteration"] < events[1]["iteration"] < events[2]["iteration"]
    steps = steps_of(tmp_path / "run")
    assert [step["iteration"] for step in steps] == list(range(1, len(steps) + 1))


@pytest.mark.host
def test_a_policy_follows_who_comes_and_who_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for anything: one more process is taken in, one told to go is let go.

    Groups are made a few at each boundary, and connected before the vote, as NCCL's have to be.
    """
    monkeypatch.setattr(live, "_CONNECT_LATE", ("gloo",))

    def drive(driver: Driver) -> None:
        driver.let_start(2)
        driver.wait_until("it is taken in", lambda: len(driver.members()) == 3)
        os.kill(driver.pid(1), signal.SIGTERM)
        driver.wait_until("one has left", lambda: len(driver.members()) == 2)

    policy = "policy=dynatrain_megatron.policies:follow_capacity"
    # All save right after each switch, also who has just joined and knows of no save.
    saves = ["save_before_switch=true", "save_after_switch=true"]
    overrides = [policy, "elastic.overlap=boundary", *saves]
    flags = [*FLAGS, "--save", str(tmp_path / "saved"), "--save-interval", "1000"]
    codes, _ = run_elastic(2, 1, flags, overrides, tmp_path / "run", drive)
    told = (tmp_path / "run" / "rank0.log").read_text()
    assert "a few at each boundary" in told and "process groups connected" in told
    assert codes == [0] * 3
    events = around.events(tmp_path / "run")
    assert [(event["ok"], event["origin"], event["world"]) for event in events] == [
        (True, "policy", 3),
        (True, "policy", 2),
    ]
    saved = {path.name for path in (tmp_path / "saved").glob("iter_*")}
    # In the old layout, and one step later in the new one, if the run did not end with it.
    first, last = (event["iteration"] for event in events)
    assert {f"iter_{iteration:07d}" for iteration in (first, first + 1, last)} <= saved
