"""Loss over iterations, the switches marked, and the distance to the static run below.

::

      | 1  tp2-dp2 → pp2-dp2     | 2  pp2-dp2 → tp4
    loss ____                    |
      |      \\___________________|__________
    difference to the static run, logarithmic
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from dynatrain_megatron.observe.report.compare import loss_differences
from dynatrain_megatron.observe.report.labels import Flag, place_flags, without_overlap
from dynatrain_megatron.observe.report.read import Run, Step, Switch
from dynatrain_megatron.observe.report.sheet import Sheet

MOST_NAMED = 14
"""With more switches, marks are labelled with their numbers only."""
FLOAT32_EPSILON = 2.0**-23
FEW_STEPS = 80
"""Up to here each step is a dot of its own."""


@dataclass(frozen=True, slots=True)
class _Inches:
    left: float
    right: float
    bottom: float
    top: float
    main: float
    gap: float
    below: float


@dataclass(frozen=True, slots=True)
class _Label:
    """A switch's text and where it goes, in inches from the left of the axes."""

    switch: Switch
    text: str
    pole: float
    flag: Flag


_FLAG_PAD = 0.07
_WIDE = _Inches(left=0.72, right=0.28, bottom=0.5, top=0.12, main=3.1, gap=0.42, below=1.0)
_NARROW = _Inches(left=0.55, right=0.22, bottom=0.44, top=0.1, main=2.3, gap=0.42, below=0.85)


def has_loss(run: Run) -> bool:
    """Whether there is anything to draw."""
    return any(not math.isnan(step.loss) for step in run.steps)


def draw_loss(sheet: Sheet, run: Run, static: Run | None) -> None:
    """Draw the chart; a switch of iteration N stands between steps N and N + 1."""
    inches = _NARROW if sheet.narrow else _WIDE
    differences = loss_differences(run, static) if static else {}
    span = _span(run, static)
    plot_width = sheet.form.width - inches.left - inches.right
    # A run that was restarted may have gone back behind a switch.
    switches = sorted(run.switches, key=lambda switch: switch.iteration)
    poles = [(s.iteration + 0.5 - span[0]) / (span[1] - span[0]) * plot_width for s in switches]
    labels = _place_labels(sheet, switches, poles, plot_width + inches.right)
    rows = 1 + max((label.flag.row for label in labels), default=-1)
    under = inches.gap + inches.below if differences else 0.0
    floor = inches.bottom + under
    sheet.set_height(floor + inches.main + rows * sheet.line + inches.top)

    axes = sheet.axes(inches.left, floor, plot_width, inches.main)
    axes.set_xlim(span)
    _draw_bands(axes, switches, sheet)
    _draw_losses(axes, run, static, sheet)
    for label in labels:
        _draw_label(sheet, label, inches.left, floor + inches.main)
    axes.set_ylabel("loss")
    bottom = axes
    if differences:
        bottom = sheet.axes(inches.left, inches.bottom, plot_width, inches.below)
        bottom.set_xlim(span)
        _draw_bands(bottom, switches, sheet)
        _draw_differences(bottom, differences, sheet)
        axes.tick_params(labelbottom=False)
        sheet.text(
            inches.left,
            inches.bottom + inches.below + 0.1,
            "relative difference to the static run (open circle: equal)",
        )
    for each in {axes, bottom}:
        each.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    bottom.set_xlabel("iteration")


def _span(run: Run, static: Run | None) -> tuple[float, float]:
    """All steps and switches, with half a step on both sides."""
    seen = [step.iteration for step in (*run.steps, *(static.steps if static else ()))]
    marks = [switch.iteration for switch in run.switches] + [r.iteration for r in run.refusals]
    return min(seen + marks) - 0.5, max(seen + [mark + 1 for mark in marks]) + 0.5


def _place_labels(
    sheet: Sheet, switches: Sequence[Switch], poles: Sequence[float], right: float
) -> list[_Label]:
    """A label for each switch; of very many as many numbers as fit into one row."""
    if len(switches) > MOST_NAMED:
        texts = [str(switch.number) for switch in switches]
        widths = [sheet.width_of(text) + 0.06 for text in texts]
        kept = without_overlap(poles, widths)
        return [
            _Label(switches[i], texts[i], poles[i], Flag(poles[i] - widths[i] / 2 + 0.03, 0))
            for i in kept
        ]
    # Less than half of the width: then there is room on one side at least.
    texts = [_name(sheet, switch, right * 0.45) for switch in switches]
    widths = [sheet.width_of(text) + 2 * _FLAG_PAD for text in texts]
    flags = place_flags(poles, widths, -_FLAG_PAD, right)
    return [
        _Label(switch, text, pole, Flag(flag.start + _FLAG_PAD, flag.row))
        for switch, text, pole, flag in zip(switches, texts, poles, flags, strict=True)
    ]


