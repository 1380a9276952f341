"""Draws the charts of a run, for each width and theme, and puts the page together.

The only module that brings charts in, so that all else works without matplotlib.
"""

from collections.abc import Callable

from dynatrain_megatron.observe.report.bytes_chart import draw_bytes, matrices
from dynatrain_megatron.observe.report.loss_chart import draw_loss, has_loss
from dynatrain_megatron.observe.report.page import Picture, render
from dynatrain_megatron.observe.report.read import Run
from dynatrain_megatron.observe.report.sheet import NARROW, WIDE, Sheet, draw
from dynatrain_megatron.observe.report.theme import DARK, LIGHT
from dynatrain_megatron.observe.report.time_chart import draw_times, phase_names, phases_of, timed


def build(run: Run, static: Run | None) -> tuple[str, dict[str, bytes]]:
    """The page, and the PNGs by file name: the charts as the page shows them on a wide screen."""
    pictures: dict[str, Picture] = {}
    if has_loss(run):
        pictures["loss"] = _loss(run, static)
    shown = timed(run.switches)
    if shown:
        pictures["time"] = _times(run, len(shown))
    if matrices(run.switches):
        pictures["bytes"] = _bytes(run)
    names = phase_names(shown)
    page = render(
        run,
        static,
        pictures,
        (names, [(switch, phases_of(switch)) for switch in shown if switch.seconds]),
    )
    wide = {f"{name}.png": picture.pngs["wide", "light"] for name, picture in pictures.items()}
    return page, wide


def _loss(run: Run, static: Run | None) -> Picture:
    caption = "Training loss of each step; a switch stands between the two steps it came between."
    if static is not None:
        caption += " The wide line is the static run."
    alt = f"Loss over {len(run.steps)} iterations with {len(run.switches)} switches marked"
    return _picture("Loss", caption, alt, lambda sheet: draw_loss(sheet, run, static))


def _times(run: Run, count: int) -> Picture:
    shown = timed(run.switches)
    caption = (
        "Seconds by phase, in the order they happen; the slowest rank's for groups, quiesce, pack, "
        "wire and unpack. "
        "The upright mark is the stall: the time for which no training step ran."
    )
    if count < len(run.switches):
        caption += f" Shown are {count} of {len(run.switches)} switches, those that took longest."
    alt = "Stacked bars of the seconds of each switch by phase"
    return _picture("Time of each switch", caption, alt, lambda sheet: draw_times(sheet, shown))


def _bytes(run: Run) -> Picture:
    shown = matrices(run.switches)
    caption = (
        "Bytes of the new state by the rank that had them (row) and the rank that needs them "
        "(column). The outlined diagonal stays in place, the rest is moved. Switches with equal "
        "matrices share one."
    )
    alt = "Matrices of bytes from rank to rank, one for each kind of switch"
    return _picture("Bytes from rank to rank", caption, alt, lambda sheet: draw_bytes(sheet, shown))


def _picture(heading: str, caption: str, alt: str, chart: Callable[[Sheet], None]) -> Picture:
    pngs = {
        (form.name, theme.name): draw(form, theme, chart)
        for form in (WIDE, NARROW)
        for theme in (LIGHT, DARK)
    }
    return Picture(heading, caption, alt, pngs)
