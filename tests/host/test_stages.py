"""Switches that free the old state stage by stage: right, and within the memory that was planned.

Every state is checked against Megatron's own checkpoint; see :mod:`tests.host.oracle`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.host import oracle
from tests.ranks import TINY_LLAMA

DISTRIBUTED = ["--use-distributed-optimizer"]
TIED = [flag for flag in TINY_LLAMA if flag != "--untie-embeddings-and-output-weights"]


def events(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "switch"]


# What a layout takes grows, shrinks and stays as it is from one to the next.
CASES = {
    "bf16, distributed optimizer": (
        [*TINY_LLAMA, "--bf16", *DISTRIBUTED],
        ["tp2-dp2", "dp4", "pp2-tp2", "tp4", "dp2-pp2", "pp4", "tp2-dp2-sp"],
    ),
    "float32, distributed optimizer, tied": (
        [*TIED, *DISTRIBUTED],
        ["tp2-dp2", "pp2-dp2", "tp4", "dp4", "pp4", "tp2-dp2"],
    ),
    "bf16, plain optimizer, tied": (
        [*TIED, "--bf16"],
        ["tp2-dp2", "dp4", "pp2-dp2", "tp4"],
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost_where_sources_are_freed_stage_by_stage(name: str, tmp_path: Path) -> None:
    flags, tour = CASES[name]
    flags = [*flags, "--tensor-model-parallel-size", "2"]
    oracle.run_tour(4, flags, tour, tmp_path, overrides=["engine.keep_source=never"])
    found = events(tmp_path)
    for event in found:
        print(event["source"], event["target"], event["stages"], event["keep_source"], event["planned_peak_extra_bytes"], event["peak_extra_bytes"], event["stall_s"], event["seconds"])
        assert event["keep_source"] == "never"
        assert event["fingerprint"]["before"] == event["fingerprint"]["after"]
        assert event["peak_extra_bytes"] <= event["planned_peak_extra_bytes"]
    assert max(event["stages"] for event in found) > 2
