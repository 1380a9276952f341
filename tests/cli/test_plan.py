"""`dynatrain plan` and `dynatrain simulate`: what they print, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynatrain_megatron.ahead import paper
from dynatrain_megatron.ahead.cases import Case, read_cases
from dynatrain_megatron.cli import main
from dynatrain_megatron.config import compose_ahead

DOCS = Path(__file__).parents[2] / "docs" / "plan.md"
SMALL = ["model=llama2_7b", "model.num_layers=4", "topology={ranks_per_node: 4}"]
PAIR = [*SMALL, "source=tp2-pp2-dp2", "target=tp4-dp2"]
JOB = shlex.split(
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --vocab-size 1000 "
    "--untie-embeddings-and-output-weights --seq-length 32 --global-batch-size 48 --lr 1e-4 "
    "--tensor-model-parallel-size 2 --use-distributed-optimizer --bf16"
)


def shown(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    assert main([*argv, "--json"] if "--" not in argv else _with_json(argv)) == code
    return json.loads(capsys.readouterr().out)


def _with_json(argv: tuple[str, ...]) -> list[str]:
    at = argv.index("--")
    return [*argv[:at], "--json", *argv[at:]]


def told(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_a_plan_has_all_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "plan", *PAIR)
    assert found["feasible"] and (found["source"], found["target"]) == ("tp2-pp2-dp2", "tp4-dp2")
    nbytes = found["bytes"]
    assert nbytes["moved"] == nbytes["lower_bound"] > 0 and found["gap"] == 1
    assert nbytes["within_nodes"] + nbytes["between_nodes"] == nbytes["moved"]
    # Main parameters and two moments are on one rank each.
    assert nbytes["moved"] + nbytes["retained"] == pytest.approx(12 * found["parameters"], rel=1e-3)
    assert nbytes["rebuilt"] == pytest.approx(2 * found["parameters"] * (2 - 1), rel=0.01)
    memory, state = found["memory"], 18 * found["parameters"]
    assert state / 8 < memory["before"] < memory["kept"] and memory["freed"] <= memory["kept"]
    busy = found["busiest"][0]
    assert 0 <= busy["rank"] < 8 and busy["sent"] + busy["received"] > 0
    seconds = found["simulated_s"]
    assert seconds["total"] == pytest.approx(sum(seconds["wire"]) + seconds["rebuild"])
    assert all(a >= b > 0 for a, b in zip(seconds["wire"], seconds["busiest_link"], strict=True))
    assert found["predicted_s"] > 0 and found["ops"] > 0 and found["rounds"] > 0
    assert main(["plan", *PAIR]) == 0
    table = capsys.readouterr().out
    for name in (
        "from",
        "to",
        "moved",
        "kept",
        "rebuilt",
        "busiest",
        "rounds",
        "memory",
        "seconds",
    ):
        assert re.search(rf"^{name} ", table, re.MULTILINE), name


def test_a_layout_that_cannot_be_is_said_with_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "plan", *SMALL, "source=tp2-pp2-dp2", "target=tp3", code=1)
    assert found["feasible"] is False
    assert found["reason"].startswith("tp*pp*cp=3*1*1=3 must divide world=8")
    assert main(["plan", *SMALL, "source=tp2-dp2", "target=pp3-dp2"]) == 0  # uneven stages
    assert "4 layers over 3 stages" in capsys.readouterr().out
    assert main(["plan", *SMALL, "source=tp2-dp2", "target=pp8-dp2"]) == 1
    assert "feasible   no: pp*vpp=8 stages are more than" in capsys.readouterr().out


def test_a_schedule_goes_on_from_where_it_got(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = (
        "schedule=[{iteration: 1, layout: tp4-dp2}, {iteration: 2, layout: tp3},"
        " {iteration: 3, layout: {tp: 1}}]"
    )
    found = shown(capsys, "plan", *SMALL, "source=tp2-pp2-dp2", schedule, code=1)
    assert [one["feasible"] for one in found] == [True, False, True]
    assert (found[2]["source"], found[2]["target"]) == ("tp4-dp2", "dp8")


def test_worlds_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "plan", *SMALL, "source=tp2-dp2", "target=tp2-pp2-dp2")
    assert found["ranks"] == {"source": 4, "target": 8}
    (found,) = shown(capsys, "plan", *SMALL, "source=tp2-pp2-dp2", "target={pp: 1, world: 4}")
    assert found["ranks"] == {"source": 8, "target": 4}


def test_weights_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "plan", *PAIR, "--weights-only")
    assert found["bytes"]["rebuilt"] == 0
    total = found["bytes"]["moved"] + found["bytes"]["retained"]
    assert total == pytest.approx(2 * 2 * found["parameters"], rel=1e-2)


def test_what_another_placement_would_save(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SMALL, "source=tp2-pp2-dp2", "target=pp2-dp4"]
    (found,) = shown(capsys, "plan", *given, "engine.placement=best")
    assert 0 < found["bytes"]["saved_by_best_placement"] < found["bytes"]["moved"]
    assert main(["plan", *given, "engine.placement=best"]) == 0
    assert "less would move" in capsys.readouterr().out
    (found,) = shown(capsys, "plan", *given)
    assert found["bytes"]["saved_by_best_placement"] is None


def test_memory_may_be_short(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "plan", *PAIR)
    memory = {name: nbytes / 2**30 for name, nbytes in found["memory"].items()}
    between = (memory["freed"] + memory["kept"]) / 2
    assert memory["before"] < between < memory["kept"]
    assert main(["plan", *PAIR, "--memory-gib", str(between)]) == 0
    assert "keep_source=always (more than there is)" in capsys.readouterr().out
    (found,) = shown(capsys, "plan", *PAIR, "--memory-gib", str(memory["before"] / 2), code=1)
    assert not found["feasible"] and "the state before the switch takes" in found["reason"]


def test_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy")
    (found,) = shown(capsys, "plan", *PAIR, "--bound")
    assert 0 < found["bound"]["least"] <= found["bound"]["planned"] * 1.001
    assert found["bound"]["planned"] <= 1.05 * found["bound"]["least"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    assert main(["plan", *PAIR, "--picture", str(path)]) == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert len(content) > 10_000
    capsys.readouterr()
    for wrong in ("plan.txt", "no/where.png"):
        assert "--picture" in told(capsys, "plan", *PAIR, "--picture", str(tmp_path / wrong))


def test_the_flags_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "plan", "target=pp2-dp4", "--world", "8", "--", *JOB)
    assert (found["source"], found["target"]) == ("tp2-dp4", "pp2-dp4")
    assert found["parameters"] == 8 * (64 * 64 + 128 * 64 + 3 * 64 * 128 + 128) + 64 + 2 * 1024 * 64
    (found,) = shown(capsys, "plan", "target={mbs: 5}", "--world", "8", "--", *JOB, code=1)
    assert "global_batch_size=48" in found["reason"]
    for flags, message in (
        ([], "--world goes with Megatron flags"),
        (JOB[2:], "--num-layers is missing"),
        ([*JOB, "--mtp-num-layers", "1"], "--mtp-num-layers"),
        ([*JOB, "--num-layers", "many"], "'many' is not a whole number"),
        ([*JOB, "--tensor-model-parallel-size", "3"], "must divide --world 8"),
    ):
        given = ["source=tp2", "target=tp4", "--world", "8", *(["--", *flags] if flags else [])]
        assert message in told(capsys, "plan", *given)
    assert "add --world N" in told(capsys, "plan", "target=tp4", "--", *JOB)
    assert "exclude" in told(capsys, "plan", "model=llama2_7b", "target=tp4", "--world", "8", "--",
                             *JOB)  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "model is missing"),
        (["model=llama2_7b"], "source is missing"),
        (["model=llama2_7b", "source=tp2"], "target is missing"),
        (["model=llama", "source=tp2", "target=pp2"], "model=llama is not allowed"),
        (["model={hidden: 3}", "source=tp2", "target=pp2"], "model lacks num_layers"),
        (["model=llama2_7b", "model.hiden=3", "source=tp2", "target=pp2"], "did you mean 'hidden'"),
        (["model=llama2_7b", "model.groups=5", "source=tp2", "target=pp2"], "a divisor of"),
        (["model=llama2_7b", "model.hidden=0", "source=tp2", "target=pp2"], "from 1 to"),
        (["model=llama2_7b", "source=tp64", "target=pp2"], "source=tp64 cannot be: tp=64 must"),
        (["model=llama2_7b", "source=dp999999999", "target=pp2"], "is above 131072"),
        (["model=llama2_7b", "source=tp2", "target=pp2", "topology=x.yaml"], "cannot be read"),
        (["model=llama2_7b", "source=tp2", "target=pp2", "topology={nods: 1}"], "did you mean"),
        (["nothing=1"], "key 'nothing' is unknown"),
    ],
)
def test_what_is_missing_or_wrong(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "simulate"):
        assert message in told(capsys, command, *overrides)


def test_cfg_shows_the_configuration_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cfg=job", "model=llama2_7b"]) == 0
    out = capsys.readouterr().out
    assert "num_layers: 32" in out and "ranks_per_node: 8" in out


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    command = [sys.executable, "-m", "dynatrain_megatron.cli", "plan", *PAIR]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    run.stdout.close()
    assert run.stderr is not None
    assert run.stderr.read() == b"" and run.wait() == 1


def test_a_bundle_keeps_its_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "x.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /topology: a800_4nic\n"
        "source: tp4-dp2\ntarget: tp2-dp4\n"
    )
    given = ["model=llama2_7b", "model.num_layers=2", "experiment=x"]
    (found,) = shown(capsys, "simulate", "--dynatrain-config-dir", str(tmp_path), *given)
    assert found["topology"]["node_width"] == 4 and found["topology"]["far_gb_s"] == 25
    (found,) = shown(
        capsys, "simulate", "--dynatrain-config-dir", str(tmp_path), *given, "topology=h200"
    )
    assert found["topology"]["node_width"] == 8


def test_slower_links_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["simulate", "model=llama2_7b", "source=tp8-pp2-dp2", "target=tp4-pp4-dp2"]
    seconds = {}
    for name, more in {
        "h100": [],
        "a800": ["topology=a800"],
        "narrow": ["topology=a800_4nic"],
        "half": ["topology=a800", "--efficiency", "0.4"],
    }.items():
        (found,) = shown(capsys, *given, *more)
        seconds[name] = found["simulated_s"]["total"]
    assert seconds["h100"] < seconds["a800"] < seconds["narrow"]
    assert seconds["half"] == pytest.approx(2 * seconds["a800"], rel=0.1)


def test_the_papers_setups_take_half_of_what_is_published(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_of_each = {case.name: case for case in paper.CASES}
    for case in paper.CASES:
        own = [f"model={case.model}", f"source={case.source}", f"target={case.target}"]
        (read,) = read_cases(compose_ahead(own).config)
        assert isinstance(read, Case)
    monkeypatch.setattr(paper, "CASES", tuple(one_of_each.values()))
    rows = shown(capsys, "simulate", "--paper")
    large = [row for row in rows if row["published_s"] is not None]
    assert [row["case"] for row in large] == ["70B", "235B"]
    for row in large:
        assert row["ranks"] == {"source": 128, "target": 128}
        assert row["topology"]["far_gb_s"] == 25 and row["topology"]["efficiency"] == 0.8
        assert row["share_of_published"] <= 0.5, row
    assert "models and layouts of its own" in told(capsys, "simulate", "--paper", "source=tp2")


WORDS = st.sampled_from(
    ["model=llama2_7b", "model.num_layers=2", "model={}", "model=null", "source=tp2", "source=pp2",
     "source={tp: 2, world: 4}", "target=tp2", "target={ep: 2}", "target=pipeline:E(t|)*2",
     "target=tensor", "topology=auto", "topology={node_width: 1}", "topology={speeds: {x: 1}}",
     "topology={nodes: {a: {hosts: b}}}", "topology={nodes: {a: {ranks: 0-1}}}",
     "experiment=long_context", "schedule=[]", "engine.window_ops=1", "=", "cfg=job", "source=auto"]
)  # fmt: skip


@settings(
    max_examples=20, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(st.lists(WORDS, max_size=5), st.sampled_from(["plan", "simulate"]))
def test_any_words_give_a_result_or_one_message(
    capsys: pytest.CaptureFixture[str], words: list[str], command: str
) -> None:
    code = main([command, "model.num_layers=2", *words])
    captured = capsys.readouterr()
    assert code in (0, 1, 2) and "Traceback" not in captured.err
    assert bool(captured.out) == (code < 2)
