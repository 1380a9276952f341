"""The table of options that hold state: refused ones are refused, the others are in a run."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.adapters.support import OPTIONS, Fate, check_supported
from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.transition.check import check_request
from tests.dry import DryJob
from tests.host import test_around_ends, test_around_interval, test_around_logs, test_data
from tests.ranks import TINY_LLAMA, run_ranks
from tests.support import How

# How a user switches each refused option on, where it is not by its flag alone.
VALUES = {
    "--fault-injector-ranks": "0",
    "--fault-injector-num-ranks": "1",
    "--moe-routing-trace-path": "trace",
    "--cuda-graph-impl": "local",
    "--moe-expert-rank-capacity-factor": "1.5",
    "--non-persistent-ckpt-type": "local",
    "--dsa-indexer-loss-coeff": "0.1",
    "--yaml-cfg": "job.yaml",  # in the test's directory
    "--optimizer": "muon",
    "--moe-flex-dispatcher-backend": "hybridep",
    "--logits-load-dir": "logits",
    "--logits-save-dir": "logits",
    "--fp8-format": "hybrid",
    "--fp4-format": "e2m1",
    "--tensor-parallel-num-weight-shards": "4",
    "--expert-tensor-parallel-num-weight-shards": "4",
    "--dataloader-type": "external",
    "--rampup-batch-size": "4 4 64",
}


# What keeps state of the model or its optimizer where a switch does not read it.
ELSEWHERE = [
    *("--use-megatron-fsdp", "--use-torch-fsdp2", "--optimizer", "--use-precision-aware-optimizer"),
    *("--optimizer-cpu-offload", "--fp8-format", "--fp4-format", "--mla-down-proj-fusion"),
    *("--tensor-parallel-num-weight-shards", "--moe-single-grouped-weight"),
]


def refusal(argv: list[str], source: str = "dp2", target: str = "tp2") -> SwitchRefused | None:
    """What the table says to Megatron's own parse of a command line."""
    from megatron.training.arguments import parse_args

    sys.argv = ["pretrain", *argv]
    args = parse_args()
    if args.yaml_cfg is None:
        args.dataloader_type = args.dataloader_type or "single"  # as Megatron's validation does
    try:
        check_supported(args, ParallelLayout.parse(source), ParallelLayout.parse(target))
    except SwitchRefused as error:
        return error
    return None


@pytest.mark.host
def test_every_refused_option_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, support: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("disable_msc_deprecated: false\nenable_msc: false\n")

    def worker(rank: int) -> dict[str, tuple[str, str]]:
        assert refusal(TINY_LLAMA) is None
        found = {}
        for row in OPTIONS:
            if row.fate is Fate.refused and row.flag.startswith("--"):
                value = VALUES.get(row.flag)
                error = refusal([*TINY_LLAMA, row.flag, *(value or "").split()])
                assert error is not None, row.flag
                found[row.flag] = (error.reason, error.next_step)
        return found

    (found,) = run_ranks(1, worker)
    for row in OPTIONS:
        if row.fate is Fate.refused and row.flag in found:
            shown = f"{row.flag} {VALUES.get(row.flag, '')}".strip()
            assert found[row.flag] == (
                f"{shown} is not supported in a switch: {row.how}",
                f"run without {row.flag}, or stay in layout dp2",
            )
            if row.flag in ELSEWHERE:
                support(f"{row.what} (`{row.flag}`)", How.REFUSED)
    refused = [row.flag for row in OPTIONS if row.fate is Fate.refused]
    assert sorted(set(refused) - set(found)) == ["one-logger"]
    assert len(set(refused)) == len(refused)


@pytest.mark.host
def test_an_option_that_the_target_would_turn_on_is_refused() -> None:
    def worker(rank: int) -> str:
        shards = ["--tensor-model-parallel-size", "4", "--tensor-parallel-num-weight-shards", "4"]
        job, source = DryJob([*TINY_LLAMA, *shards]), ParallelLayout(tp=4)
        live = Namespace(rank=0, global_batch_size=8)
        with pytest.raises(SwitchRefused) as refused:
            check_request(
                "tp2",
                launch=job.launch,
                launch_layout=source,
                source=source,
                args=job.launch.validated(source, live),
                consumed_samples=0,
            )
        return refused.value.reason

    (reason,) = run_ranks(1, worker)
    assert reason.startswith("--tensor-parallel-num-weight-shards 4 is not supported in a switch")


@pytest.mark.host
def test_what_is_mixed_or_kept_by_groups_is_refused_where_it_is_in_use() -> None:
    flex = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"]
    mixed = ["--moe-mlp-glu-interleave-size", "32"]

    def worker(rank: int) -> list[str]:
        assert refusal([*TINY_LLAMA, *flex[2:]]) is None  # what idles
        assert refusal([*TINY_LLAMA, *mixed], "ep2-dp2", "pp2-dp2") is None
        return [
            str(refusal([*TINY_LLAMA, *flex])),
            str(refusal([*TINY_LLAMA, *mixed], "dp2", "tp2")),
            str(refusal([*TINY_LLAMA, *mixed], "tp2-etp1", "tp2-etp2")),
        ]

    ((kept, by_tp, by_etp),) = run_ranks(1, worker)
    assert kept.startswith("--moe-flex-dispatcher-backend deepep is not supported in a switch")
    for told in (by_tp, by_etp):
        assert told.startswith("--moe-mlp-glu-interleave-size 32 mixes the rows")
        assert "etp=1 -> etp=2" in told and "keep etp at 1" in told


@pytest.mark.host
def test_one_logger_is_refused_where_its_package_is() -> None:
    def worker(rank: int) -> tuple[str, bool]:
        module = types.ModuleType("one_logger")
        module.__spec__ = ModuleSpec("one_logger", None)
        sys.modules["one_logger"] = module
        return str(refusal(TINY_LLAMA)), refusal([*TINY_LLAMA, "--no-one-logger"]) is None

    ((message, fine),) = run_ranks(1, worker)
    assert message.startswith("one-logger is not supported in a switch")
    assert "add --no-one-logger" in message and fine


def test_every_other_option_is_in_a_run_of_these_tests() -> None:
    logs = test_around_logs
    runs = [*test_around_ends.FLAGS, test_around_interval.FLAGS, logs.FLAGS, logs.ENDS]
    runs += test_data.FLAGS
    given = {flag for flags in [*runs, logs.flags(Path())] for flag in flags}
    others = {row.flag for row in OPTIONS if row.fate is not Fate.refused}
    assert others <= given, sorted(others - given)
    assert all(row.seen is None for row in OPTIONS if row.fate is not Fate.refused)
    assert all(row.seen is not None for row in OPTIONS if row.fate is Fate.refused)
