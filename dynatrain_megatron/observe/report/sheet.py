"""A drawing surface measured in inches: what all charts share of matplotlib.

Charts are drawn with matplotlib's objects and the Agg renderer; nothing global is changed, no
display is needed, and a user's own matplotlibrc has no say.
"""

import io
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from dynatrain_megatron.observe.report.labels import shorten
from dynatrain_megatron.observe.report.theme import Theme


@dataclass(frozen=True, slots=True)
class Format:
    """A width of charts: inches, points of the normal font, and pixels per inch."""

    name: str
    width: float
    font: float
    dpi: int


WIDE = Format("wide", width=9.6, font=9.5, dpi=160)
NARROW = Format("narrow", width=3.75, font=8.0, dpi=208)
"""For phones: drawn for 360 pixels of the page, so that letters keep a readable size."""


class Sheet:
    """A figure of a given width whose height is set once it is known."""

    def __init__(self, form: Format, theme: Theme) -> None:
        self.form = form
        self.theme = theme
        self.figure = Figure(figsize=(form.width, 1.0), dpi=form.dpi, facecolor=theme.card)
        self.canvas: Any = FigureCanvasAgg(self.figure)  # its methods have no types
        self._widths: dict[tuple[Any, ...], float] = {}

    @property
    def narrow(self) -> bool:
        """Whether this is drawn for a phone."""
        return self.form.width < 6

    @property
    def small(self) -> float:
        """Points of the small font."""
        return self.form.font * 0.88

    @property
    def line(self) -> float:
        """Inches from one line of small text to the next."""
        return self.small * 1.45 / 72

    def set_height(self, inches: float) -> None:
        """The figure's height; before any axes or text are placed."""
        self.figure.set_size_inches(self.form.width, inches)

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        """Axes at a place in inches from the lower left corner, in the theme's colours."""
        whole = self.figure.get_figheight()
        axes = self.figure.add_axes(
            (left / self.form.width, bottom / whole, width / self.form.width, height / whole)
        )
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        return axes

    def text(self, x: float, y: float, text: str, **style: Any) -> Text:
        """Text at a place in inches, small and muted unless ``style`` says otherwise."""
        style = {"fontsize": self.small, "color": self.theme.muted, **style}
        return self.figure.text(x / self.form.width, y / self.figure.get_figheight(), text, **style)

    def rule(self, x: float, low: float, high: float, **style: Any) -> None:
        """An upright line between two heights in inches."""
        width, height = self.form.width, self.figure.get_figheight()
        transform = self.figure.transFigure
        line = Line2D([x / width] * 2, [low / height, high / height], transform=transform, **style)
        self.figure.add_artist(line)

    def box(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        """A box whose lower left corner is at a place in inches."""
        all_x, all_y = self.form.width, self.figure.get_figheight()
        style = {"linewidth": 0, "transform": self.figure.transFigure, **style}
        at = (x / all_x, y / all_y)
        self.figure.add_artist(Rectangle(at, width / all_x, height / all_y, **style))

    def width_of(self, text: str, **style: Any) -> float:
        """Inches that ``text`` takes; all digits are equally wide."""
        text = re.sub(r"\d", "0", text)
        key = (text, *sorted(style.items()))
        if key not in self._widths:
            probe = self.text(0, 0, text, **style)
            self._widths[key] = float(probe.get_window_extent().width) / self.form.dpi
            probe.remove()
        return self._widths[key]

    def fit_arrow(self, number: str, source: str, target: str, inches: float, **style: Any) -> str:
        """``1  tp2 → pp2`` in ``inches``: both names cut alike as far as needed."""

        def cut(most: int) -> str:
            return f"{number}  {shorten(source, most)} → {shorten(target, most)}"

        lengths = range(3, max(len(source), len(target), 3) + 1)
        too_long = bisect_right(lengths, inches, key=lambda most: self.width_of(cut(most), **style))
        return cut(lengths[max(too_long - 1, 0)])

    def png(self) -> bytes:
        """The figure as a PNG of at most 256 colours, which is a third of the size."""
        self.canvas.draw()
        pixels = np.ascontiguousarray(np.asarray(self.canvas.buffer_rgba())[..., :3])
        picture = Image.fromarray(pixels).quantize(
            256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        # The page's card goes on in the picture's ground, so that colour has to be exact.
        palette = picture.getpalette() or []
        ground = 3 * int(np.asarray(picture)[0, 0])
        palette[ground : ground + 3] = pixels[0, 0].tolist()
        picture.putpalette(palette)
        packed = io.BytesIO()
        picture.save(packed, format="png", optimize=True)
        return packed.getvalue()


def draw(form: Format, theme: Theme, chart: Callable[[Sheet], None]) -> bytes:
    """Run ``chart`` on a new sheet under our own settings; returns the PNG."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name in a script that the font does not have is shown as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, _settings(form, theme)))
        sheet = Sheet(form, theme)
        chart(sheet)
        return sheet.png()


def _settings(form: Format, theme: Theme) -> dict[str, Any]:
    return {
        "font.size": form.font,
        "axes.labelsize": form.font,
        "axes.labelcolor": theme.muted,
        "axes.edgecolor": theme.grid,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "xtick.color": theme.grid,
        "ytick.color": theme.grid,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.labelsize": form.font * 0.92,
        "ytick.labelsize": form.font * 0.92,
        "text.color": theme.text,
        # Names come from files: a $ in one is a $.
        "text.parse_math": False,
        "legend.fontsize": form.font * 0.92,
        "legend.frameon": False,
    }
