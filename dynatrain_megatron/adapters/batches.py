"""How many samples the steps of a run have: the host's rules, asked before a switch.

A step has the same samples in every layout only if it has as many in every layout.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise

from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout


def constant_batch_size(args: Namespace) -> int | None:
    """The global batch size that mbs*dp of every layout must divide; None where rules are others.

    Those are then for :func:`check_batches`.
    """
    varies = args.step_batch_size_schedule is not None or args.decrease_batch_size_if_needed
    return None if varies else args.global_batch_size


def check_batches(
    args: Namespace, source: ParallelLayout, target: ParallelLayout, consumed_samples: int
) -> None:
    """Raise :class:`LayoutError` where ``target`` cannot run the steps to come as they are.

    ``consumed_samples`` is the position. With ``--step-batch-size-schedule`` mbs*dp must divide
    all batch sizes to come, for the job may stay in the target. With
    ``--decrease-batch-size-if-needed`` it must leave over as many samples as in ``source``.
    """
    ours, theirs = (layout.mbs * layout.dp for layout in (target, source))
    product = f"mbs*dp={target.mbs}*{target.dp}={ours}"
    if args.step_batch_size_schedule is not None:
        for since, size in _sizes_from(_schedule(args), consumed_samples):
            if size % ours:
                raise LayoutError(
                    f"{product} must divide the batch size of {size} that "
                    f"--step-batch-size-schedule gives from sample {since} on "
                    f"({size} mod {ours} = {size % ours})"
                )
    elif args.decrease_batch_size_if_needed:
        got, wanted = (args.global_batch_size // n * n for n in (ours, theirs))
        if got != wanted:
            raise LayoutError(
                f"--decrease-batch-size-if-needed gives steps of {got} samples with {product}, but "
                f"of {wanted} in layout {source}"
            )


def consumed_after(args: Namespace, iterations: int) -> int:
    """Samples that a run consumes in its first ``iterations``, whatever the layout."""
    if args.step_batch_size_schedule is None:
        return iterations * args.global_batch_size
    schedule = _schedule(args)
    consumed = 0
    for (_, size), (end, _) in pairwise(schedule):
        steps = min(iterations, max(0, -((consumed - end) // size)))
        consumed, iterations = consumed + steps * size, iterations - steps
    return consumed + iterations * schedule[-1][1]


def _sizes_from(schedule: list[tuple[int, int]], consumed_samples: int) -> list[tuple[int, int]]:
    """The part of a schedule that counts from a position on."""
    current = max(i for i, (since, _) in enumerate(schedule) if since <= consumed_samples)
    return schedule[current:]


def _schedule(args: Namespace) -> list[tuple[int, int]]:
    """(first sample, global batch size) in order, as the host reads its flag."""
    from megatron.core import num_microbatches_calculator as host

    calculator = host.StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=1,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
        rank=-1,  # rank 0 logs
        schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    return list(calculator.schedule)
