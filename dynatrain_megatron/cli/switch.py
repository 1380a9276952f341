"""Ask a running job for another layout, for more processes or fewer.

    dynatrain switch --run-dir dynatrain-run --target tp2-pp2
    dynatrain switch --run-dir dynatrain-run --world 4 --wait
    dynatrain switch --run-dir dynatrain-run --target '{tp: 1, pp: 2}' --at-iteration 500

--run-dir is the job's own, run_dir of its --dynatrain. On the host of rank 0 the job listens at a
socket in it, elsewhere a file in it says where the job is to be found; both are for its owner only.
Without that folder: --endpoint HOST:PORT of the job's store, with the name and the secret of the
file job.json in DYNATRAIN_JOB and DYNATRAIN_SECRET.

With --world and no --target the layout is the one closest to the job's that so many ranks allow;
processes that wait to join (elastic.join) are taken in, those that are too many leave. The job
answers at its next step; while another switch is under way it says so, and answers after it. With
--wait a terminal shows how far it is.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from dynatrain_megatron.cli import job as jobs
from dynatrain_megatron.cli.numbers import count, seconds
from dynatrain_megatron.errors import ConfigError, LayoutError, WorldError
from dynatrain_megatron.layout import read_changes
from dynatrain_megatron.observe.units import duration, size

SUMMARY = "ask a running job for another layout, more processes or fewer"

_ENDS = ("done", "refused", "possible", "called off")
_GOOD = ("done", "possible", "announced", "waiting")
_POLL_S = 0.1
_SILENT_S = 20.0
"""Of all of a job's processes, which beat every second also while they switch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain switch`."""
    jobs.add_arguments(parser)
    parser.add_argument("--target", metavar="LAYOUT", help="such as tp2-pp2 or '{tp: 2, pp: 2}'")
    parser.add_argument("--world", type=count, metavar="N", help="the number of ranks")
    parser.add_argument(
        "--at-iteration", type=count, metavar="I", help="not before iteration I is done"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only ask whether it could be, change nothing"
    )
    parser.add_argument("--wait", action="store_true", help="wait until it is done, or was not")
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="of waiting (600)"
    )


def run(args: argparse.Namespace) -> int:
    """Ask, and print what the job answers."""
    request = _request(args)
    job = jobs.find(args)
    if job.has_ended:
        return _failed("the job has ended")
    jobs.status_of(job)
    number = job.ask(request)
    with _live(args) as show:
        try:
            return _follow(args, job, number, show)
        except WorldError as error:
            return _failed(f"the job's store is gone, and so most likely is the job: {error}")


def _follow(args: argparse.Namespace, job: jobs.RunningJob, number: int, show: "_Line") -> int:
    """Print each new answer until one is the last, or there will be none."""
    deadline, shown, told = time.monotonic() + args.timeout, None, ""
    while True:
        answer = job.answer_of(number)
        if answer is not None and answer != shown:
            shown = answer
            with show.hidden():
                _show(answer, args.json)
        if answer is not None and (answer["state"] in _ENDS or not args.wait):
            return int(answer["state"] not in _GOOD)
        if job.has_ended:
            return _failed("the job has ended")
        status = job.status() or {}
        members = tuple(status.get("members", ()))
        if job.seems_dead(members, _SILENT_S):
            return _failed(
                f"none of the job's {len(members)} processes has given a sign of life for "
                f"{_SILENT_S:g} s; it seems to be dead"
            )
        if time.monotonic() > deadline:
            return _failed(
                f"no {'answer' if answer is None else 'end'} after {args.timeout:g} s; the job "
                f"answers at step boundaries, and is at: {progress_of(status, number)} (dynatrain "
                f"status tells more)"
            )
        if (now := progress_of(status, number)) != told:
            told = now
            show.update(now)
        time.sleep(_POLL_S)


def progress_of(status: dict[str, Any], number: int) -> str:
    """In words, how far a job with this status is with the request of this number."""
    switch = status.get("switch")
    if "iteration" not in status:
        return "no word from the job yet"
    at = f"iteration {status['iteration']}"
    if switch is None:
        return f"{at}: asked, the job answers at its next step"
    what = f"{switch['layout']} on {switch['world']} ranks"
    if switch["request"] != number:
        what = f"another switch first ({switch['origin']}), to {what}"
    if switch["phase"] is not None:
        return f"{at}: {what}, {switch['phase'] or 'about to begin'}"
    if switch["at"] > status["iteration"]:
        return f"{at}: {what}, after iteration {switch['at']}"
    return f"{at}: {what}, {'about to begin' if switch['ready'] else 'being prepared'}"


class _Line:
    """The line that says how far a switch is; nothing where there is no terminal."""

    def update(self, text: str) -> None:
        """Say something else."""

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Make way for other output inside."""
        yield


class _LiveLine(_Line):
    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        # What is printed meanwhile goes to stdout, wherever that is.
        self.live = Live(
            self._spinner,
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def update(self, text: str) -> None:
        from rich.text import Text

        self._spinner.update(text=Text(text, overflow="ellipsis", no_wrap=True))

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        self.live.stop()
        yield
        self.live.start()


@contextlib.contextmanager
def _live(args: argparse.Namespace) -> Iterator[_Line]:
    if not args.wait or args.json or not sys.stderr.isatty():
        yield _Line()
        return
    line = _LiveLine()
    with line.live:
        yield line


def _failed(why: str) -> int:
    print(f"dynatrain switch: {why}", file=sys.stderr)
    return 1


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
    if state in ("refused", "called off", "waiting"):
        print(f"{state}: {answer['reason']}", flush=True)
    elif state == "done":
        done = f"done at iteration {answer['iteration']}: the job is in {told}{_cost(answer)}"
        print(done, flush=True)
    else:
        print(f"{state}: {told} on {answer['world']} ranks", flush=True)


def _cost(answer: dict[str, Any]) -> str:
    if "stall_s" not in answer:
        return ""
    return (
        f"; no step ran for {duration(answer['stall_s'])}, {size(answer['bytes_moved'])} were moved"
    )
