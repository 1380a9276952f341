"""Which layouts a number of ranks allows, and which of them are best.

A layout's score is its predicted step time, times up to 1.1 where it leaves less than a tenth of
the usable memory free: an allocator that is short of memory costs time, and estimates err. The
lowest score is best; of equal ones the layout with fewer model-parallel ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from dynatrain_megatron.advisor.cost import StepCost, predict_step
from dynatrain_megatron.advisor.memory import MemoryEstimate, estimate_memory
from dynatrain_megatron.advisor.stages import cut_sizes, pipeline_text, split_layers
from dynatrain_megatron.advisor.workload import Machine, Workload
from dynatrain_megatron.errors import LayoutError, did_you_mean
from dynatrain_megatron.layout import ParallelLayout

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp")
"""Degrees that may be varied; dp is what is left of the ranks."""

_MOST_CHUNKS = 8  # more chunks a stage are hardly used
_COMFORTABLE = 0.9  # share of the usable memory from which on it is short


@dataclass(frozen=True, slots=True)
class Advice:
    """A layout, what its fullest rank needs, how long a step may take, and its score."""

    layout: ParallelLayout
    num_microbatches: int
    memory: MemoryEstimate
    step: StepCost
    score: float


@dataclass(frozen=True, slots=True)
class Advised:
    """``fitting``: best first. ``too_large``: those without the memory, smallest first."""

    fitting: tuple[Advice, ...]
    too_large: tuple[Advice, ...]


def advise(
    workload: Workload,
    world: int,
    machine: Machine,
    *,
    base: ParallelLayout | None = None,
    axes: Collection[str] = AXES,
) -> Advised:
    """All feasible layouts of ``world`` ranks, in order; see :func:`feasible` for the arguments."""
    usable = machine.usable_bytes
    found = [
        judge(workload, layout, machine)
        for layout in feasible(
            workload, world, gpus_per_node=machine.gpus_per_node, base=base, axes=axes
        )
    ]
    fitting = [one for one in found if usable is None or one.memory.total <= usable]
    rest = [one for one in found if usable is not None and one.memory.total > usable]
    return Advised(
        tuple(sorted(fitting, key=_rank)),
        tuple(sorted(rest, key=lambda one: (one.memory.total, *_rank(one)))),
    )


def judge(workload: Workload, layout: ParallelLayout, machine: Machine) -> Advice:
    """Memory, time and score of one layout."""
    memory, step = estimate_memory(workload, layout), predict_step(workload, layout, machine)
    used = 0.0 if machine.usable_bytes is None else memory.total / max(1, machine.usable_bytes)
    short = min(max(used - _COMFORTABLE, 0.0), 1 - _COMFORTABLE)
    return Advice(layout, workload.num_microbatches(layout), memory, step, step.total * (1 + short))


def _rank(one: Advice) -> tuple[float, int, str]:
    layout = one.layout
    return one.score, layout.tp * layout.pp * layout.cp * layout.ep, str(layout)


def feasible(
    workload: Workload,
    world: int,
    *,
    gpus_per_node: int,
    base: ParallelLayout | None = None,
    axes: Collection[str] = AXES,
) -> Iterator[ParallelLayout]:
    """Every layout of ``world`` ranks that the model and its batch allow, each once.

    Degrees that are not in ``axes`` are those of ``base`` (default: 1), where they are possible:
    vpp is dropped where it does not divide the layers, etp follows tp where ``base`` has them
    equal. The distributed optimizer and its instances, rank order and micro-batch size are
    ``base``'s. So is sequence parallelism, unless ``base`` has tp 1 or the model experts, for which
    it is on. tp and etp divide ``gpus_per_node``. Uneven pipelines are spelled out. Raises
    LayoutError for an axis that does not exist.
    """
    for axis in axes:
        if axis not in AXES:
            raise LayoutError(
                f"axis {axis!r} cannot be varied{did_you_mean(axis, AXES)}; "
                f"allowed: {', '.join(AXES)}"
            )
    base = ParallelLayout() if base is None else base
    for tp, pp, cp in _dense_degrees(workload, world, gpus_per_node, base, axes):
        dp = world // (tp * pp * cp)
        for vpp, etp, ep in itertools.product(
            _chunk_degrees(workload, pp, base, axes),
            _expert_tensor_degrees(workload, tp, gpus_per_node, base, axes),
            _expert_degrees(workload, dp * cp * tp, base, axes),
        ):
            yield from _checked(workload, base, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, dp=dp)


def _dense_degrees(
    workload: Workload,
    world: int,
    gpus_per_node: int,
    base: ParallelLayout,
    axes: Collection[str],
) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, cp) whose product divides ``world``, by the quickest of the rules."""
    num_layers, batch = workload.model.num_layers, workload.global_batch_size
    cut = [size for _, size, expert in cut_sizes(workload.model) if not expert]
    for tp in _degrees("tp", world, base, axes):
        if gpus_per_node % tp or any(size % tp for size in cut):
            continue
        for pp in _degrees("pp", world // tp, base, axes):
            if pp > num_layers:
                continue
            for cp in _degrees("cp", world // (tp * pp), base, axes):
                dp = world // (tp * pp * cp)
                if batch is None or batch % (base.mbs * dp) == 0:
                    yield tp, pp, cp


def _chunk_degrees(
    workload: Workload, pp: int, base: ParallelLayout, axes: Collection[str]
) -> list[int | None]:
    """Values of vpp; chunks must be of one size."""
    wanted: Iterable[int | None] = range(2, _MOST_CHUNKS + 1) if "vpp" in axes else (base.vpp,)
    found = [v for v in wanted if v and pp > 1 and workload.model.num_layers % (pp * v) == 0]
    return [None, *found] if "vpp" in axes or not found else [*found]


def _expert_tensor_degrees(
    workload: Workload, tp: int, gpus_per_node: int, base: ParallelLayout, axes: Collection[str]
) -> list[int]:
    """Values of etp: that of tp and 1, or what ``base`` says."""
    model = workload.model
    if model.experts is None:
        return [tp]
    wanted = sorted({1, tp}) if "etp" in axes else [tp if base.etp == base.tp else base.expert_tp]
    sizes = [size for _, size, expert in cut_sizes(model) if expert]
    return [etp for etp in wanted if gpus_per_node % etp == 0 and not any(s % etp for s in sizes)]


def _expert_degrees(
    workload: Workload, ranks: int, base: ParallelLayout, axes: Collection[str]
) -> list[int]:
    """Values of ep among so many ranks of a stage."""
    if workload.model.experts is None:
        return [1]
    count = workload.model.experts.count
    return [ep for ep in _degrees("ep", ranks, base, axes) if count % ep == 0]


def _degrees(axis: str, ranks: int, base: ParallelLayout, axes: Collection[str]) -> list[int]:
    """Degrees of an axis that divide the ranks."""
    if axis not in axes:
        degree = int(getattr(base, axis))
        return [] if ranks % degree else [degree]
    return _divisors(ranks)


@lru_cache(maxsize=1024)
def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _checked(
    workload: Workload, base: ParallelLayout, **degrees: int | None
) -> Iterator[ParallelLayout]:
    """The layout of these degrees, if every rule allows it."""
    tp, pp = degrees["tp"], degrees["pp"]
    assert tp is not None and pp is not None
    experts = workload.model.experts is not None
    try:
        layout = replace(
            base,
            **degrees,  # type: ignore[arg-type]  # degrees are fields of a layout
            sp=tp > 1 and (base.sp or base.tp == 1 or experts),
            pipeline=_pipeline(workload, pp, degrees["vpp"] or 1),
        )
        layout.check(workload.shape)
    except LayoutError:
        return
    if layout.vpp is None or workload.num_microbatches(layout) % pp == 0:
        yield layout


def _pipeline(workload: Workload, pp: int, vpp: int) -> str | None:
    """The pipeline's string where Megatron would not place the layers by itself."""
    num_layers = workload.model.num_layers
    if pp == 1 or (num_layers % (pp * vpp) == 0 and not workload.uneven_pipeline):
        return None
    return pipeline_text(split_layers(num_layers, pp * vpp))
