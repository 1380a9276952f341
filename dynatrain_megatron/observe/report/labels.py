"""Where the labels of marks on a line go, so that none covers another.

A label is a flag: it stands in a row above its mark, on one side of a thin pole. Rows count from 0,
next to the chart. Flags of the first marks fly to the right and those of the last to the left.

::

      row 1     | 1  tp2 → pp2
      row 0     |         | 2  pp2 → tp2            3  tp2 → dp2 |
    ------------+---------+--------------------------------------+----
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """A label from ``start`` over its width, in ``row``."""

    start: float
    row: int


def place_flags(
    poles: Sequence[float], widths: Sequence[float], left: float, right: float
) -> list[Flag]:
    """A flag for each pole, in the unit of ``poles``, which ascend; none covers another.

    Of all places to turn from right to left, that one is taken where the flags stay between
    ``left`` and ``right``, are crossed by the fewest poles, and need the fewest rows. Looks at
    every place: meant for a few dozen at most.
    """
    candidates = [
        _with_turn(turn, poles, widths, left, right) for turn in reversed(range(len(poles) + 1))
    ]
    return min(candidates, key=lambda flags: _faults(flags, poles, widths))


def without_overlap(centers: Sequence[float], widths: Sequence[float]) -> list[int]:
    """Indices of the labels, in ascending order, that can stand in one row, the first first."""
    kept: list[int] = []
    free_from = float("-inf")
    for index, (center, width) in enumerate(zip(centers, widths, strict=True)):
        if center - width / 2 >= free_from:
            kept.append(index)
            free_from = center + width / 2
    return kept


def shorten(text: str, most: int) -> str:
    """``text`` in at most ``most`` characters, with an ellipsis where some are left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _with_turn(
    turn: int, poles: Sequence[float], widths: Sequence[float], left: float, right: float
) -> list[Flag]:
    """Flags before ``turn`` to the right of their poles, the others to the left, pushed inside."""
    starts = [
        min(max(pole if i < turn else pole - width, left), right - width)
        for i, (pole, width) in enumerate(zip(poles, widths, strict=True))
    ]
    rows: dict[int, int] = {}
    # Innermost last: each flag stands above all whose poles would cross it.
    for i in (*range(turn, len(poles)), *reversed(range(turn))):
        below = [
            row
            for j, row in rows.items()
            if starts[i] < starts[j] + widths[j] and starts[j] < starts[i] + widths[i]
        ]
        rows[i] = 1 + max(below, default=-1)
    return [Flag(start, rows[i]) for i, start in enumerate(starts)]


def _faults(
    flags: Sequence[Flag], poles: Sequence[float], widths: Sequence[float]
) -> tuple[int, int, int]:
    """Flags that left their poles, poles that cross flags, and rows."""
    astray = crossed = 0
    for i, (flag, width) in enumerate(zip(flags, widths, strict=True)):
        astray += flag.start != poles[i] and flag.start != poles[i] - width
        crossed += sum(
            flag.start < pole < flag.start + width and flags[j].row > flag.row
            for j, pole in enumerate(poles)
        )
    return astray, crossed, max((flag.row for flag in flags), default=-1)
