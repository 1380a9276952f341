"""Say what a running job is doing: iteration, layout, who waits to join and who is to leave.

dynatrain status --run-dir dynatrain-run
"""

import argparse
import json

from dynatrain_megatron.cli import job as jobs

SUMMARY = "say what a running job is doing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain status`."""
    jobs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print what the job said last."""
    directory, _ = jobs.find(args)
    status = directory.status() or {}
    status["ended"] = directory.has_ended
    if args.json:
        print(json.dumps(status))
        return 0
    if "iteration" not in status:
        print("the job has not said anything yet")
        return 0
    state = "ended" if status["ended"] else "runs"
    print(f"{state}: iteration {status['iteration']}, {status['layout']}, {status['world']} ranks")
    for what in ("waiting", "leaving"):
        if status[what]:
            print(f"{what}: {', '.join(status[what])}")
    if status["switch"] is not None:
        print(f"switch {status['switch']} is under way")
    return 0
