"""A job's fingerprints against those of what Megatron itself saves in the new layout."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.cli import main
from tests.host import around
from tests.host.oracle import ORACLE_FLAGS
from tests.host.test_host_fault import host_is_mended
from tests.ranks import TINY_LLAMA, run_megatron

COMMON = [*TINY_LLAMA, "--use-distributed-optimizer", "--train-iters", "3", *ORACLE_FLAGS]
EXPERTS = [
    *("--num-experts", "4", "--moe-ffn-hidden-size", "64"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
]


def save_in_this_process() -> None:
    """The host would start another process for the results of a save alone; in a rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def switched_and_saved(
    flags: list[str], target: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit code and result of the command, and the switch that was before the save."""
    saved, run = directory / "saved", directory / "run"
    run_megatron(
        2,
        [*flags, "--save", str(saved), "--save-interval", "1000"],
        [f"target={target}", "switch_at=2", "save_after_switch=true"],
        run,
        inside=save_in_this_process,
    )
    capsys.readouterr()
    checkpoint = saved / "iter_0000002"
    code = main(["fingerprint", str(checkpoint), "--json", "--run", str(run)])
    (event,) = around.events(run)
    return code, json.loads(capsys.readouterr().out), event


@pytest.mark.host
@pytest.mark.parametrize(
    ("flags", "target"),
    [
        (["--bf16"], "tp2"),
        (["--bf16", *EXPERTS, "--pipeline-model-parallel-size", "2"], "dp2-ep2"),
    ],
    ids=["dense", "experts"],
)
def test_a_saved_state_has_the_fingerprints_of_the_job(
    flags: list[str], target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found, event = switched_and_saved([*COMMON, *flags], target, tmp_path, capsys)
    assert found["fingerprint"] == event["fingerprint"]["after"] == event["fingerprint"]["before"]
    assert found["states"] == event["state_fingerprints"]
    assert len(found["states"]) > 20
    assert found["shifted"] == found["incomplete"] == found["run"]["different"] == []
    assert len(found["rounded"]) > 6
    assert code == 0


@pytest.mark.host
def test_a_checkpoint_that_the_host_has_damaged_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several buckets of which one is padded: the job is right, and the checkpoint is not."""
    flags = [*COMMON, "--overlap-grad-reduce", "--ddp-bucket-size", "20000", "--bf16"]
    code, found, event = switched_and_saved(flags, "pp2", tmp_path, capsys)
    assert event["fingerprint"]["after"] == event["fingerprint"]["before"]
    if message := host_is_mended("dynatrain fingerprint need not tell of it any more"):
        assert code == 1, message
        assert found["shifted"], message
        wrong = {name.partition(" ")[0] for name in found["run"]["different"]}
        assert {each["key"] for each in found["shifted"]} == wrong
        assert max(each["zeros"] for each in found["shifted"]) > 0
    assert found["incomplete"] == []
