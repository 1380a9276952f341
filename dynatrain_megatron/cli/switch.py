"""Ask a running job for another layout, for more processes or fewer.

    dynatrain switch --run-dir dynatrain-run --target tp2-pp2
    dynatrain switch --run-dir dynatrain-run --world 4 --wait
    dynatrain switch --run-dir dynatrain-run --target '{tp: 1, pp: 2}' --at-iteration 500

--run-dir is the job's own, run_dir of its --dynatrain; a file in it says where the job is to be
found, and only its owner may read it. From another machine: --endpoint HOST:PORT of the job's
store, with the name and the secret of that file in DYNATRAIN_JOB and DYNATRAIN_SECRET.

With --world and no --target the layout is the one closest to the job's that so many ranks allow;
processes that wait to join (elastic.join) are taken in, those that are too many leave. The job
answers at its next step.
"""

import argparse
import json
import sys
import time
from typing import Any

from dynatrain_megatron.cli import job as jobs
from dynatrain_megatron.errors import ConfigError, LayoutError
from dynatrain_megatron.layout import read_changes

SUMMARY = "ask a running job for another layout, more processes or fewer"

_ENDS = ("done", "refused", "possible", "called off")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain switch`."""
    jobs.add_arguments(parser)
    parser.add_argument("--target", metavar="LAYOUT", help="such as tp2-pp2 or '{tp: 2, pp: 2}'")
    parser.add_argument("--world", type=jobs.count, metavar="N", help="the number of ranks")
    parser.add_argument(
        "--at-iteration", type=jobs.count, metavar="I", help="not before iteration I is done"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only ask whether it could be, change nothing"
    )
    parser.add_argument("--wait", action="store_true", help="wait until it is done, or was not")
    parser.add_argument(
        "--timeout", type=jobs.seconds, default=600.0, metavar="S", help="of waiting (600)"
    )


def run(args: argparse.Namespace) -> int:
    """Ask, and print what the job answers."""
    request = _request(args)
    directory, secret = jobs.find(args)
    number = directory.ask(request, secret)
    deadline, shown = time.monotonic() + args.timeout, None
    while True:
        answer = directory.answer_of(number)
        if answer is not None and answer != shown:
            shown = answer
            _show(answer, args.json)
        if answer is not None and (answer["state"] in _ENDS or not args.wait):
            return int(answer["state"] not in ("done", "possible", "announced"))
        if directory.has_ended:
            print("dynatrain switch: the job has ended", file=sys.stderr)
            return 1
        if time.monotonic() > deadline:
            print(
                f"dynatrain switch: no {'answer' if answer is None else 'end'} after "
                f"{args.timeout:g} s; the job answers at step boundaries (dynatrain status)",
                file=sys.stderr,
            )
            return 1
        time.sleep(0.1)


def _request(args: argparse.Namespace) -> dict[str, Any]:
    request: dict[str, Any] = {}
    if args.target is not None:
        request["layout"] = _layout(args.target)
    if args.world is not None:
        request["world"] = args.world
    if not request:
        raise ConfigError("nothing is asked for; give --target LAYOUT, --world N or both")
    if args.at_iteration is not None:
        request["at"] = args.at_iteration
    if args.dry_run:
        request["dry_run"] = True
    return request


def _layout(text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    wanted: Any = text
    try:
        if text.lstrip().startswith("{"):
            wanted = OverridesParser.create().parse_override(f"layout={text}").value()
        read_changes(wanted)
    except LayoutError as error:
        raise ConfigError(f"--target {text!r} is not a layout: {error}") from error
    except Exception as error:  # Hydra's parser raises much besides its own exceptions
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--target {text!r} cannot be read: {reason}") from error
    return wanted


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer), flush=True)
        return
    state, told = answer["state"], answer.get("layout", "")
    if state in ("refused", "called off"):
        print(f"{state}: {answer['reason']}", flush=True)
    elif state == "done":
        print(f"done at iteration {answer['iteration']}: the job is in {told}", flush=True)
    else:
        print(f"{state}: {told} on {answer['world']} ranks", flush=True)
