"""``engine.check_replicas`` in whole runs: a diverged replica is named, equal ones pass."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.planner.routes import replicas
from dynatrain_megatron.transition.check import Target
from dynatrain_megatron.transition.switch import SwitchOptions, SwitchReport
from dynatrain_megatron.vps import RosterSet, StateKind
from tests.host import around, tours
from tests.ranks import TINY_LLAMA, run_megatron

CHECK = "engine.check_replicas=true"
TIED = [flag for flag in TINY_LLAMA if flag != "--untie-embeddings-and-output-weights"]
MOE = [
    *TINY_LLAMA,
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-shared-expert-intermediate-size", "32"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
]


def flip_before_switch() -> None:
    """On rank 1, before each switch begins, change one bit of one main parameter's element."""
    from dynatrain_megatron.plugin import session

    real = session.switch

    def switch(job: Job, target: Target, options: SwitchOptions, *worlds: Any) -> SwitchReport:
        if dist.get_rank() == 1:
            norm = job.model[0].module.module.decoder.final_layernorm.weight
            state = HostState(job.model, job.optimizer, job.args)
            (shard,) = [shard for shard in state.shards() if shard.param is norm]
            shard.states[StateKind.MAIN_PARAM].view(torch.int32)[17] ^= 1
        return real(job, target, options, *worlds)

    session.switch = switch


@pytest.mark.host
def test_a_diverged_replica_refuses_the_switch_and_the_job_goes_on(tmp_path: Path) -> None:
    run_megatron(
        2,
        [*TINY_LLAMA, "--bf16", "--train-iters", "4"],
        [CHECK, "target=tp2", "switch_at=2"],
        tmp_path,
        inside=flip_before_switch,
    )
    (event,) = around.events(tmp_path)
    assert event["event"] == "refused" and event["source"] == "dp2-noopt"
    assert event["reason"] == (
        "replicas have diverged: decoder.final_layernorm.weight main_param: "
        "rank 1 differs from rank 0"
    )
    assert "engine.check_replicas=false" in event["next_step"]
    assert [step["layout"] for step in around.steps(tmp_path)] == ["dp2-noopt"] * 4


@pytest.mark.host
def test_without_the_option_a_diverged_replica_is_not_looked_for(tmp_path: Path) -> None:
    run_megatron(
        2,
        [*TINY_LLAMA, "--bf16", "--train-iters", "3"],
        ["target=tp2", "switch_at=2"],
        tmp_path,
        inside=flip_before_switch,
    )
    (event,) = around.events(tmp_path)
    assert event["event"] == "switch" and event["target"] == "tp2-noopt"
    assert "replicas" not in event["seconds"]


def count_replicas() -> None:
    """Before each check write down how many regions it compares."""
    module: Any = importlib.import_module("dynatrain_megatron.transition.switch")
    real = module.check_replicas

    def check(rosters: RosterSet, *args: Any, **options: Any) -> None:
        if dist.get_rank() == 0:
            print(f"replicated regions: {len(list(replicas(rosters)))}", flush=True)
        real(rosters, *args, **options)

    module.check_replicas = check


@pytest.mark.host
@pytest.mark.parametrize(
    ("flags", "launch", "layouts", "replicated"),
    [
        # Tied embeddings on two stages, norms on two tensor-parallel ranks, then everything.
        (
            [*TIED, "--bf16", "--use-distributed-optimizer"],
            ["--pipeline-model-parallel-size", "2"],
            ["pp2", "tp2", "tp2-sp", "dp2", "dp2-noopt", "pp2-noopt", "tp2-noopt", "dp2-noopt"],
            [True, True, True, False, True, True, True],
        ),
        # Router, shared experts and the router's bias beside experts that are dealt out.
        (
            [*MOE, "--use-distributed-optimizer"],
            ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
            ["tp2-sp", "tp2-ep2-etp1-sp", "dp2-ep2", "dp2-ep2-noopt", "dp2-noopt", "tp2-sp"],
            [True, True, True, True, True],
        ),
    ],
    ids=["tied", "experts"],
)
def test_equal_replicas_raise_no_alarm(
    flags: Sequence[str],
    launch: Sequence[str],
    layouts: Sequence[str],
    replicated: Sequence[bool],
    tmp_path: Path,
) -> None:
    run = run_megatron(
        2,
        [*flags, *launch, "--train-iters", str(len(layouts) + 2)],
        [CHECK, tours.schedule(layouts)],
        tmp_path,
        inside=count_replicas,
    )
    events = around.events(tmp_path)
    assert [event["event"] for event in events] == ["switch"] * len(replicated), json.dumps(events)
    assert all(event["seconds"]["replicas"] > 0 for event in events)
    words = "replicated regions: "
    counts = [
        int(line.removeprefix(words)) for line in run.logs[0].splitlines() if line.startswith(words)
    ]
    assert [count > 0 for count in counts] == list(replicated), counts
