"""The colours of the report, the same in its page and its charts, for light and dark screens."""

from dataclasses import dataclass

from dynatrain_megatron.observe.phases import PHASES as ORDER


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours by what they mean; ``heat`` runs from nothing to most."""

    name: str
    page: str
    card: str
    text: str
    muted: str
    grid: str
    band: str
    run: str
    static: str
    switch: str
    bad: str
    good: str
    heat: tuple[str, ...]


LIGHT = Theme(
    name="light",
    page="#f4f6f8",
    card="#ffffff",
    text="#1c2127",
    muted="#5d6875",
    grid="#e4e8ec",
    band="#f3f6fa",
    run="#0b66c3",
    static="#c3cad3",
    switch="#b4530a",
    bad="#b3261e",
    good="#1a7f4b",
    heat=("#f5f8fc", "#c6dbf0", "#7fb2dd", "#3a7fbf", "#0d4f92"),
)
DARK = Theme(
    name="dark",
    page="#0e1217",
    card="#171c23",
    text="#e5e9ee",
    muted="#98a4b3",
    grid="#2a323c",
    band="#1c232c",
    run="#62aef7",
    static="#59636f",
    switch="#f0954a",
    bad="#ff8078",
    good="#56c98d",
    heat=("#1b222b", "#1d3d5c", "#24649a", "#4a9bdc", "#b4dcff"),
)

PHASES: dict[str, str] = {
    # Getting ready: blues.
    "prepare": "#3f51a3",
    "groups": "#3c8dc5",
    "quiesce": "#6c86dd",
    "replicas": "#8fa6ea",
    "build": "#62b8e6",
    "plan": "#a3d6ef",
    "memory": "#cdd9ee",
    # Moving bytes: oranges.
    "pack": "#f0b347",
    "wire": "#de6f2c",
    "unpack": "#f6d28d",
    # Making whole, checking, handing over: greens.
    "rebuild": "#97c76f",
    "verify": "#55a374",
    "vote": "#438c6c",
    "commit": "#2d7263",
    "save": "#b9c2a0",
    "writers": "#8b9a5b",
}
assert tuple(PHASES) == ORDER
"""Colour of each phase of a switch, in the order in which they happen."""
OTHER_PHASES = ("#b58bc9", "#8d6aa8", "#d3b0de", "#6f5387")
"""For phases that this version does not know, in turn."""
UNTIMED = "#8a929c"
"""Stall that no phase accounts for."""


def ink_on(color: str) -> str:
    """Black or white, whichever reads better on ``color`` (``#rrggbb``)."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#14181d" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"
