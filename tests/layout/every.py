"""Every layout of a number of ranks."""

from collections.abc import Iterator, Sequence

from dynatrain_megatron.layout import ParallelLayout


def layouts(world: int, axes: Sequence[str] = ("tp", "pp", "dp")) -> list[ParallelLayout]:
    """All layouts of ``world`` ranks that differ in ``axes`` (of tp, pp, cp, dp, ep) only.

    Degrees of other axes are 1. Sorted by the degrees in the order of ``axes``. Whether a model
    allows one is for :meth:`ParallelLayout.check` to say.
    """
    found: list[ParallelLayout] = []
    dense = [axis for axis in axes if axis != "ep"]
    for degrees in _factorisations(world, len(dense)):
        sizes = dict(zip(dense, degrees, strict=True))
        experts = _divisors(sizes.get("cp", 1) * sizes.get("dp", 1)) if "ep" in axes else [1]
        found += [ParallelLayout(**sizes, ep=ep) for ep in experts]  # type: ignore[arg-type]
    return sorted(found, key=lambda layout: [getattr(layout, axis) for axis in axes])


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ordered tuples of ``count`` positive numbers with the product ``number``."""
    if count == 0:
        if number == 1:
            yield ()
        return
    for first in _divisors(number):
        for rest in _factorisations(number // first, count - 1):
            yield (first, *rest)
