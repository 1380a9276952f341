"""Bytes from rank to rank, one matrix for each kind of switch, all in one colour scale.

The outlined diagonal is what a rank keeps; everything else goes over the wire.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_hex
from matplotlib.ticker import MaxNLocator

from dynatrain_megatron.observe.report.labels import shorten
from dynatrain_megatron.observe.report.read import Switch
from dynatrain_megatron.observe.report.sheet import Sheet
from dynatrain_megatron.observe.report.theme import ink_on
from dynatrain_megatron.observe.units import size_unit

MOST_MATRICES = 24
MOST_RANKS_WITH_NUMBERS = 8
MOST_RANKS_WITH_GRID = 16

# Inches around a matrix, and for the colour scale at the foot.
_LEFT, _RIGHT, _HEAD, _FOOT, _SCALE = 0.42, 0.1, 0.28, 0.46, 0.6


@dataclass(frozen=True, slots=True)
class Matrix:
    """Switches that moved the same bytes between the same ranks."""

    switches: tuple[Switch, ...]

    @property
    def first(self) -> Switch:
        """The switch that stands for all."""
        return self.switches[0]


def matrices(switches: Sequence[Switch]) -> list[Matrix]:
    """The different matrices in the order of their first switch, at most MOST_MATRICES."""
    same: dict[tuple[object, ...], list[Switch]] = {}
    for switch in switches:
        if switch.matrix:
            same.setdefault((switch.source, switch.target, switch.matrix), []).append(switch)
    return [Matrix(tuple(group)) for group in same.values()][:MOST_MATRICES]


def draw_bytes(sheet: Sheet, shown: Sequence[Matrix]) -> None:
    """Draw the matrices in rows, with one colour scale below."""
    columns = _num_columns(sheet, shown)
    pitch = sheet.form.width / columns
    cell = min(pitch - _LEFT - _RIGHT, 2.6)
    block = _HEAD + cell + _FOOT
    top = _SCALE + math.ceil(len(shown) / columns) * block
    sheet.set_height(top)
    most = max(max(map(max, matrix.first.matrix)) for matrix in shown)
    unit, scale = size_unit(most)
    colormap = LinearSegmentedColormap.from_list("heat", list(sheet.theme.heat))
    norm = Normalize(0, (most / scale) or 1.0)
    for index, matrix in enumerate(shown):
        x = index % columns * pitch + _LEFT
        y = top - (index // columns) * block - _HEAD - cell
        axes = sheet.axes(x, y, cell, cell)
        values = np.array(matrix.first.matrix, dtype=float) / scale
        axes.imshow(values, cmap=colormap, norm=norm, aspect="auto", interpolation="nearest")
        _draw_frame(axes, values, sheet)
        if max(values.shape) <= MOST_RANKS_WITH_NUMBERS:
            _draw_numbers(axes, values, colormap, norm, sheet)
        _draw_head(sheet, matrix, x, y + cell + 0.06, pitch - _LEFT - 0.04)
        axes.set_xlabel("to rank", labelpad=2, fontsize=sheet.small)
        axes.set_ylabel("from rank", labelpad=2, fontsize=sheet.small)
    _draw_scale(sheet, colormap, norm, unit)


def _num_columns(sheet: Sheet, shown: Sequence[Matrix]) -> int:
    """As many matrices in a row as their numbers allow."""
    ranks = max(len(matrix.first.matrix) for matrix in shown)
    many_numbers = 4 < ranks <= MOST_RANKS_WITH_NUMBERS
    if sheet.narrow:
        return 1 if many_numbers else 2
    return 3 if many_numbers or len(shown) == 3 else min(4, max(2, len(shown)))


def _draw_frame(axes: Axes, values: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
                sheet: Sheet) -> None:  # fmt: skip
    theme = sheet.theme
    num_rows, num_columns = values.shape
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=3)
    for axis, count in ((axes.xaxis, num_columns), (axes.yaxis, num_rows)):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 4, 5, 8, 10]))
        if count <= MOST_RANKS_WITH_NUMBERS:
            axis.set_ticks(range(count))
    few = max(values.shape) <= MOST_RANKS_WITH_GRID
    if few:
        axes.set_xticks(np.arange(-0.5, num_columns), minor=True)
        axes.set_yticks(np.arange(-0.5, num_rows), minor=True)
        axes.tick_params(which="minor", length=0)
        axes.grid(visible=True, which="minor", axis="both", color=theme.card, linewidth=1.0)
    # All squares of the diagonal as one line, with a gap after each.
    corner = np.array([-1, 1, 1, -1, -1, -1, np.nan]) * 0.47
    ranks = np.repeat(np.arange(min(values.shape)), len(corner))
    axes.plot(
        ranks + np.tile(corner, min(values.shape)),
        ranks + np.tile(corner[[0, 0, 2, 2, 0, 0, -1]], min(values.shape)),
        color=theme.switch,
        linewidth=1.3 if few else 0.5,
        solid_joinstyle="miter",
        zorder=4,
    )


def _draw_numbers(
    axes: Axes,
    values: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
    colormap: LinearSegmentedColormap,
    norm: Normalize,
    sheet: Sheet,
) -> None:
    fontsize = sheet.small * (1.0 if max(values.shape) <= 4 else 0.72)
    for (row, column), value in np.ndenumerate(values):
        text = "0" if value == 0 else "<0.01" if value < 0.005 else f"{value:.2f}"
        color = ink_on(to_hex(colormap(norm(value))))
        axes.text(
            column, row, text, ha="center", va="center_baseline", color=color, fontsize=fontsize,
            zorder=5,
        )  # fmt: skip


def _draw_head(sheet: Sheet, matrix: Matrix, x: float, y: float, width: float) -> None:
    numbers = shorten(", ".join(str(switch.number) for switch in matrix.switches), 12)
    style = {"fontsize": sheet.small, "fontweight": "bold"}
    text = sheet.fit_arrow(numbers, matrix.first.source, matrix.first.target, width, **style)
    sheet.text(x, y, text, color=sheet.theme.text, **style)


def _draw_scale(
    sheet: Sheet, colormap: LinearSegmentedColormap, norm: Normalize, unit: str
) -> None:
    axes = sheet.axes(_LEFT, 0.26, 2.6, 0.1)
    axes.imshow(np.linspace(0, 1, 24)[None, :], cmap=colormap, aspect="auto",
                extent=(0, float(norm.vmax or 1.0), 0, 1))  # fmt: skip
    axes.grid(visible=False)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.tick_params(length=2, pad=2)
    sheet.text(_LEFT, 0.4, f"{unit} (outlined: stays on its rank)", va="bottom")
