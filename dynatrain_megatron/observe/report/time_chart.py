"""Where the seconds of each switch went: one bar a switch, its phases in the order they happened.

Phases are those of the events file, the slowest rank's where ranks differ. What the stall has
beyond them is drawn too; a mark shows the stall itself, since phases can overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynatrain_megatron.observe.report.labels import shorten
from dynatrain_megatron.observe.report.read import Switch
from dynatrain_megatron.observe.report.sheet import Sheet
from dynatrain_megatron.observe.report.theme import OTHER_PHASES, PHASES, UNTIMED, ink_on
from dynatrain_megatron.observe.units import duration

MOST_BARS = 40
REST = "not timed"
_EDGE, _FOOT = 0.14, 0.48
_SWATCH = 0.1


def timed(switches: Sequence[Switch]) -> list[Switch]:
    """The switches that recorded any time; of very many the longest, in order."""
    found = [s for s in switches if s.seconds or s.stall_s is not None]
    longest = sorted(found, key=length_s, reverse=True)[:MOST_BARS]
    return sorted(longest, key=lambda s: s.number)


def length_s(switch: Switch) -> float:
    """Seconds that a bar takes: its phases or its stall, whichever is more."""
    return max(sum(switch.seconds.values()), switch.stall_s or 0.0)


def phases_of(switch: Switch) -> dict[str, float]:
    """Seconds by phase in the order they happen, unknown ones after, then what is left of the
    stall."""
    known = {name: switch.seconds[name] for name in PHASES if name in switch.seconds}
    unknown = {name: s for name, s in switch.seconds.items() if name not in PHASES}
    rest = (switch.stall_s or 0.0) - sum(switch.seconds.values())
    return {**known, **unknown, **({REST: rest} if rest > 0 else {})}


def phase_names(switches: Sequence[Switch]) -> list[str]:
    """All phases of these switches, in the order of :func:`phases_of`."""
    names = dict.fromkeys(name for switch in switches for name in phases_of(switch))
    known = [name for name in PHASES if name in names]
    unknown = [name for name in names if name not in PHASES and name != REST]
    return [*known, *unknown, *([REST] if REST in names else [])]


def phase_colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each phase name, the same in every chart of a report."""
    unknown = [name for name in names if name not in PHASES and name != REST]
    return {
        **PHASES,
        **{name: OTHER_PHASES[i % len(OTHER_PHASES)] for i, name in enumerate(unknown)},
        REST: UNTIMED,
    }


def draw_times(sheet: Sheet, switches: Sequence[Switch]) -> None:
    """Draw the bars of :func:`timed` switches."""
    names = phase_names(switches)
    colors = phase_colors(names)
    spots = _place_legend(sheet, names)
    legend = (spots[-1][2] + 1) * sheet.line + 0.1 if spots else 0.0
    pitch, thick = (0.56, 0.24) if sheet.narrow else (0.6, 0.28)
    width, height = sheet.form.width - 2 * _EDGE, pitch * len(switches)
    sheet.set_height(_FOOT + height + legend + 0.04)
    longest = max(map(length_s, switches)) or 1.0
    room = max(sheet.width_of(_stall_text(switch)) for switch in switches) + 0.1
    per_second = (width - room) / longest

    axes = sheet.axes(_EDGE, _FOOT, width, height)
    axes.set_xlim(0, width / per_second)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_xlabel("seconds")
    for index, switch in enumerate(switches):
        bar = _Bar(sheet, _FOOT + height - (index + 1) * pitch + 0.06, thick, per_second)
        _draw_title(sheet, switch, bar.y + thick + 0.055)
        start_s = 0.0
        for name, seconds in phases_of(switch).items():
            bar.draw_phase(start_s, seconds, colors[name])
            start_s += seconds
        if switch.stall_s is not None:
            bar.draw_stall(switch.stall_s, length_s(switch), _stall_text(switch))
    _draw_legend(sheet, spots, colors, sheet.figure.get_figheight() - 0.04)


@dataclass(frozen=True, slots=True)
class _Bar:
    """Where a switch's bar lies: its lower edge, thickness and scale, in inches."""

    sheet: Sheet
    y: float
    thick: float
    per_second: float

    def draw_phase(self, start_s: float, seconds: float, color: str) -> None:
        """A phase's part of the bar, with its seconds inside where there is room."""
        x, width = _EDGE + start_s * self.per_second, seconds * self.per_second
        self.sheet.box(
            x, self.y, width, self.thick,
            facecolor=color, edgecolor=self.sheet.theme.card, linewidth=0.6, zorder=2,
        )  # fmt: skip
        text, fontsize = f"{seconds:.2f}", self.sheet.small * 0.9
        if width > self.sheet.width_of(text, fontsize=fontsize) + 0.06:
            self.sheet.text(
                x + width / 2, self.y + self.thick / 2, text,
                color=ink_on(color), fontsize=fontsize, ha="center", va="center_baseline",
            )  # fmt: skip

    def draw_stall(self, stall_s: float, length: float, text: str) -> None:
        """The upright mark, and what it means to the right of the bar's ``length`` seconds."""
        x = _EDGE + stall_s * self.per_second
        color = self.sheet.theme.text
        self.sheet.rule(
            x, self.y - 0.04, self.y + self.thick + 0.04, color=color, linewidth=1.6, zorder=3
        )
        end = _EDGE + length * self.per_second + 0.07
        self.sheet.text(end, self.y + self.thick / 2, text, color=color, va="center_baseline")


def _stall_text(switch: Switch) -> str:
    return "" if switch.stall_s is None else f"{duration(switch.stall_s)} stall"


def _place_legend(sheet: Sheet, names: Sequence[str]) -> list[tuple[str, float, int]]:
    """Name, inches from the left and row of each entry, as words fill lines."""
    spots = []
    x, row = _EDGE, 0
    for name in names:
        width = _SWATCH * 1.5 + sheet.width_of(shorten(name, 20))
        if x + width > sheet.form.width - _EDGE:
            x, row = _EDGE, row + 1
        spots.append((name, x, row))
        x += width + 0.18
    return spots


def _draw_legend(
    sheet: Sheet, spots: Sequence[tuple[str, float, int]], colors: Mapping[str, str], top: float
) -> None:
    for name, x, row in spots:
        y = top - (row + 1) * sheet.line
        sheet.box(x, y, _SWATCH, _SWATCH, facecolor=colors[name])
        sheet.text(x + _SWATCH * 1.5, y, shorten(name, 20), color=sheet.theme.text)


def _draw_title(sheet: Sheet, switch: Switch, y: float) -> None:
    bold = {"fontweight": "bold"}
    after = f"iteration {switch.iteration}" + ("" if switch.ok else ", failed")
    room = sheet.form.width - 2 * _EDGE - sheet.width_of(after) - 0.1
    title = sheet.fit_arrow(str(switch.number), switch.source, switch.target, room, **bold)
    color = sheet.theme.text if switch.ok else sheet.theme.bad
    sheet.text(_EDGE, y, title, color=color, **bold)
    sheet.text(_EDGE + sheet.width_of(title, **bold) + 0.1, y, after)
