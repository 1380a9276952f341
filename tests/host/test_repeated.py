"""Switches back to layouts that were left before: what is kept is as if it had been built anew."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.host import around, oracle, tours
from tests.ranks import TINY_LLAMA, run_megatron

DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
MOE = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-router-dtype", "fp32"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "1e-3"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
]
A, B, C = "tp2-dp2", "pp2-vpp2-dp2", "dp4"
# What a layout takes without memory: counters that are in no checkpoint, and none that grow.
DORMANT_BYTES = 4096


def switches(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """What was found after each switch, in order, by rank."""
    found = defaultdict(list)
    for line in oracle.results(directory):
        found[line["rank"]].append(line)
    return found


@pytest.mark.host
def test_a_layout_that_comes_again_is_there_already(tmp_path: Path) -> None:
    """Nothing is made or destroyed, dormant layouts have no memory, and every bit is right."""
    tour = [A, B, A, C, B, A, C, A, B]
    flags = [*TINY_LLAMA, *DISTRIBUTED, *OVERLAP, "--bf16", "--tensor-model-parallel-size", "2"]
    oracle.run_tour(4, flags, tour, tmp_path, overrides=["elastic.cache_worlds=4"])
    for found in switches(tmp_path).values():
        for number, line in enumerate(found, start=1):
            again = tour[number] in tour[:number]
            assert (line["created"] == 0) == again, line
            assert (line["reused"] > 0) == again, line  # what stays is nobody else's to take
            assert line["destroyed"] == 0, line
            assert max(line["dormant_bytes"]) <= DORMANT_BYTES, line
        assert [len(line["dormant_bytes"]) for line in found] == [1, 1, 2, 2, 2, 2, 2, 2]
        known = found[tour.index(C) :]
        for what in ("threads", "files"):
            assert len({line[what] for line in known}) == 1, [line[what] for line in known]


@pytest.mark.host
def test_the_layout_used_longest_ago_goes_where_there_is_no_room(tmp_path: Path) -> None:
    """Room for one: A B leaves A, A takes it and leaves B, C drives B out, B drives A out, …"""
    tour = ["dp2", "pp2", "dp2", "tp2", "pp2", "tp2", "dp2"]
    flags = [*TINY_LLAMA, *DISTRIBUTED, "--global-batch-size", "4"]
    oracle.run_tour(2, flags, tour, tmp_path)
    for found in switches(tmp_path).values():
        assert [line["created"] > 0 for line in found] == [True, False, True, True, False, True]
        assert [line["destroyed"] > 0 for line in found] == [False, False, True, True, False, True]
        assert all(len(line["dormant_bytes"]) == 1 for line in found)


@pytest.mark.host
@pytest.mark.parametrize(
    "extra",
    [
        [*MOE, *DISTRIBUTED, *OVERLAP, "--attention-dropout", "0.1", "--hidden-dropout", "0.1"],
        [*OVERLAP[:1], "--fp16", "--initial-loss-scale", "4294967296", "--loss-scale-window", "2"],
    ],
    ids=["experts, dropout, overlap", "float16 with its scaler, plain optimizer"],
)
def test_a_run_cannot_tell_what_was_kept_from_what_was_built(
    extra: list[str], tmp_path: Path
) -> None:
    """Losses, evaluations and a checkpoint after a switch back, to the last bit."""
    flags = [
        *(*TINY_LLAMA, *extra, "--global-batch-size", "4", "--train-iters", "10"),
        *("--eval-interval", "3", "--eval-iters", "1", "--save-interval", "4", "--save", "saved"),
        *("--dataloader-type", "cyclic", "--data-cache-path", str(tmp_path / "cache")),
    ]
    schedule = tours.schedule(["dp2", "pp2", "dp2", "tp2-sp", "pp2", "dp2", "pp2"], first=2)
    runs = {}
    for cache_worlds in (0, 4):
        directory = tmp_path / str(cache_worlds)
        saved = str(directory / "saved")
        run_megatron(
            2,
            [saved if flag == "saved" else flag for flag in flags],
            [schedule, f"elastic.cache_worlds={cache_worlds}"],
            directory,
        )
        runs[cache_worlds] = directory
    built, kept = (around.steps(runs[cache_worlds]) for cache_worlds in (0, 4))
    assert kept == built
    assert len(built) == 10
    logs = [(runs[cache_worlds] / "rank1.log").read_text() for cache_worlds in (0, 4)]
    evaluations = [around.validation_lines(log) for log in logs]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) >= 3
    groups = [[event["groups"] for event in around.events(runs[n])] for n in (0, 4)]
    assert all(figures["destroyed"] > 0 for figures in groups[0])
    kept = [figures["created"] == 0 for figures in groups[1]]
    assert kept == [False, True, False, True, True, True]
