"""Batch sizes that change, against Megatron's own calculator."""

from __future__ import annotations

from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.adapters.batches import (
    check_batches,
    constant_batch_size,
    consumed_after,
)
from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout

DP1, DP2, DP3, DP4 = (ParallelLayout(dp=dp) for dp in (1, 2, 3, 4))


def arguments(
    schedule: str | None = None, *, size: int = 12, decrease: bool = False, seq_length: int = 1
) -> Namespace:
    return Namespace(
        step_batch_size_schedule=schedule,
        global_batch_size=size,
        decrease_batch_size_if_needed=decrease,
        seq_length=seq_length,
    )


@pytest.mark.host
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 30), min_size=3, max_size=3),
    st.integers(1, 3),
    st.integers(0, 40),
)
def test_samples_after_an_iteration_are_those_that_megatron_counts(
    sizes: list[int], lengths: list[int], seq_length: int, iterations: int
) -> None:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    tokens = [0]
    for length in lengths[: len(sizes) - 1]:
        tokens.append(tokens[-1] + length * seq_length)
    text = " ".join(f"{since}:{size}" for since, size in zip(tokens, sizes, strict=True))
    calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, seq_length)
    consumed = 0
    for _ in range(iterations):
        calculator.update(consumed, consistency_check=True)
        consumed += calculator.get_current_running_global_batch_size()
    assert consumed_after(arguments(text, seq_length=seq_length), iterations) == consumed


def test_samples_of_a_constant_batch() -> None:
    assert consumed_after(arguments(size=12), 3) == 36


@pytest.mark.host
def test_all_batch_sizes_to_come_count() -> None:
    args = arguments("0:3 9:4 17:8")
    assert constant_batch_size(args) is None
    check_batches(args, DP1, DP2, 9)
    check_batches(args, DP1, DP4, 10)
    with pytest.raises(LayoutError) as refused:
        check_batches(args, DP1, DP2, 8)
    assert str(refused.value) == (
        "mbs*dp=1*2=2 must divide the batch size of 3 that --step-batch-size-schedule gives from "
        "sample 0 on (3 mod 2 = 1)"
    )
    with pytest.raises(LayoutError, match=r"size of 4 that .* from sample 9 on"):
        check_batches(args, DP1, DP3, 0)


def test_a_batch_that_would_be_cut_to_another_size_is_refused() -> None:
    args = arguments(size=9, decrease=True)
    assert constant_batch_size(args) is None
    check_batches(args, DP2, DP4, 0)
    with pytest.raises(LayoutError) as refused:
        check_batches(args, DP2, DP3, 0)
    assert str(refused.value) == (
        "--decrease-batch-size-if-needed gives steps of 9 samples with mbs*dp=1*3=3, but of 8 in "
        "layout dp2"
    )


def test_any_other_batch_is_left_to_the_rules_of_layouts() -> None:
    args = arguments(size=12)
    assert constant_batch_size(args) == 12
    check_batches(args, DP2, DP3, 0)
