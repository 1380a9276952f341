"""Laws of regions and flat ranges, against masks of elements."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynatrain_megatron.vps import Region, flat_range_regions
from dynatrain_megatron.vps.region import without
from tests.vps.strategies import elements, mask, regions, shapes

THOROUGH = settings(max_examples=1_000, deadline=None)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    shape = draw(shapes())
    return shape, draw(regions(shape)), draw(regions(shape))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes(max_dims=5, max_size=4))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@THOROUGH
@given(pairs())
def test_intersection_is_the_common_elements(case: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, a, b = case
    common = a.intersect(b)
    wanted = mask(shape, a) * mask(shape, b)
    assert (mask(shape, *([common] if common else [])) == wanted).all()
    assert b.intersect(a) == common
    assert a.contains(b) == bool((wanted == mask(shape, b)).all())
    assert a.intersect(a) == a


@THOROUGH
@given(pairs())
def test_subtraction_leaves_each_other_element_once(
    case: tuple[tuple[int, ...], Region, Region],
) -> None:
    shape, a, b = case
    rest = a.subtract(b)
    assert (mask(shape, *rest) == mask(shape, a) * (1 - mask(shape, b))).all()
    assert len(rest) <= max(1, 2 * len(shape))
    common = a.intersect(b)
    assert sum(r.numel for r in rest) + (common.numel if common else 0) == a.numel
    assert a.subtract(a) == []


@given(pairs())
def test_sizes(case: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, a, _ = case
    assert a.numel == len(elements(a)) == mask(shape, a).sum()
    assert a.ndim == len(shape)
    assert mask(shape, a)[
        tuple(slice(x, y) for x, y in zip(a.start, a.stop, strict=True))
    ].shape == (a.shape)
    assert Region.whole(shape).contains(a)
    assert Region.whole(shape).shape == shape


@given(pairs(), st.data())
def test_what_is_left_without_several_regions(
    case: tuple[tuple[int, ...], Region, Region], data: st.DataObject
) -> None:
    shape, whole, one = case
    parts = [one, data.draw(regions(shape))]
    left = mask(shape, whole) * (mask(shape, *parts) == 0)
    assert (mask(shape, *without(whole, parts)) == left).all()


@given(pairs())
def test_shift_and_back(case: tuple[tuple[int, ...], Region, Region]) -> None:
    _, a, b = case
    moved = a.shift(b.start)
    assert moved.relative_to(b.start) == a
    assert moved.shape == a.shape
    assert a.relative_to(a.start) == Region.whole(a.shape)


@THOROUGH
@given(ranges())
@example(((), 0, 1))
@example(((), 0, 0))
@example(((4, 5), 3, 17))
@example(((2, 3, 4), 0, 24))
@example(((3, 3, 3), 4, 5))
def test_a_flat_range_is_few_regions_that_cover_it_in_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    found = flat_range_regions(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(region.ndim == len(shape) for region in found)
    covered = [
        int(np.ravel_multi_index(at, shape)) if shape else 0
        for region in found
        for at in elements(region)
    ]
    # In order, without holes and without repetition, in one comparison.
    assert covered == list(range(start, stop))


def test_the_worst_case_needs_all_the_regions_that_are_promised() -> None:
    assert len(flat_range_regions((4, 4, 4), 5, 59)) == 5
    assert len(flat_range_regions((4, 4, 4, 4), 21, 235)) == 7


def test_whole_rows_are_one_region() -> None:
    assert flat_range_regions((4, 5, 6), 30, 90) == [Region((1, 0, 0), (3, 5, 6))]
    assert flat_range_regions((4, 5), 3, 17) == [
        Region((0, 3), (1, 5)),
        Region((1, 0), (3, 5)),
        Region((3, 0), (4, 2)),
    ]


def test_large_ranges_cost_nothing() -> None:
    shape = (80, 28_672, 8_192)
    found = flat_range_regions(shape, 12_345_678_901, 18_345_678_901)
    assert len(found) <= 5
    assert sum(region.numel for region in found) == 6_000_000_000


@pytest.mark.parametrize(
    ("shape", "start", "stop"), [((2, 3), -1, 2), ((2, 3), 0, 7), ((2, 3), 4, 3), ((), 0, 2)]
)
def test_a_range_outside_the_box_is_refused(shape: tuple[int, ...], start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) is not inside"):
        flat_range_regions(shape, start, stop)


@pytest.mark.parametrize(
    ("start", "stop"), [((0,), (0,)), ((2, 0), (1, 1)), ((-1,), (1,)), ((0,), (1, 1))]
)
def test_regions_that_are_none_are_refused(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"empty or negative region|differ in number of dims"):
        Region(start, stop)


def test_regions_are_values() -> None:
    a = Region((0, 1), (2, 3))
    assert pickle.loads(pickle.dumps(a)) == a
    assert hash(a) == hash(Region((0, 1), (2, 3)))
    assert sorted([Region((1,), (2,)), Region((0,), (3,))])[0] == Region((0,), (3,))


def test_an_empty_tensor_has_no_regions() -> None:
    assert flat_range_regions((0, 4), 0, 0) == []
    with pytest.raises(ValueError, match="empty"):
        Region.whole((0, 4))
