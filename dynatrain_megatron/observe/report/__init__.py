"""The report of a run: one HTML page that stands alone, and its pictures as PNG files.

::

    steps.jsonl   ─► read ─► charts ─► report.html
    events.jsonl             page      loss.png  time.png  bytes.png

Local and without torch: it reads files and writes files. Only the charts need matplotlib.
"""

from dataclasses import dataclass
from pathlib import Path

from dynatrain_megatron.errors import ConfigError, DynaTrainError
from dynatrain_megatron.observe.report.compare import as_json, finite, relative_difference
from dynatrain_megatron.observe.report.read import Refusal, Run, Step, Switch, read_run

PAGE = "report.html"
PICTURES = ("loss.png", "time.png", "bytes.png")

__all__ = [
    "ChartsUnavailable",
    "Refusal",
    "Report",
    "Run",
    "Step",
    "Switch",
    "as_json",
    "finite",
    "read_run",
    "relative_difference",
    "write_report",
]


class ChartsUnavailable(DynaTrainError):
    """matplotlib is not installed; everything else works without it."""


@dataclass(frozen=True, slots=True)
class Report:
    """The files of a report that was written."""

    page: Path
    pictures: tuple[Path, ...]


def write_report(run: Run, static: Run | None, out: Path) -> Report:
    """Write the page and the pictures into ``out``, over those of an earlier report.

    Raises ConfigError where ``out`` cannot be a folder, ChartsUnavailable without matplotlib.
    """
    try:
        from dynatrain_megatron.observe.report import build
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("matplotlib", "PIL", "numpy"):
            raise
        raise ChartsUnavailable(
            "charts need matplotlib, which is not installed; pip install dynatrain-megatron[report]"
        ) from error
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder; name a new or another one")
    out.mkdir(parents=True, exist_ok=True)
    page, pictures = build.build(run, static)
    for name in PICTURES:
        (out / name).unlink(missing_ok=True)
    for name, png in pictures.items():
        (out / name).write_bytes(png)
    (out / PAGE).write_text(page, encoding="utf-8")
    return Report(out / PAGE, tuple(out / name for name in pictures))
