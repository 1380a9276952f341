"""An estimate as a picture: bytes from rank to rank, and where the seconds go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from dynatrain_megatron.ahead.estimate import Estimate, bytes_matrix
from dynatrain_megatron.ahead.text import topology_text
from dynatrain_megatron.observe.report.theme import LIGHT, PHASES, ink_on
from dynatrain_megatron.observe.units import duration, size, size_unit

MOST_RANKS = 256
"""Above that the matrix is of nodes."""
_INCHES, _DPI = (7.6, 8.6), 150


def draw(found: Estimate, path: Path) -> None:
    """Write the picture; its format is that of the file's suffix (png, svg, pdf)."""
    figure = Figure(figsize=_INCHES, layout="constrained", facecolor=LIGHT.card)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[7, 1])
    case = found.case
    title = f"{case.model.numel / 1e9:.1f} billion parameters: {case.source} → {case.target}"
    figure.suptitle(title, fontsize=10, color=LIGHT.text)
    figure.supxlabel(topology_text(found), fontsize=6.5, color=LIGHT.muted)
    matrix, unit = bytes_matrix(found, MOST_RANKS)
    name, scale = size_unit(int(matrix.max()))
    colors = LinearSegmentedColormap.from_list("heat", list(LIGHT.heat))
    image = above.imshow(matrix / scale, cmap=colors, interpolation="nearest", vmin=0)
    above.set_xlabel(f"to {unit}")
    above.set_ylabel(f"from {unit}")
    plan = found.plan
    above.set_title(
        f"{size(plan.moved_bytes)} moved ({size(found.between)} between nodes), "
        f"{size(plan.retained_bytes)} stay where they are (diagonal)",
        fontsize=9,
        color=LIGHT.muted,
    )
    figure.colorbar(image, ax=above, shrink=0.8, label=name)
    parts = [("wire", outcome.seconds) for outcome in found.wire]
    if len(parts) > 1:
        parts = [("wire", parts[0][1]), ("relays", sum(seconds for _, seconds in parts[1:]))]
    inks = [PHASES["wire"], PHASES["pack"]][: len(parts)]
    if found.rebuilt.nbytes:
        parts.append(("rebuild", found.rebuilt.seconds))
        inks.append(PHASES["rebuild"])
    left = 0.0
    for (label, seconds), color in zip(parts, inks, strict=True):
        below.barh(0, seconds, left=left, color=color, edgecolor=LIGHT.card,
                   label=f"{label} {duration(seconds)}")  # fmt: skip
        if seconds > 0.12 * found.seconds:
            below.text(left + seconds / 2, 0, duration(seconds), ha="center", va="center",
                       fontsize=8, color=ink_on(color))  # fmt: skip
        left += seconds
    below.set_yticks([])
    below.set_xlabel("simulated seconds")
    below.set_xlim(0, max(left, np.finfo(float).tiny) * 1.02)
    below.spines[["left", "right", "top"]].set_visible(False)
    below.legend(loc="upper center", bbox_to_anchor=(0.5, 1.6), ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=_DPI)
