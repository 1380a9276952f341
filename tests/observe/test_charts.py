"""The charts themselves: every letter has its place, and the colours are those of the theme."""

import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="charts need matplotlib")

from matplotlib.text import Text
from PIL import Image

from dynatrain_megatron.observe.report.bytes_chart import MOST_MATRICES, draw_bytes, matrices
from dynatrain_megatron.observe.report.loss_chart import MOST_NAMED, draw_loss
from dynatrain_megatron.observe.report.read import Run, read_run
from dynatrain_megatron.observe.report.sheet import NARROW, WIDE, Format, Sheet, draw
from dynatrain_megatron.observe.report.theme import DARK, LIGHT, PHASES, Theme, ink_on
from dynatrain_megatron.observe.report.time_chart import (
    MOST_BARS,
    REST,
    draw_times,
    phase_colors,
    phase_names,
    phases_of,
    timed,
)

from .runs import (
    HOSTILE,
    RECORDED,
    RECORDED_STATIC,
    refused,
    steps,
    switch,
    write_lines,
    write_run,
)

LONG = "tp2-pp2-vpp2-cp2-ep4-etp2-dp2-sp-noopt-mbs2"


def _texts(form: Format, chart: Callable[[Sheet], None]) -> dict[str, tuple[float, ...]]:
    """Texts that the chart shows and the boxes that they fill, in pixels; asserts they are apart.

    The names carry a running number, since a text may stand more than once.
    """
    found: dict[str, tuple[float, ...]] = {}

    def look(sheet: Sheet) -> None:
        chart(sheet)
        sheet.canvas.draw()
        width, height = sheet.canvas.get_width_height()
        for number, text in enumerate(_shown(sheet)):
            box = text.get_window_extent()
            assert box.x0 >= -0.5, f"{text.get_text()!r} is cut at the left"
            assert box.x1 <= width + 0.5, f"{text.get_text()!r} is cut at the right"
            assert box.y0 >= -0.5, f"{text.get_text()!r} is cut at the foot"
            assert box.y1 <= height + 0.5, f"{text.get_text()!r} is cut at the top"
            found[f"{text.get_text()}#{number}"] = (box.x0, box.x1, box.y0, box.y1)

    draw(form, LIGHT, look)
    # Boxes have some air above and below the letters.
    air = form.dpi * 0.03
    for (name, (x0, x1, y0, y1)), (other, (u0, u1, v0, v1)) in itertools.combinations(
        found.items(), 2
    ):
        apart = x1 <= u0 + 1 or u1 <= x0 + 1 or y1 - air <= v0 + air or v1 - air <= y0 + air
        assert apart, f"{name} and {other} overlap"
    return found


def _shown(sheet: Sheet) -> Iterator[Text]:
    """Every text that is drawn; ticks outside of their axis are not."""
    unseen: set[Text] = set()
    for axes in sheet.figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    unseen.add(tick.label1)
    for text in sheet.figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text() and text not in unseen:
            yield text


def _crowded(tmp_path: Path, count: int, first: int, apart: int = 1) -> Run:
    names = [LONG, "tp2-dp2", HOSTILE]
    events = [
        switch(
            first + i * apart,
            source=names[i % 3],
            target=names[(i + 1) % 3],
            ok=i != 3,
            stall_s=1.0 + i / 10,
        )
        for i in range(count)
    ]
    return read_run(write_run(tmp_path, [*events, refused(first)], losses=[3.0] * 200))


@pytest.mark.parametrize("form", [WIDE, NARROW], ids=lambda form: form.name)
@pytest.mark.parametrize("first", [1, 95, 189], ids=["begin", "middle", "end"])
def test_labels_of_ten_close_switches_do_not_overlap(
    tmp_path: Path, form: Format, first: int
) -> None:
    run = _crowded(tmp_path, 10, first)
    texts = _texts(form, lambda sheet: draw_loss(sheet, run, None))
    labels = [text for text in texts if "→" in text]
    assert sorted(int(label.split()[0]) for label in labels) == list(range(1, 11))
    assert sum("failed" in label for label in labels) == 1


@pytest.mark.parametrize("form", [WIDE, NARROW], ids=lambda form: form.name)
def test_a_recorded_run_is_drawn_without_overlap(form: Format) -> None:
    run, static = read_run(RECORDED), read_run(RECORDED_STATIC)
    texts = _texts(form, lambda sheet: draw_loss(sheet, run, static))
    assert {"1  tp2-dp2 → pp2-dp2", "4  pp4 → dp4", "iteration", "loss", "static run", "0"} <= {
        text.partition("#")[0] for text in texts
    }
    texts = _texts(form, lambda sheet: draw_times(sheet, timed(run.switches)))
    phases = {*PHASES} - {"replicas", "save", "memory", "vote", "writers"}  # not known then
    assert {*phases, REST, "seconds"} <= {text.partition("#")[0] for text in texts}
    _texts(form, lambda sheet: draw_bytes(sheet, matrices(run.switches)))


@pytest.mark.parametrize("form", [WIDE, NARROW], ids=lambda form: form.name)
def test_bars_and_matrices_with_long_names_do_not_overlap(tmp_path: Path, form: Format) -> None:
    run = _crowded(tmp_path, 4, 10)
    _texts(form, lambda sheet: draw_times(sheet, timed(run.switches)))
    _texts(form, lambda sheet: draw_bytes(sheet, matrices(run.switches)))


