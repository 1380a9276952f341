"""Say what a running job is doing: iteration, layout, who waits to join and who is to leave, and
the switch that is under way.

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
    job = jobs.find(args)
    status = job.status() or {}
    status["ended"] = job.has_ended
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
    if (switch := status["switch"]) is not None and not status["ended"]:
        at = f" after iteration {switch['at']}" if switch["at"] > status["iteration"] else ""
        phase = "" if switch["phase"] is None else f", in phase {switch['phase'] or 'prepare'}"
        print(
            f"switch {switch['number']} to {switch['layout']} on {switch['world']} ranks"
            f"{at} is under way ({switch['origin']}){phase}"
        )
    return 0
