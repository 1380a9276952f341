"""Write the report of a run: an HTML page that stands alone, and its charts as PNG files.

RUN_DIR is a run's folder, with steps.jsonl and events.jsonl in it, or one of them; a run that is
still going on may be read too. The page shows the loss with every switch marked, all events in
their order, where the time of each switch went, which bytes moved between which ranks and nodes,
memory as planned and as recorded, process groups, and what was refused and why. It needs no
network. Needs matplotlib: pip install dynatrain-megatron[report].
"""

import argparse
import json
from pathlib import Path

from dynatrain_megatron.errors import ConfigError, DynaTrainError
from dynatrain_megatron.observe.report import as_json, read_run, write_report

SUMMARY = "write a run's report: a page and charts of its loss, its switches and their cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain report`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument(
        "--static",
        type=Path,
        metavar="DIR",
        help="folder of a run that never switched, to show its loss beside",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for report.html and the PNG files (default: RUN_DIR/report)",
    )
    parser.add_argument("--json", action="store_true", help="print what was read as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    try:
        recorded = read_run(args.run_dir)
        static = None if args.static is None else read_run(args.static)
        if static is not None and not static.steps:
            raise ConfigError(f"--static {args.static} has no training steps to compare with")
        report = write_report(recorded, static, args.out or args.run_dir / "report")
    except OSError as error:
        raise DynaTrainError(f"{error.filename}: {error.strerror}") from error
    if args.json:
        files = {"page": str(report.page), "pictures": [str(path) for path in report.pictures]}
        print(json.dumps({**files, **as_json(recorded, static)}, indent=2))
    else:
        print(f"Report: {report.page}")
        for path in report.pictures:
            print(f"Chart:  {path}")
    return 0