def test_a_run_that_went_back_or_begins_late_is_drawn(tmp_path: Path) -> None:
    events = [switch(150), switch(2), switch(150), switch(90), refused(0)]
    write_run(tmp_path, events)
    write_lines(tmp_path / "steps.jsonl", steps([3.0] * 50, first=100))
    run = read_run(tmp_path)
    texts = _texts(WIDE, lambda sheet: draw_loss(sheet, run, None))
    assert sum("→" in text for text in texts) == 4


def test_of_very_many_switches_numbers_are_shown_where_there_is_room(tmp_path: Path) -> None:
    run = _crowded(tmp_path, MOST_NAMED + 80, 2, apart=2)
    texts = _texts(NARROW, lambda sheet: draw_loss(sheet, run, None))
    assert not any("→" in text for text in texts)
    assert len(timed(run.switches)) == MOST_BARS
    longest = sorted(run.switches, key=lambda s: s.stall_s or 0)[-MOST_BARS:]
    assert timed(run.switches) == longest


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 9, 16, 64])
@pytest.mark.parametrize("form", [WIDE, NARROW], ids=lambda form: form.name)
def test_matrices_of_any_size(tmp_path: Path, num_ranks: int, form: Format) -> None:
    matrix = [[10**9 * (row + column) for column in range(num_ranks)] for row in range(num_ranks)]
    events = [switch(i, bytes_matrix=matrix, source=f"tp{i}") for i in range(3)]
    run = read_run(write_run(tmp_path, events))
    texts = _texts(form, lambda sheet: draw_bytes(sheet, matrices(run.switches)))
    numbers = [text for text in texts if text.partition("#")[0].count(".") == 1]
    assert (len(numbers) >= 3 * (num_ranks**2 - 1)) == (num_ranks <= 8)


def test_a_matrix_need_not_be_square(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [switch(bytes_matrix=[[1, 2, 3], [4, 5, 6]])]))
    _texts(WIDE, lambda sheet: draw_bytes(sheet, matrices(run.switches)))


def test_switches_with_equal_matrices_share_one(tmp_path: Path) -> None:
    pairs = [("tp2", "pp2", [[1, 2], [3, 4]]), ("pp2", "tp2", [[1, 3], [2, 4]])]
    events = [
        switch(i, source=source, target=target, bytes_matrix=matrix)
        for i in range(100)
        for source, target, matrix in [pairs[i % 2]]
    ]
    shown = matrices(read_run(write_run(tmp_path / "a", events)).switches)
    assert [matrix.first.number for matrix in shown] == [1, 2]
    assert [len(matrix.switches) for matrix in shown] == [50, 50]
    different = [switch(i, bytes_matrix=[[i]]) for i in range(100)]
    assert len(matrices(read_run(write_run(tmp_path / "b", different)).switches)) == MOST_MATRICES


def test_phases_come_in_the_order_they_happen_and_fill_the_stall(tmp_path: Path) -> None:
    seconds = {"commit": 0.1, "offload": 0.2, "wire": 0.3, "quiesce": 0.1, "pack": 0.05}
    run = read_run(write_run(tmp_path, [switch(seconds=seconds, stall_s=1.0)]))
    phases = phases_of(run.switches[0])
    assert list(phases) == ["quiesce", "pack", "wire", "commit", "offload", REST]
    assert sum(phases.values()) == pytest.approx(1.0)
    assert phase_names(run.switches) == list(phases)
    colors = phase_colors(list(phases))
    assert len({colors[name] for name in phases}) == len(phases)


def test_a_stall_shorter_than_its_phases_has_no_rest(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [switch(stall_s=0.5)]))
    assert REST not in phases_of(run.switches[0])
    _texts(WIDE, lambda sheet: draw_times(sheet, run.switches))


@pytest.mark.parametrize(
    ("losses", "static"),
    [
        ([2.0], [2.0]),
        ([2.0, 1.0], [2.0, 1.0]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([1.0, 2.0], [0.0, 2.0]),
        ([1e99, -1e99], [1e-99, 1e99]),
        ([5e-324, 1.0], [1.0, 5e-324]),
        ([None, 1.0, None], [1.0, 1.0, None]),
        ([1.0, 2.0], [None, None]),
    ],
)
def test_any_loss_can_be_drawn(
    tmp_path: Path, losses: list[float | None], static: list[float | None]
) -> None:
    run = read_run(write_run(tmp_path / "run", [switch(1)], losses))
    beside = read_run(write_run(tmp_path / "static", None, static))
    _texts(WIDE, lambda sheet: draw_loss(sheet, run, beside))


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_a_picture_has_the_theme_and_size_of_its_form(theme: Theme) -> None:
    run = read_run(RECORDED)
    for form in (WIDE, NARROW):
        png = draw(form, theme, lambda sheet: draw_times(sheet, timed(run.switches)))
        picture = Image.open(io.BytesIO(png))
        assert picture.width == pytest.approx(form.width * form.dpi, abs=1)
        assert picture.convert("RGB").getpixel((1, 1)) == tuple(
            int(theme.card[i : i + 2], 16) for i in (1, 3, 5)
        )
        assert len(png) < 60_000


def test_numbers_are_dark_on_light_and_light_on_dark() -> None:
    assert ink_on("#ffffff") == ink_on(PHASES["plan"]) != ink_on("#000000")