def _name(sheet: Sheet, switch: Switch, inches: float) -> str:
    suffix = "" if switch.ok else "  failed"
    room = inches - sheet.width_of(suffix)
    return sheet.fit_arrow(str(switch.number), switch.source, switch.target, room) + suffix


def _draw_bands(axes: Axes, switches: Sequence[Switch], sheet: Sheet) -> None:
    """Tint every second layout's stretch, and draw the boundaries."""
    edges = [s.iteration + 0.5 for s in switches if s.ok] + [axes.get_xlim()[1]]
    for begin, end in zip(edges[0:-1:2], edges[1::2], strict=False):
        axes.axvspan(begin, end, color=sheet.theme.band, linewidth=0, zorder=0)
    for switch in switches:
        axes.axvline(
            switch.iteration + 0.5,
            color=sheet.theme.switch if switch.ok else sheet.theme.bad,
            linewidth=1.0 if len(switches) <= 6 else 0.7 if len(switches) <= 40 else 0.3,
            linestyle=(0, (4, 2)),
            zorder=1.5,
        )


def _draw_label(sheet: Sheet, label: _Label, left: float, top: float) -> None:
    color = sheet.theme.switch if label.switch.ok else sheet.theme.bad
    base = top + label.flag.row * sheet.line
    if not label.text.isdecimal():
        pole_top = base + sheet.line * 0.85
        sheet.rule(left + label.pole, top, pole_top, color=color, linewidth=0.8, zorder=1)
    sheet.text(
        left + label.flag.start,
        base + sheet.line * 0.2,
        label.text,
        color=color,
        zorder=3,
        bbox={"facecolor": sheet.theme.card, "edgecolor": "none", "pad": 0.6},
    )


def _draw_losses(axes: Axes, run: Run, static: Run | None, sheet: Sheet) -> None:
    theme = sheet.theme
    handles: list[Line2D] = []
    if static is not None and has_loss(static):
        handles += axes.plot(
            *_columns(static.steps),
            color=theme.static,
            linewidth=5.0,
            solid_capstyle="round",
            marker="o" if len(static.steps) == 1 else "",
            label="static run",
            zorder=2,
        )
    dots = len(run.steps) <= FEW_STEPS
    handles += axes.plot(
        *_columns(run.steps),
        color=theme.run,
        linewidth=1.5,
        marker="o" if dots else "",
        markersize=2.8,
        label="this run",
        zorder=3,
    )
    if run.refusals:
        handles += axes.plot(
            [refusal.iteration + 0.5 for refusal in run.refusals],
            [0.03] * len(run.refusals),
            transform=axes.get_xaxis_transform(),
            color=theme.bad,
            linestyle="",
            marker="x",
            markersize=5,
            label="refused or called off",
            zorder=4,
        )
    if len(handles) > 1:
        axes.legend(
            handles=handles,
            loc="upper right",
            labelcolor=theme.text,
            frameon=True,
            facecolor=theme.card,
            edgecolor="none",
            framealpha=1.0,
        )


def _columns(steps: Sequence[Step]) -> tuple[list[int], list[float]]:
    return [step.iteration for step in steps], [step.loss for step in steps]


# ---------------------------------------------------------------- the lower panel


def _draw_differences(axes: Axes, differences: dict[int, float], sheet: Sheet) -> None:
    theme = sheet.theme
    finite = {i: value for i, value in differences.items() if math.isfinite(value)}
    low, high = _decades([value for value in finite.values() if value > 0])
    equal_at = low - (high - low) * 0.28 - 0.2
    axes.set_ylim(equal_at - (high - low) * 0.15, high + (high - low) * 0.08)
    size = 3.4 if len(finite) <= FEW_STEPS * 4 else 1.6
    style: dict[str, Any] = {
        "linestyle": "",
        "marker": "o",
        "markersize": size,
        "color": theme.run,
        "zorder": 3,
    }
    axes.plot(
        [i for i, value in finite.items() if value > 0],
        [math.log10(value) for value in finite.values() if value > 0],
        **style,
    )
    equal = [i for i, value in finite.items() if value == 0]
    axes.plot(equal, [equal_at] * len(equal), markerfacecolor="none", markeredgewidth=0.8, **style)
    exponents = range(math.ceil(low), math.floor(high) + 1, max(1, math.ceil((high - low) / 3)))
    names = {equal_at: "0", **{float(e): f"1e{e}" for e in exponents}}
    axes.yaxis.set_major_locator(FixedLocator(list(names)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: names.get(y, "")))
    axes.yaxis.set_minor_locator(NullLocator())
    epsilon = math.log10(FLOAT32_EPSILON)
    if low <= epsilon <= high:
        axes.axhline(epsilon, color=theme.muted, linewidth=0.8, linestyle=(0, (1, 2)), zorder=2)
        axes.annotate(
            "float32 ε",
            (1, epsilon),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            fontsize=sheet.small * 0.92,
            color=theme.muted,
        )


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Whole powers of ten around positive values, at least two apart."""
    if not values:
        return -9.0, -6.0
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return float(low), float(max(high, low + 2))
