"""Switches that free the old state stage by stage: right, within their plan, and never half done.

In the tours every state is checked against Megatron's own checkpoint; see :mod:`tests.host.oracle`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.host import around, oracle, tours
from tests.ranks import TINY_LLAMA, RankFailure, run_megatron

DISTRIBUTED = ["--use-distributed-optimizer"]
TIED = [flag for flag in TINY_LLAMA if flag != "--untie-embeddings-and-output-weights"]
MIB = 1 << 20

# What a layout takes on a rank grows, shrinks and stays as it is from one to the next.
CASES = {
    "bf16, distributed optimizer": (
        [*TINY_LLAMA, "--bf16", *DISTRIBUTED],
        ["tp2-dp2", "dp4", "pp2-tp2", "tp4", "dp2-pp2", "pp4", "tp2-dp2-sp"],
    ),
    "float32, distributed optimizer, tied": (
        [*TIED, *DISTRIBUTED],
        ["tp2-dp2", "pp2-dp2", "tp4", "dp4", "pp4", "tp2-dp2"],
    ),
    "bf16, plain optimizer, tied": ([*TIED, "--bf16"], ["tp2-dp2", "dp4", "pp2-dp2", "tp4"]),
}


def within(event: dict[str, Any]) -> bool:
    """Whether the ledger is within the plan, and the plan within what is promised."""
    peak, planned = event["peak_extra_bytes"], event["planned_peak_extra_bytes"]
    assert peak <= planned + min(16 * MIB, planned // 20), event
    assert planned <= event["bound_peak_extra_bytes"], event
    return bool(peak <= planned)


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost_where_sources_are_freed_stage_by_stage(name: str, tmp_path: Path) -> None:
    flags, tour = CASES[name]
    flags = [*flags, "--tensor-model-parallel-size", "2"]
    oracle.run_tour(4, flags, tour, tmp_path, overrides=["engine.keep_source=never"])
    found = around.events(tmp_path)
    for event in found:
        assert event["keep_source"] == "never" and within(event)
        assert event["fingerprint"]["before"] == event["fingerprint"]["after"]
    assert max(event["stages"] for event in found) > 2


# ---------------------------------------------------------------------- memory

LARGER = [
    *("--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--vocab-size", "4000"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--bf16", *DISTRIBUTED),
]
AROUND = ["tp4", "dp4", "tp4", "pp4", "tp4"]  # grows, shrinks, stays


def measure(directory: Path) -> None:
    """Fill the state before each switch; write down what the process took; in a rank.

    The first round of the tour keeps the old state, the second one does not.
    """
    from dynatrain_megatron.config import KeepSource
    from dynatrain_megatron.platform import memory
    from dynatrain_megatron.plugin import session

    real, done = session.switch, []

    def measured(job: Any, target: Any, options: Any, *worlds: Any) -> Any:
        for tensor in oracle._state(job).values():
            if tensor.is_floating_point() and tensor.dim():
                tensor.uniform_(0, 1e-3)  # memory that was never written to is none
        keep = KeepSource.always if len(done) < len(AROUND) - 1 else KeepSource.never
        memory.release_unused()
        assert memory.reset_peak_resident()
        begin = memory.resident_bytes()
        report = real(job, target, dataclasses.replace(options, keep_source=keep), *worlds)
        done.append(memory.peak_resident_bytes() - begin)
        (directory / f"resident-{job.args.rank}.json").write_text(json.dumps(done))
        return report

    session.switch = measured  # type: ignore[assignment]


@pytest.mark.host
def test_the_ledger_is_within_the_plan_and_the_process_about(tmp_path: Path) -> None:
    tour = [*AROUND, *AROUND[1:]]
    flags = [*TINY_LLAMA, *LARGER, "--tensor-model-parallel-size", "4"]
    run_megatron(
        4,
        [
            *flags,
            *("--train-iters", str(2 + len(tour))),
            *("--data-cache-path", str(tmp_path / "cache")),
        ],
        [tours.schedule(tour), "engine.staging_mib=16"],
        tmp_path,
        inside=lambda: measure(tmp_path),
    )
    found = around.events(tmp_path)
    resident = [json.loads((tmp_path / f"resident-{r}.json").read_text()) for r in range(4)]
    rows = list(zip(found, [max(each) for each in zip(*resident, strict=True)], strict=True))
    for event, process in rows:
        assert within(event)
        # Besides, the process has caches, code paged in, and what its allocator keeps.
        assert process <= 1.25 * event["planned_peak_extra_bytes"] + 96 * MIB, event
    half = len(AROUND) - 1
    for (kept, much), (freed, less) in zip(rows[:half], rows[half:], strict=True):
        assert (kept["keep_source"], freed["keep_source"]) == ("always", "never")
        assert freed["planned_peak_extra_bytes"] <= kept["planned_peak_extra_bytes"]
        if {kept["source"], kept["target"]} == {"tp4", "pp4"}:  # nothing grows: all is overlap
            assert freed["planned_peak_extra_bytes"] < 0.5 * kept["planned_peak_extra_bytes"]
            assert freed["stages"] > 2 and less < 0.75 * much, (less / MIB, much / MIB)
    assert [event["target"] for event, _ in rows] == [b for _, b in pairwise(tour)]


# ---------------------------------------------------------------------- failures


def fail_at_stage(number: int, directory: Path, *, turn: int, for_good: bool) -> None:
    """The check of a stage of a switch fails on every rank; what comes of it is noted; in a rank.

    ``for_good`` lets all checks fail from then on, also those of the way back.
    """
    from dynatrain_megatron.errors import SplitStateError, TransitionError
    from dynatrain_megatron.plugin import session
    from dynatrain_megatron.transition import move

    check, real, calls, turns = move.check_received, session.switch, [], []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.extend([1] if len(turns) == turn else [])
        if len(calls) == number + 1 or (for_good and len(calls) > number):
            raise TransitionError("made to fail")
        return check(*args, **kwargs)

    def noted(job: Any, target: Any, options: Any, *worlds: Any) -> Any:
        turns.append(1)
        before = {name: tensor.clone() for name, tensor in oracle._state(job).items()}
        try:
            return real(job, target, options, *worlds)
        except TransitionError as error:
            split = isinstance(error, SplitStateError)
            after = {} if split else oracle._state(job)
            result = {
                "split": split,
                "same": not split and all(torch.equal(before[n], after[n]) for n in before),
                "layout": str(job.layout),
                "tp": job.args.tensor_model_parallel_size,
            }
            (directory / f"failure-{job.args.rank}.json").write_text(json.dumps(result))
            raise

    move.check_received, session.switch = failing, noted  # type: ignore[assignment]


@pytest.mark.host
@pytest.mark.parametrize("for_good", [False, True])
def test_a_failure_takes_stages_back_and_ends_the_job_where_that_fails(
    for_good: bool, tmp_path: Path
) -> None:
    """Also by the bridge of an earlier switch, in which processes have taken other ranks."""
    tour = ["tp2"] if for_good else ["pp2", "tp2"]
    with pytest.raises(RankFailure) if for_good else contextlib.nullcontext():
        run_megatron(
            2,
            [*TINY_LLAMA, "--bf16", *DISTRIBUTED, "--global-batch-size", "4"],
            [
                tours.schedule(["dp2", *tour]),
                *("engine.keep_source=never", "engine.verify=fingerprint", "engine.placement=best"),
            ],
            tmp_path,
            inside=lambda: fail_at_stage(1, tmp_path, turn=len(tour), for_good=for_good),
        )
    layout = ["dp2", *tour][-2]
    for rank in range(2):
        result = json.loads((tmp_path / f"failure-{rank}.json").read_text())
        assert result == {"split": for_good, "same": not for_good, "layout": layout, "tp": 1}
    steps = [step["layout"] for step in around.steps(tmp_path)]
    # Called off, the job trains on.
    assert steps == (["dp2"] * 2 if for_good else ["dp2", "dp2", "pp2", "pp2"]), steps
    log = (tmp_path / "rank0.log").read_text()
    assert for_good or "2 processes take other ranks" in log
    assert f"1 stages are taken back to {layout}" in log
    assert ("could not be brought back: made to fail" in log) == for_good
