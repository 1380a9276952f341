"""Reports looked at in a real headless Chromium, on a wide screen and on a phone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.cli import main
from dynatrain_megatron.observe.units import duration, size

from .runs import HOSTILE, RECORDED, RECORDED_STATIC, refused, switch, write_run

pytest.importorskip("matplotlib", reason="charts need matplotlib")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
WIDE_PX, PHONE_PX = 1280, 390
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    " --disable-background-networking --disable-component-update --disable-dev-shm-usage"
).split()

# What the page looks like from inside: errors would be in the log, which is asked for apart.
LOOK = """
document.querySelectorAll("details").forEach((each) => { each.open = true; });
const images = [...document.images];
const overflowing = [...document.querySelectorAll("body *")].filter(
  (e) =>
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5
    && !e.closest(".scroll"));
return {
  images: images.map((i) => [i.complete, i.naturalWidth, i.naturalHeight, i.clientWidth]),
  shown: images.map((i) => i.currentSrc.length),
  timeline: [...document.querySelectorAll("#timeline tbody tr")].map(
    (row) => Object.fromEntries([...row.cells].map((c) => [c.dataset.label, c.innerText.trim()]))),
  rows: Object.fromEntries([...document.querySelectorAll("table")].map(
    (t) => [t.id, t.tBodies[0].rows.length])),
  tooWide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  innerWidth: innerWidth,
  overflowing: overflowing.map((e) => e.outerHTML.slice(0, 80)),
  background: getComputedStyle(document.body).backgroundColor,
  resources: performance.getEntriesByType("resource").map((r) => r.name)
    .filter((name) => !name.startsWith("data:")),
};
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=CHROMEDRIVER)
    driver = webdriver.Chrome(service=service, options=options)
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


def _write(run_dir: Path, out: Path, *options: str) -> Path:
    assert main(["report", str(run_dir), "--out", str(out), *options]) == 0
    return out / "report.html"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a recorded run, of one with all that can go wrong, and of one without switches."""
    folder = tmp_path_factory.mktemp("pages")
    names = ["tp2-pp2-vpp2-cp2-ep4-etp2-dp2-sp-noopt-mbs2", HOSTILE, "x" * 120]
    matrix = [[10**12 * (row + column) for column in range(5)] for row in range(5)]
    placement = {"bytes": {"identity": 10**15, "best": 10**14}}
    crowded = [
        switch(20 + i, source=names[i % 3], target=names[(i + 1) % 3], ok=i != 3,
               error=HOSTILE, bytes_matrix=matrix, nodes=list(range(5)), placement=placement)
        for i in range(10)
    ]  # fmt: skip
    refusals = [refused(5, reason=HOSTILE * 3), refused(6, target="y" * 300)]
    busy = write_run(folder / "busy", [*crowded, *refusals], losses=[3.0] * 40, torn="{")
    return {
        "recorded": _write(RECORDED, folder / "recorded", "--static", str(RECORDED_STATIC)),
        "busy": _write(busy, folder / "busy-report"),
        "plain": _write(write_run(folder / "plain", None), folder / "plain-report"),
    }


def _look(driver: Any, page: Path, width: int, theme: str) -> dict[str, Any]:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE_PX}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(page.as_uri())
    seen: dict[str, Any] = driver.execute_script(LOOK)
    return seen


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE_PX, PHONE_PX])
@pytest.mark.parametrize(
    ("name", "num_charts", "rows"),
    [
        ("recorded", 3, dict.fromkeys(["timeline", "times", "loads", "memory", "groups",
                                       "switches"], 4)),
        ("busy", 3, dict.fromkeys(["times", "loads", "memory", "groups", "switches"], 10)
         | {"timeline": 12, "links": 80, "refused": 2}),
        ("plain", 1, {}),
    ],
)  # fmt: skip
def test_a_report_is_whole_in_a_browser(
    browser: Any,
    pages: dict[str, Path],
    name: str,
    num_charts: int,
    rows: dict[str, int],
    width: int,
    theme: str,
) -> None:
    seen = _look(browser, pages[name], width, theme)
    assert browser.get_log("browser") == []
    assert seen["resources"] == []
    assert len(seen["images"]) == num_charts
    for complete, natural_width, natural_height, shown_width in seen["images"]:
        assert complete
        # Drawn for this width: sharp, and letters keep their size.
        assert (700 < natural_width < 900) if width == PHONE_PX else (natural_width > 1500)
        assert natural_height > 0
        assert 0.8 * width < shown_width < width
    assert seen["rows"] == rows
    assert seen["innerWidth"] == width
    assert seen["tooWide"] == 0
    assert seen["overflowing"] == []
    assert seen["background"] == {"light": "rgb(244, 246, 248)", "dark": "rgb(14, 18, 23)"}[theme]


@pytest.mark.parametrize("width", [WIDE_PX, PHONE_PX])
def test_the_timeline_shows_what_the_events_say(
    browser: Any, pages: dict[str, Path], width: int
) -> None:
    seen = _look(browser, pages["recorded"], width, "light")["timeline"]
    events = [json.loads(line) for line in (RECORDED / "events.jsonl").read_text().splitlines()]
    shown = {"event", "iteration", "from", "to", "stall", "moved"}
    assert [{key: row[key] for key in shown} for row in seen] == [
        {
            "event": f"switch {number}",
            "iteration": str(event["iteration"]),
            "from": event["source"],
            "to": event["target"],
            "stall": duration(event["stall_s"]),
            "moved": size(event["bytes"]["moved"]),
        }
        for number, event in enumerate(events, start=1)
    ]
    busy = _look(browser, pages["busy"], width, "light")["timeline"]
    assert [row["event"].split()[0] for row in busy] == ["switch"] * 10 + ["refused"] * 2


def test_the_log_would_tell_of_an_error(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<!DOCTYPE html><link rel="icon" href="data:,"><script>missing()</script>')
    browser.get(page.as_uri())
    assert "missing is not defined" in browser.get_log("browser")[0]["message"]
