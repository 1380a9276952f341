"""Samples of each step after a switch, against Megatron's random sampler in the launch layout.

The oracle deals the launch layout's micro-batches as ``cyclic_iter`` and one sampler a rank do it
in a run that never switches.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynatrain_megatron.adapters.samplers import LaunchOrder, ReplaySampler

Layout = tuple[int, int]  # dp, micro-batch size


@dataclass(frozen=True)
class Run:
    """A dataset, the launch layout, where its iterators began, and the layouts that follow."""

    total: int
    launch: Layout
    sharded: bool
    start_rounds: int
    steps: tuple[tuple[int, Layout], ...]  # rounds of the launch in the step, layout of the step

    @property
    def round_size(self) -> int:
        return self.launch[0] * self.launch[1]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    dp, mbs = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    total = draw(st.integers(dp * mbs, 7 * dp * mbs))
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        rounds = draw(st.integers(1, 4))
        size = rounds * dp * mbs
        cut = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        own_mbs = draw(st.sampled_from([n for n in range(1, cut + 1) if cut % n == 0]))
        steps.append((rounds, (cut // own_mbs, own_mbs)))
    start = draw(st.integers(0, 20))
    return Run(total, (dp, mbs), draw(st.booleans()), start, tuple(steps))


def dealt(run: Run) -> list[Iterator[list[int]]]:
    """Micro-batches of each rank of the launch layout, as Megatron deals them."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler
    from megatron.training.training import cyclic_iter

    dp, mbs = run.launch
    start = run.start_rounds * run.round_size
    return [
        cyclic_iter(
            MegatronPretrainingRandomSampler(
                None, run.total, start, mbs, rank, dp, data_sharding=run.sharded
            )
        )
        for rank in range(dp)
    ]


def replayed(run: Run, layout: Layout, consumed: int) -> list[Iterator[list[int]]]:
    """Micro-batches of each rank of ``layout``, from a switch after ``consumed`` samples on."""
    dp, mbs = layout
    order = LaunchOrder(
        run.total,
        dp=run.launch[0],
        mbs=run.launch[1],
        data_sharding=run.sharded,
        start=run.start_rounds * run.round_size,
    )
    return [
        iter(
            ReplaySampler(
                order,
                consumed_samples=consumed,
                micro_batch_size=mbs,
                data_parallel_rank=rank,
                data_parallel_size=dp,
            )
        )
        for rank in range(dp)
    ]


def take(ranks: list[Iterator[list[int]]], num_microbatches: int) -> list[int]:
    return [
        sample for rank in ranks for batch in itertools.islice(rank, num_microbatches)
        for sample in batch
    ]  # fmt: skip


@pytest.mark.host
@given(runs())
# Three ranks of which the first finds one more micro-batch than the others, in each epoch.
@example(Run(10, (3, 1), False, 0, ((2, (1, 2)), (2, (6, 1)), (3, (3, 1)), (4, (2, 2)))))
# The same with one round an epoch: it takes every other permutation.
@example(Run(5, (3, 1), False, 1, ((1, (1, 3)), (1, (3, 1)), (2, (2, 3)))))
def test_every_step_has_the_samples_of_the_launch_layout(run: Run) -> None:
    oracle = dealt(run)
    consumed = run.start_rounds * run.round_size
    in_epoch = run.total // run.round_size
    for rounds, (dp, mbs) in run.steps:
        size = rounds * run.round_size
        expected = take(oracle, rounds)
        got = take(replayed(run, (dp, mbs), consumed), size // (dp * mbs))
        assert Counter(got) == Counter(expected)
        whole = consumed // run.round_size % in_epoch + rounds <= in_epoch
        if whole and run.sharded:
            assert len(set(got)) == size
        consumed += size


@pytest.mark.host
@given(runs())
def test_back_in_the_launch_layout_each_rank_has_its_own_again(run: Run) -> None:
    """Micro-batch by micro-batch, in the same order, over several steps without a switch."""
    oracle = dealt(run)
    before = 2 * run.steps[0][0]
    take(oracle, before)
    back = replayed(run, run.launch, (run.start_rounds + before) * run.round_size)
    for theirs, ours in zip(oracle, back, strict=True):
        assert list(itertools.islice(ours, 9)) == list(itertools.islice(theirs, 9))


@given(runs())
def test_layouts_that_do_not_fit_a_round_skip_and_repeat_nothing(run: Run) -> None:
    """A batch size that the launch layout could not have had: the sequence is cut at any point."""
    sequence = LaunchOrder(
        run.total, dp=run.launch[0], mbs=run.launch[1], data_sharding=run.sharded, start=0
    )  # fmt: skip
    run = Run(run.total, run.launch, run.sharded, 0, run.steps)
    consumed = 0
    for _, (dp, mbs) in run.steps:
        got = take(replayed(run, (dp, mbs), consumed), 2)
        expected = [sequence.sample(consumed + i) for i in range(2 * dp * mbs)]
        assert Counter(got) == Counter(expected)
        consumed += 2 * dp * mbs
