"""Keeps the samples of each training step what they are in a run that never switches.

Megatron's ``single`` loader reads the dataset in order, so which samples a step has does not depend
on the layout. Its ``cyclic`` loader lets every data-parallel rank shuffle for itself, so which
samples a step has depends on dp and the micro-batch size. After a switch the order in which the
*launch* layout would go on is taken as one sequence, and cut for the layout in force::

    launch dp2 mbs2        rank 0   rank 1 | rank 0   rank 1 | …      what Megatron deals
    position                0  1     2  3  |  4  5     6  7  | …      number of consumed samples
    dp1 mbs4                rank 0         | rank 0          | …      the same samples in a step

A *round* is one micro-batch of each data-parallel rank of the launch layout.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LaunchData:
    """How the launch layout deals out samples, and where the run began to do so."""

    dp: int
    mbs: int
    eval_mbs: int
    consumed_train_samples: int
    consumed_valid_samples: int

    @classmethod
    def of(cls, args: Namespace) -> LaunchData:
        """Read from Megatron's arguments, before the first step."""
        return cls(
            dp=args.data_parallel_size,
            mbs=args.micro_batch_size,
            eval_mbs=getattr(args, "eval_micro_batch_size", args.micro_batch_size),
            consumed_train_samples=args.consumed_train_samples,
            consumed_valid_samples=args.consumed_valid_samples,
        )


class LaunchOrder:
    """The endless sequence of samples that Megatron's random sampler deals in one layout.

    ``dp`` and ``mbs`` are that layout's, ``start`` is the position where its iterators were made.
    Follows ``MegatronPretrainingRandomSampler`` of megatron-core 0.18 and 0.19: an epoch is a
    whole number of rounds, what is left of the dataset is dropped. Without ``data_sharding`` the
    ranks share one permutation, of which some of them may find one more micro-batch than others at
    its end; they take it at the first round of the next epoch, while the others have gone on.
    """

    def __init__(
        self, total_samples: int, *, dp: int, mbs: int, data_sharding: bool, start: int
    ) -> None:
        self._dp = dp
        self._mbs = mbs
        self._sharded = data_sharding
        self._round_size = dp * mbs
        self._start_round = start // self._round_size
        self._rounds_per_epoch = total_samples // self._round_size
        if data_sharding:
            self._permuted = self._rounds_per_epoch * mbs  # each rank its own part of the dataset
        else:
            self._permuted = total_samples // mbs * mbs
        left_over = self._permuted - self._rounds_per_epoch * self._round_size
        self._num_long_ranks = 0 if data_sharding else max(0, left_over - (mbs - 1) * dp)
        self._permutations: dict[int, np.ndarray] = {}  # by epoch

    def sample(self, position: int) -> int:
        """Index in the dataset of the sample number ``position`` of the run."""
        round_, slot = divmod(position, self._round_size)
        epoch, offset = divmod(round_, self._rounds_per_epoch)
        rank, i = divmod(slot, self._mbs)
        if self._sharded:
            chosen = self._permutation(epoch)[offset * self._mbs + i]
            return int(rank * self._permuted + chosen)
        if self._is_late(rank, round_, offset):
            epoch, offset = epoch - 1, self._rounds_per_epoch
        return int(self._permutation(epoch)[offset * self._round_size + i * self._dp + rank])

    def _is_late(self, rank: int, round_: int, offset: int) -> bool:
        """Whether a rank still takes its last micro-batch of the epoch before."""
        if offset or round_ == self._start_round or rank >= self._num_long_ranks:
            return False
        # With one round an epoch such a rank misses every other permutation.
        return self._rounds_per_epoch > 1 or (round_ - self._start_round) % 2 == 1

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            for old in [e for e in self._permutations if e < epoch - 1]:
                del self._permutations[old]
            generator = torch.Generator()
            generator.manual_seed(epoch)
            self._permutations[epoch] = torch.randperm(self._permuted, generator=generator).numpy()
        return self._permutations[epoch]


class ReplaySampler:
    """Batch sampler of one data-parallel rank: its part of ``order`` from ``consumed_samples`` on.

    Endless, so that an epoch may end within a micro-batch.
    """

    def __init__(
        self,
        order: LaunchOrder,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        self._order = order
        self._first = consumed_samples + data_parallel_rank * micro_batch_size
        self._size = micro_batch_size
        self._stride = micro_batch_size * data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        position = self._first
        while True:
            yield [self._order.sample(p) for p in range(position, position + self._size)]
            position += self._stride


@contextlib.contextmanager
def replaying(launch: LaunchData, args: Namespace) -> Iterator[None]:
    """Random samplers that Megatron makes meanwhile go on in the order of the launch layout.

    ``args`` are the arguments in force, with the run's position. Local; imports nothing where the
    run has no such samplers.
    """
    if args.dataloader_type != "cyclic":
        yield
        return
    from megatron.core.datasets.utils import Split
    from megatron.training.datasets import data_samplers as host

    def sampler(
        dataset: Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
    ) -> ReplaySampler:
        # The same two names that the host asks, to know which micro-batch size to take.
        split = getattr(dataset, "split", getattr(dataset, "index_split", None))
        since_launch = {
            Split.valid: args.consumed_valid_samples - launch.consumed_valid_samples,
            Split.test: 0,
        }.get(split, args.consumed_train_samples - launch.consumed_train_samples)
        order = LaunchOrder(
            total_samples,
            dp=launch.dp,
            mbs=launch.eval_mbs if split in (Split.valid, Split.test) else launch.mbs,
            data_sharding=data_sharding,
            start=consumed_samples - since_launch,
        )
        return ReplaySampler(
            order,
            consumed_samples=consumed_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )

    real = host.MegatronPretrainingRandomSampler
    host.MegatronPretrainingRandomSampler = sampler
    try:
        yield
    finally:
        host.MegatronPretrainingRandomSampler = real
