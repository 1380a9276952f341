"""Megatron's flags, and a job's arguments, as a workload."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.advisor import (
    ElementBytes,
    Recompute,
    layout_options,
    read_flags,
    workload_of,
)
from dynatrain_megatron.errors import ConfigError
from dynatrain_megatron.shapes import MODELS, Model
from dynatrain_megatron.shapes.models import Experts
from tests.shapes.test_rosters import CASES

DENSE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 "
    "--untie-embeddings-and-output-weights --swiglu --ffn-hidden-size 128 --bf16"
).split()


def refused(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        workload_of(read_flags([*DENSE, *flags]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_flags_give_the_model_that_megatron_builds_of_them(name: str) -> None:
    # Biases, learned positions and norms of queries are too small to count in an estimate.
    small = {"biases": False, "norm_biases": False, "positions": 0, "qk_norm": False}
    assert workload_of(read_flags(CASES[name].flags)).model == replace(CASES[name].model, **small)


def test_large_models_by_their_flags() -> None:
    llama = (
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 --vocab-size 32000 "
        "--make-vocab-size-divisible-by 64 --swiglu --untie-embeddings-and-output-weights --bf16"
    )
    assert workload_of(read_flags(llama.split())).model == MODELS["70B"]
    deepseek = (
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--kv-channels 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
        "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 "
        "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
        "--moe-router-topk 8 --moe-router-enable-expert-bias --moe-layer-freq ([0]*3+[1]*58) "
        "--swiglu --untie-embeddings-and-output-weights --vocab-size 129280 --seq-length 4096"
    )
    assert workload_of(read_flags(deepseek.split())).model == MODELS["671B"]


def test_what_is_left_out_is_as_megatron_has_it() -> None:
    flags = "--num-layers 2 --hidden-size 768 --num-attention-heads 12 --seq-length 64"
    found = workload_of(read_flags([*flags.split(), "--vocab-size", "50257"]))
    assert found.model == Model(
        num_layers=2, hidden=768, ffn=3072, heads=12, groups=12, head=64, vocab=50304,
        tied=True, gated=False,
    )  # fmt: skip
    assert found.element_bytes == ElementBytes(param=4, grad=4, optimizer=8)
    assert (found.recompute, found.keeps_scores) == (Recompute.none, False)
    gated = workload_of(read_flags([*flags.split(), "--vocab-size", "9", "--swiglu"])).model
    assert gated.ffn == 2048 and gated.vocab == 128


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ElementBytes()),
        ("--grad-reduce-in-bf16", ElementBytes(grad=2)),
        ("--optimizer sgd", ElementBytes(optimizer=8)),
        ("--optimizer sgd --sgd-momentum 0", ElementBytes(optimizer=4)),
    ],
)
def test_bytes_of_an_element(flags: str, expected: ElementBytes) -> None:
    assert workload_of(read_flags([*DENSE, *flags.split()])).element_bytes == expected
    half = [flag if flag != "--bf16" else "--fp16" for flag in DENSE]
    assert workload_of(read_flags(half)).element_bytes == ElementBytes(grad=2)
    full = [*half, "--accumulate-allreduce-grads-in-fp32"]
    assert workload_of(read_flags(full)).element_bytes == ElementBytes()


@pytest.mark.parametrize(
    ("flags", "recompute", "keeps_scores"),
    [
        ("--recompute-granularity full", Recompute.full, False),
        ("--recompute-activations", Recompute.selective, False),
        ("--transformer-impl local", Recompute.none, True),
        ("--attention-backend unfused", Recompute.none, True),
    ],
)
def test_what_is_kept(flags: str, recompute: Recompute, keeps_scores: bool) -> None:
    found = workload_of(read_flags([*DENSE, *flags.split()]))
    assert (found.recompute, found.keeps_scores) == (recompute, keeps_scores)


def test_options_of_the_layout() -> None:
    assert str(layout_options(read_flags(DENSE))) == "dp1-noopt"
    flags = (
        "--tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer "
        "--num-distributed-optimizer-instances 2 --micro-batch-size 3 --use-tp-pp-dp-mapping"
    )
    found = layout_options(read_flags([*DENSE, *flags.split()]))
    assert str(found) == "tp4-dp2-sp-instances2-mbs3-order:tp.cp.ep.pp.dp"


@pytest.mark.parametrize(
    ("freq", "first"),
    [("1", 0), ("[1]*8", 0), ("([0]*3+[1]*5)", 3), ("[0]+[1]*7", 1), ("([0]*2+[1]*2)*1+[1]*4", 2)],
)
def test_which_layers_have_experts(freq: str, first: int) -> None:
    flags = [*DENSE, "--num-experts", "4", "--moe-layer-freq", freq]
    assert workload_of(read_flags(flags)).model.experts == Experts(
        count=4, ffn=128, first_layer=first
    )


@pytest.mark.parametrize(
    "freq",
    ["", "0", "-1", "x", "[2]*8", "[1]*7", "[0]*8", "[0,1]*4", "2", "__import__('os')", "[1]*10**9",
     "[1]*9999*9999", "(" * 500, "[1]+1", "1.5", "[True]*8", "9" * 5000],
)  # fmt: skip
def test_other_patterns_of_experts_are_refused(freq: str) -> None:
    message = refused("--num-experts", "4", f"--moe-layer-freq={freq}")
    assert message.startswith("--moe-layer-freq") and len(message) < 400


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-layers 0", "argument --num-layers: '0' is not a whole number of at least 1"),
        ("--hidden-size many", "argument --hidden-size: 'many' is not a whole number"),
        ("--seq-length", "argument --seq-length: expected one argument"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: the memory of such a model is not estimated"),
        ("--hybrid-layer-pattern M*-", "--hybrid-layer-pattern M*-: the memory of such a model"),
        ("--multi-latent-attention", "--multi-latent-attention without --q-lora-rank"),
        ("--optimizer muon", "--optimizer 'muon': its memory is not estimated; adam and sgd are"),
        ("--recompute-granularity half", "--recompute-granularity 'half' must be selective or"),
    ],
)
def test_what_cannot_be_estimated_is_named(flags: str, told: str) -> None:
    assert told in refused(*flags.split())


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(["--num-layers", "2", "--lr", "1e-4"])
    assert str(caught.value) == (
        "Megatron flags: --hidden-size, --num-attention-heads, --vocab-size, --seq-length are "
        "missing; memory cannot be estimated without. The flags of the job follow --"
    )


def test_the_arguments_of_a_running_job_will_do() -> None:
    flags = read_flags([*DENSE, "--num-experts", "4"])
    values = vars(flags) | {
        "padded_vocab_size": 1536,
        "moe_layer_freq": [0, 0, *[1] * 6],
        "attention_backend": Namespace(name="unfused"),
    }
    for unknown in ("hybrid_override_pattern", "transformer_impl"):  # not in every version
        del values[unknown]
    found = workload_of(Namespace(**values))
    assert found.model == replace(
        workload_of(flags).model, vocab=1536, experts=Experts(count=4, ffn=128, first_layer=2)
    )
    assert found.keeps_scores


WORDS = st.sampled_from(
    [*DENSE, "--num-experts", "--moe-layer-freq", "[1]*8", "4", "-1", "1e9", "--", "-", "--bf16=1",
     "--multi-latent-attention", "--num-layers=3", "--num", "--optimizer", "--kv-channels",
     "9" * 40]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(WORDS | st.text(max_size=12), max_size=12), st.booleans())
def test_any_words_give_a_workload_or_a_message(words: list[str], whole: bool) -> None:
    try:
        found = workload_of(read_flags([*DENSE, *words] if whole else words))
    except ConfigError as error:
        assert len(str(error)) < 1000
    else:
        assert found.model.num_layers >= 1
