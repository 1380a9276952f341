"""The assignment is the best there is: against all permutations, and against scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dynatrain_megatron.planner.assignment import assign


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """A few tables of one size; small numbers, so that many assignments are equally good."""
    size, number = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    most = draw(st.sampled_from([1, 3, 1 << 60]))
    return draw(arrays(np.int64, (number, size, size), elements=st.integers(0, most)))


def value(table: np.ndarray, column: np.ndarray) -> int:
    assert sorted(column.tolist()) == list(range(len(table)))
    return sum(int(table[row, at]) for row, at in enumerate(column.tolist()))


@settings(max_examples=75, deadline=None)
@given(tables())
def test_no_permutation_is_worth_more(worth: np.ndarray) -> None:
    for table, column in zip(worth, assign(worth), strict=True):
        permutations = itertools.permutations(range(len(table)))
        assert value(table, column) == max(value(table, np.array(p)) for p in permutations)


@settings(max_examples=40, deadline=None)
@given(tables())
def test_a_table_does_not_depend_on_the_others(worth: np.ndarray) -> None:
    alone = [assign(table[None])[0].tolist() for table in worth]
    assert assign(worth).tolist() == alone


@pytest.mark.parametrize(
    ("number", "size", "most", "filled"),
    [
        (60, 8, 1_000, 0.3),
        (10, 16, 1 << 40, 0.5),
        (1, 72, 1 << 40, 1.0),
        (1, 128, 2, 0.1),
        (1, 300, 1 << 40, 0.05),
    ],
)
def test_scipy_finds_nothing_better(number: int, size: int, most: int, filled: float) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="the judge is scipy's assignment")
    draw = np.random.default_rng(size)
    worth = draw.integers(0, most, (number, size, size), dtype=np.int64)
    worth *= draw.random(worth.shape) < filled
    for table, column in zip(worth, assign(worth), strict=True):
        best = table[optimize.linear_sum_assignment(table, maximize=True)].sum()
        assert value(table, column) == best


def test_no_tables_and_tables_without_rows() -> None:
    assert assign(np.zeros((0, 3, 3), dtype=np.int64)).shape == (0, 3)
    assert assign(np.zeros((2, 0, 0), dtype=np.int64)).shape == (2, 0)
