"""Arithmetic on columns of boxes against that on single regions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.vps import LogicalTensor, Region, flat_range_regions
from dynatrain_megatron.vps.boxes import (
    IntArray,
    flat_ends,
    flat_parts,
    measures,
    overlapping_intervals,
    ranges,
    run_starts,
    volumes,
)
from tests.vps.strategies import STATES, mask, regions, shapes


def columns(boxes: list[Region], dims: int) -> tuple[IntArray, IntArray]:
    start = np.zeros((len(boxes), dims), dtype=np.int64)
    stop = np.ones((len(boxes), dims), dtype=np.int64)
    for row, box in enumerate(boxes):
        start[row, : box.ndim] = box.start
        stop[row, : box.ndim] = box.stop
    return start, stop


@st.composite
def box_lists(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    shape = draw(shapes())
    return shape, draw(st.lists(regions(shape), max_size=6))


@settings(max_examples=300, deadline=None)
@given(box_lists())
def test_volumes_and_flat_ends(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, boxes = case
    start, stop = columns(boxes, len(shape))
    assert volumes(start, stop).tolist() == [box.numel for box in boxes]
    before = LogicalTensor("a", (3, 5), STATES[0])
    tensors = [before, LogicalTensor("b", shape, STATES[1])]
    wide = [np.pad(start, ((0, 0), (0, 2))), np.pad(stop, ((0, 0), (0, 2)), constant_values=1)]
    low, high = flat_ends(tensors, np.ones(len(boxes), dtype=np.int64), *wide)
    for row, box in enumerate(boxes):
        held = np.flatnonzero(mask(shape, box))
        assert (low[row], high[row]) == (15 + held[0], 15 + held[-1] + 1)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_flat_parts_are_those_of_each_box(data: st.DataObject) -> None:
    _, boxes = data.draw(box_lists().filter(lambda case: case[1]))
    cuts = []
    for box in boxes:
        low = data.draw(st.integers(0, box.numel - 1))
        cuts.append((low, data.draw(st.integers(low + 1, box.numel))))
    low, high = np.array(cuts, dtype=np.int64).T
    owner, start, stop = flat_parts(*columns(boxes, boxes[0].ndim), low, high)
    found = list(
        zip(owner.tolist(), map(tuple, start.tolist()), map(tuple, stop.tolist()), strict=True)
    )
    assert found == [
        (row, part.start, part.stop)
        for row, (box, cut) in enumerate(zip(boxes, cuts, strict=True))
        for part in (one.shift(box.start) for one in flat_range_regions(box.shape, *cut))
    ]


@settings(max_examples=300, deadline=None)
@given(box_lists(), st.data())
def test_measures_tell_whether_boxes_cover_another_once(
    case: tuple[tuple[int, ...], list[Region]], data: st.DataObject
) -> None:
    shape, boxes = case
    whole = data.draw(regions(shape))
    if data.draw(st.booleans()):  # a cover, in pieces
        boxes = [whole]
        for cutter in case[1]:
            boxes = [
                part
                for box in boxes
                for part in [*box.subtract(cutter), *filter(None, [box.intersect(cutter)])]
            ]
    start, stop = columns(boxes, len(shape))
    box = columns([whole], len(shape))
    same_measure = measures(start, stop).sum(dtype=np.uint64) == measures(*box)[0]
    same_volume = volumes(start, stop).sum() == whole.numel
    covered_once = (mask(shape, *boxes) == mask(shape, whole)).all()
    assert (same_measure and same_volume) == covered_once


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=12), st.integers(0, 12))
def test_overlapping_intervals_are_all_of_them(spans: list[tuple[int, int]], cut: int) -> None:
    sides = [sorted((low, low + size) for low, size in part) for part in (spans[:cut], spans[cut:])]
    ends = [np.array(side, dtype=np.int64).reshape(-1, 2).T for side in sides]
    i, j = overlapping_intervals(*ends[0], *ends[1])
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == [
        (a, b)
        for a, (low, high) in enumerate(sides[0])
        for b, (other_low, other_high) in enumerate(sides[1])
        if low < other_high and other_low < high
    ]


def test_ranges_and_runs() -> None:
    number, owner = ranges(np.array([5, 0, 7]), np.array([2, 0, 3]))
    assert number.tolist() == [5, 6, 7, 8, 9] and owner.tolist() == [0, 0, 2, 2, 2]
    first = run_starts(np.array([1, 1, 2, 2]), np.array([0, 0, 0, 1]))
    assert first.tolist() == [True, False, True, True]
    assert run_starts(np.array([], dtype=np.int64)).tolist() == []


def test_empty_intervals_do_no_harm() -> None:
    """A damaged plan has some; those that are not empty are paired as without them."""
    low, high = np.array([0, 1, 1, 3]), np.array([1, 1, 4, 3])
    pairs = set(zip(*map(list, overlapping_intervals(low, high, low, high)), strict=True))
    assert {(i, j) for i, j in pairs if {i, j} <= {0, 2}} == {(0, 0), (2, 2)}
