"""Flags over a chart: none covers another, whatever the marks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.observe.report.labels import Flag, place_flags, shorten, without_overlap

LEFT, RIGHT = 0.0, 10.0
lengths = st.floats(0.1, 6.0, allow_nan=False)


@given(st.lists(st.tuples(st.floats(LEFT, RIGHT), lengths), max_size=12))
def test_flags_stay_inside_and_apart(marks: list[tuple[float, float]]) -> None:
    poles = sorted(pole for pole, _ in marks)
    widths = [width for _, width in marks]
    flags = place_flags(poles, widths, LEFT, RIGHT)
    for flag, width in zip(flags, widths, strict=True):
        assert flag.start >= LEFT - 1e-9
        assert flag.start + width <= RIGHT + 1e-9
    for (one, one_width), (two, two_width) in itertools.combinations(
        zip(flags, widths, strict=True), 2
    ):
        if one.row == two.row:
            assert one.start + one_width <= two.start or two.start + two_width <= one.start


def test_flags_with_room_share_the_lowest_row() -> None:
    assert place_flags([1, 4, 7], [2, 2, 2], LEFT, RIGHT) == [Flag(1, 0), Flag(4, 0), Flag(7, 0)]


@pytest.mark.parametrize(("poles", "toward"), [([4.0, 4.1, 4.2], "right"), ([9, 9.5, 9.8], "left")])
def test_crowded_flags_are_stairs_that_no_pole_crosses(poles: list[float], toward: str) -> None:
    flags = place_flags(poles, [3, 3, 3], LEFT, RIGHT)
    rows = [flag.row for flag in flags]
    if toward == "right":
        assert [flag.start for flag in flags] == poles
        assert rows == [2, 1, 0]
    else:
        assert [flag.start for flag in flags] == [pole - 3 for pole in poles]
        assert rows == [0, 1, 2]


def test_no_marks_need_no_flags() -> None:
    assert place_flags([], [], LEFT, RIGHT) == []


def test_one_row_keeps_what_fits() -> None:
    assert without_overlap([0, 1, 2, 3, 9], [2, 2, 2, 2, 2]) == [0, 2, 4]


def test_shorten() -> None:
    assert shorten("tp2-pp2", 7) == "tp2-pp2"
    assert shorten("tp2-pp2", 5) == "tp2-…"
