"""`dynatrain layouts`: what is asked, what is told, and mistakes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dynatrain_megatron.advisor import advise
from dynatrain_megatron.cli import build_parser, main
from dynatrain_megatron.cli.layouts import print_table, read_question
from dynatrain_megatron.errors import DynaTrainError
from dynatrain_megatron.layout import ParallelLayout, read_changes

LLAMA = ["--gpus", "64", "--memory", "80GiB", "--model", "70B", "--global-batch-size", "1024"]
TINY = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 "
    "--swiglu --ffn-hidden-size 128 --bf16 --lr 1e-4 --micro-batch-size 2 --global-batch-size 48"
).split()


def layouts(*argv: str, code: int = 0) -> None:
    assert main(["layouts", *argv]) == code


def test_a_table_of_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    layouts(*LLAMA, "--top", "3")
    told, header, *rows, last = capsys.readouterr().out.splitlines()
    assert told.startswith("69.0B parameters on 64 GPUs, 8 a node, 73.6 GiB usable; sequences of")
    assert told.endswith("4096, global batch 1024, recompute none")
    assert header.split()[:3] == ["layout", "µbatches", "GiB"] and "tp" in header
    assert len(rows) == 3 and rows[0].split()[7] == "1.00"
    for row in rows:
        assert ParallelLayout.parse(row.split()[0]).world == 64
        assert float(row.split()[2]) <= 73.6
    assert " layouts fit, " in last and last.endswith(" do not.")


def test_a_narrow_terminal_has_the_layouts_whole(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["layouts", *LLAMA])
    asked = read_question(args)
    found = advise(asked.workload, asked.world, asked.machine)
    print_table(Console(width=80), asked, found, 2)
    header, first, *_ = capsys.readouterr().out.splitlines()[1:]
    assert "weights" not in header and first.split()[0] == str(found.fitting[0].layout)


def test_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    layouts(*LLAMA, "--top", "2", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["machine"]["gpus_per_node"]) == (64, 8)
    assert found["parameters"] == 68_976_648_192
    best, second = found["layouts"]
    assert best["score"] <= second["score"] and found["num_fitting"] > 2
    for one in (best, second):
        memory, step = one["memory_bytes"], one["predicted_s"]
        parts = ("weights", "grads", "optimizer", "activations")
        assert memory["total"] == sum(memory[part] for part in parts) <= found["usable_bytes"]
        assert step["total"] == pytest.approx(sum(step.values()) - step["total"])
        degrees = one["degrees"]
        assert str(ParallelLayout(**degrees)) == one["layout"]
        assert one["num_microbatches"] * degrees["dp"] * degrees["mbs"] == 1024


def test_the_flags_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    layouts("--gpus", "12", "--json", "--top", "1000", "--", *TINY)
    found = json.loads(capsys.readouterr().out)
    assert (found["seq_length"], found["global_batch_size"]) == (128, 48)
    assert found["usable_bytes"] is None and found["num_too_large"] == 0
    degrees = [one["degrees"] for one in found["layouts"]]
    assert all(one["mbs"] == 2 and not one["dist_opt"] for one in degrees)
    # Eight GPUs a node unless said otherwise: no tp of 3, 6 or 12.
    assert {one["tp"] for one in degrees} == {1, 2, 4}
    layouts("--gpus", "12", "--json", "--", *TINY, "--use-distributed-optimizer")
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    read_changes(best["layout"])


def test_options_go_before_flags(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seq-length", "256", "--global-batch-size", "24", "--micro-batch-size", "1"]
    layouts("--gpus", "4", "--recompute", "full", *options, "--json", "--", *TINY)
    found = json.loads(capsys.readouterr().out)
    assert (found["seq_length"], found["global_batch_size"]) == (256, 24)
    assert found["recompute"] == "full"
    assert {one["degrees"]["mbs"] for one in found["layouts"]} == {1}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--gpus", "2", "--memory", "16GiB", "--model", "70B"],
            "none of 8 layouts of 2 ranks fits: the least is ",
        ),
        (
            ["--gpus", "17", "--global-batch-size", "64", "--model", "1B"],
            "no layout of 17 ranks divides the model and its batch (layers 16, heads 32, "
            "vocabulary 128256, global batch 64, micro-batch 1, GPUs a node 8); try another",
        ),
    ],
)
def test_where_there_is_none_it_is_said_why(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts(*argv, code=1)
    printed = capsys.readouterr()
    assert printed.err.startswith(f"dynatrain layouts: {told}") and not printed.out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "name the model by --model or by the job's Megatron flags after --; got neither"),
        (["--model", "7B", "--", *TINY], "got both"),
        (["--", "--num-layers", "8"], "--hidden-size, --num-attention-heads, --vocab-size"),
        (["--", *TINY, "--hidden-size", "x"], "argument --hidden-size: 'x' is not a whole number"),
        (
            ["--", *TINY, "--num-attention-heads", "7"],
            "--num-attention-heads 7 must divide --hidden-size 64",
        ),
        (
            ["--", *TINY, "--group-query-attention", "--num-query-groups", "3"],
            "--num-query-groups 3 must divide --num-attention-heads 8",
        ),
        (["--", *TINY, "--mtp-num-layers", "1"], "--mtp-num-layers 1: the memory of such a model"),
    ],
)
def test_which_model_must_be_clear(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts("--gpus", "8", *argv, code=2)
    printed = capsys.readouterr().err
    assert told in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--model", "7B"], "the following arguments are required: --gpus"),
        (["--gpus", "0"], "'0' is not a whole number of at least 1"),
        (["--gpus", "1e3"], "'1e3' is not a whole number of at least 1"),
        (["--gpus", "999999999"], "'999999999' is more than 131,072"),
        (["--gpus", "8", "--seq-length", "9" * 40], "is more than 999,999,999"),
        (["--gpus", "8", "--memory", "80"], "'80' is not a size; write a number and a unit"),
        (["--gpus", "8", "--memory", "80gb"], "'80gb' is not a size"),
        (["--gpus", "8", "--memory", "0GiB"], "'0GiB' is not a size"),
        (["--gpus", "8", "--model", "8B"], "invalid choice: '8B'"),
        (["--gpus", "8", "--top", "-1"], "argument --top"),
        (["--gpus", "8", "--recompute", "half"], "invalid choice: 'half'"),
    ],
)
def test_wrong_options(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["layouts", *argv])
    assert caught.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80GiB", 80 << 30), ("80GB", 80 * 10**9), ("1.5TiB", 3 << 39), ("512MiB", 1 << 29)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    args = build_parser().parse_args(["layouts", "--gpus", "1", "--model", "1B", "--memory", text])
    assert read_question(args).machine.memory_bytes == num_bytes


WORDS = st.sampled_from(
    [*TINY, "--gpus", "8", "--model", "7B", "--", "0", "1.5GiB", "é", "--memory", "--top",
     "--num-experts", "[1]*8"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=10))
def test_any_words_are_answered(words: list[str]) -> None:
    try:
        args = build_parser().parse_args(["layouts", "--gpus", "4", *words])
    except SystemExit as error:
        assert error.code in (0, 2)
        return
    try:
        read_question(args)
    except DynaTrainError as error:
        assert error.exit_code == 2
