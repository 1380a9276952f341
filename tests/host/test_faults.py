"""Whatever fails in a switch: all commit or none does, nobody hangs, and no bit is wrong."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.host import around
from tests.host.test_elastic import FLAGS as ELASTIC_FLAGS
from tests.host.test_elastic import Driver, run_elastic, steps_of
from tests.ranks import TINY_LLAMA, alive, run_megatron

FLAGS = [*TINY_LLAMA, "--use-distributed-optimizer", "--global-batch-size", "4"]

# (phase, rank, kind): one failure for each switch.
EXCEPTIONS = [
    ("quiesce", 1, "exception"),
    ("groups", 0, "exception"),
    ("build", 1, "exception"),
    ("plan", 0, "exception"),
    ("memory", 1, "exception"),
    ("pack", 0, "exception"),
    ("wire", 1, "exception"),
    ("unpack", 1, "exception"),
    ("wire", 0, "bitflip"),
    ("rebuild", 0, "oom"),
    ("verify", 1, "exception"),
    ("vote", 0, "exception"),
]


@pytest.mark.host
@pytest.mark.parametrize(("verify", "keep"), [("messages", "never"), ("fingerprint", "always")])
def test_an_exception_anywhere_leaves_the_job_as_it_was(
    verify: str, keep: str, tmp_path: Path
) -> None:
    """Every phase fails once, on one rank or the other; losses are those of no switch at all.

    With ``never`` parts of the old state are gone by then, in the second stage or later.
    """
    count = len(EXCEPTIONS)
    flags = [*FLAGS, "--train-iters", str(count + 4), "--lr-decay-iters", "40"]
    static = run_megatron(2, flags, [], tmp_path / "static")
    steps = [f"{{iteration: {n + 1}, layout: pp2}}" for n in range(count + 1)]
    run = run_megatron(
        2,
        flags,
        [
            *(f"schedule=[{', '.join(steps)}]", f"engine.verify={verify}"),
            f"engine.keep_source={keep}",
        ],
        tmp_path / "run",
        inside=lambda: fail_in_turn(2 if keep == "never" else 1),
    )
    events = around.events(run.run_dir)
    told = [(event["event"], event["ok"]) for event in events]
    assert told == [("refused", False)] * count + [("switch", True)], told
    log = (run.run_dir / "rank0.log").read_text()
    assert ("stages are taken back to" in log) == (keep == "never")
    for (phase, rank, kind), event in zip(EXCEPTIONS, events, strict=False):
        expected = "not what was sent" if (kind, verify) == ("bitflip", "messages") else ""
        assert expected in event["reason"], (phase, event["reason"])
        if kind != "bitflip":
            assert f"rank {rank}: injected {kind} in phase {phase}" in event["reason"], event
    got, expected_steps = steps_of(run.run_dir), steps_of(static.run_dir)
    for step, other in zip(got[: count + 1], expected_steps, strict=False):
        assert step["loss"] == other["loss"], step  # to the last bit
    for step, other in zip(got[count + 1 :], expected_steps[count + 1 :], strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-6)


STAGED = {"memory", "pack", "wire", "unpack"}


def fail_in_turn(stage: int) -> None:
    """Arm the next fault before each switch, in that stage where phases have some; in a rank."""
    from dynatrain_megatron import faults
    from dynatrain_megatron.plugin import session

    real, turn = session.switch, iter(EXCEPTIONS)

    def switch(*args: Any) -> Any:
        phase, rank, kind = next(turn, (None, None, None))
        armed = []
        if phase is not None:
            at = stage if phase in STAGED else 1
            armed = [faults.Fault((rank,), faults.Phase(phase), faults.Kind(kind), at)]
        faults.arm(armed)
        return real(*args)

    session.switch = switch


@pytest.mark.host
@pytest.mark.parametrize(
    ("phase", "kind", "keep"),
    [
        ("build", "kill", "always"),
        ("wire", "hang", "always"),
        ("vote", "kill", "always"),
        ("wire", "kill", "never"),
    ],
)
def test_the_loss_of_a_rank_ends_the_job_and_does_not_hang_it(
    phase: str, kind: str, keep: str, tmp_path: Path
) -> None:
    """With a checkpoint right before the switch, which the message names.

    It names who is lost, too, and where; one that hangs finds out that the job is over.
    """

    def drive(driver: Driver) -> tuple[float, int]:
        begin, pid = time.monotonic(), driver.pid(1)
        for number in (1, 0):
            driver.wait_until("the end", lambda number=number: not alive(driver.pid(number)))
        return time.monotonic() - begin, pid

    saved = tmp_path / "saved"
    codes, (seconds, pid) = run_elastic(
        2,
        0,
        [*FLAGS, "--train-iters", "6", "--save", str(saved), "--save-interval", "90"],
        [
            *("target=pp2", "switch_at=2", "save_before_switch=true", "elastic.timeout_s=5"),
            *(f"engine.timeout_s={6 if kind == 'hang' else 20}", f"engine.keep_source={keep}"),
            f"faults=[{{rank: 1, phase: {phase}, kind: {kind}}}]",
        ],
        tmp_path / "run",
        drive,
    )
    assert codes == [99, -9 if kind == "kill" else 1] and seconds < 60
    log, other = ((tmp_path / "run" / f"rank{rank}.log").read_text() for rank in (0, 1))
    *_, error = (line for line in log.splitlines() if line.startswith("dynatrain_megatron.errors."))
    assert "did not come back within 5." in error or "had been freed" in error
    assert re.search(rf":{pid}:\w+ \(rank 1\), last heard of in phase {phase}, at work", error)
    assert f"iteration 2 is saved in {saved}" in error
    assert (kind == "hang") == (f"it hangs, last heard of in phase {phase}" in other)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.host
def test_a_joiner_that_dies_or_hangs_in_a_switch_is_given_up(tmp_path: Path) -> None:
    """Killed while data moves, stopped before the vote: the job goes on in its layout.

    So it does without one that leaves and dies when the switch is decided.
    """

    def drive(driver: Driver) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        driver.let_start(2)
        driver.wait_for_arrivals(1)
        seen["killed"] = driver.ask(layout={"tp": 1, "world": 3})
        driver.wait_until("it is dead", lambda: not alive(driver.pid(2)))
        driver.let_start(3)
        driver.wait_for_arrivals(2)
        driver.wait_until(
            "the dead one is forgotten",
            lambda: (driver.directory.status() or {})["waiting"] == [driver.uid(3)],
        )
        begin = time.monotonic()
        seen["stopped"] = driver.ask(layout={"tp": 1, "world": 3})
        seen["stopped_s"] = time.monotonic() - begin
        os.kill(driver.pid(3), signal.SIGKILL)
        status = driver.directory.status() or {}
        at = status["iteration"]
        driver.wait_until(
            "it trains", lambda: (driver.directory.status() or {})["iteration"] > at + 2
        )
        seen["left"] = driver.ask(layout={"tp": 1, "world": 1})
        return seen

    codes, seen = run_elastic(
        2,
        2,
        ELASTIC_FLAGS,
        ["elastic.connect_timeout_s=10"],
        tmp_path / "run",
        drive,
        overrides_of={
            1: ["faults=[{rank: 1, phase: commit, kind: kill}]"],
            2: ["faults=[{rank: 2, phase: wire, kind: kill}]"],
            3: ["faults=[{rank: 2, phase: rebuild, kind: stop}]"],
        },
    )
    assert codes == [0, -9, -9, -9]
    assert seen["killed"]["state"] == seen["stopped"]["state"] == "called off", seen
    told = r"no sign of life from \S+ \(rank 2\), last heard of in phase rebuild, at work"
    assert re.search(told, seen["stopped"]["reason"]), seen
    assert seen["left"]["state"] == "done", seen
    steps = steps_of(tmp_path / "run")
    assert [step["iteration"] for step in steps] == list(range(1, len(steps) + 1))
