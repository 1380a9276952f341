"""A refused switch leaves no trace in the training: neither before the loop is left, nor after.

With overlapped gathering the last step leaves parameters ungathered, and Megatron's loop begins
without gathering them: entering it again must not train on what is stale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.host import around
from tests.ranks import TINY_LLAMA, run_megatron

FLAGS = [
    *TINY_LLAMA,
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--global-batch-size", "4", "--train-iters", "6"),
]
SCHEDULE = "schedule=[{iteration: 2, layout: {tp: 3}}, {iteration: 4, layout: {pp: 2}}]"


def one_rank_cannot_build() -> None:
    """Let building a target fail on the last rank; in a rank."""
    from dynatrain_megatron.adapters import skeleton

    real = skeleton.build

    def build(job: Any, unwritten: Any) -> Any:
        made = real(job, unwritten)
        if job.args.rank == job.args.world_size - 1:
            raise RuntimeError("this rank has no room")
        return made

    skeleton.build = build


@pytest.mark.host
@pytest.mark.slow
def test_training_goes_on_as_if_nobody_had_asked(tmp_path: Path) -> None:
    static = run_megatron(2, FLAGS, [], tmp_path / "static")
    refused = run_megatron(
        2, FLAGS, [SCHEDULE], tmp_path / "refused", inside=one_rank_cannot_build
    )  # fmt: skip
    events = around.events(refused.run_dir)
    assert [(event["event"], event["iteration"]) for event in events] == [
        ("refused", 2),
        ("refused", 4),
    ]
    assert "tp*pp*cp=3*1*1=3 must divide world=2" in events[0]["reason"]
    assert (
        "rank 1: the target could not be built: RuntimeError: this rank has no room"
        in events[1]["reason"]
    )
    lines = [around.training_lines(run.logs[-1]) for run in (static, refused)]
    assert len(lines[0]) == 6
    around.assert_same_lines(lines[1], lines[0])
    got, expected = around.steps(refused.run_dir), around.steps(static.run_dir)
    assert [step["loss"] for step in got] == [step["loss"] for step in expected]  # to the last bit
    assert {step["layout"] for step in got} == {"dp2"}
