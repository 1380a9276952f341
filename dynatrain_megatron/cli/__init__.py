"""The `dynatrain` command: one dispatcher, one module for each command.

A command module offers SUMMARY, `add_arguments(parser)` and `run(args) -> int`, and stands in
COMMANDS. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

A command whose parser has ``overrides`` takes words of the form key=value anywhere between its
options, and what follows ``--`` as ``flags``.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from dynatrain_megatron import __version__
from dynatrain_megatron.errors import DynaTrainError

COMMANDS = {
    "demo": "dynatrain_megatron.cli.demo",
    "doctor": "dynatrain_megatron.cli.doctor",
    "fingerprint": "dynatrain_megatron.cli.fingerprint",
    "layouts": "dynatrain_megatron.cli.layouts",
    "patch": "dynatrain_megatron.cli.patch",
    "plan": "dynatrain_megatron.cli.plan",
    "report": "dynatrain_megatron.cli.report",
    "simulate": "dynatrain_megatron.cli.simulate",
    "status": "dynatrain_megatron.cli.status",
    "store": "dynatrain_megatron.cli.store",
    "switch": "dynatrain_megatron.cli.switch",
}

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; it imports the command modules, which import nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="dynatrain",
        description="Change the parallel layout of a Megatron-LM training job while it runs.",
        epilog="exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"dynatrain-megatron {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        command = commands.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors exit with 2 from argparse."""
    args = _parse(list(sys.argv[1:] if argv is None else argv))
    # A plain `kill` ends like Ctrl-C, so that a command's children never outlive it.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(args.run(args))
    except DynaTrainError as error:
        print(f"dynatrain {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"dynatrain {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = build_parser()
    end = argv.index("--") if "--" in argv else len(argv)
    # argparse takes positional arguments only as long as no option comes between them.
    args, others = parser.parse_known_args(argv[:end])
    if not hasattr(args, "overrides") or any(word.startswith("-") for word in others):
        return parser.parse_args(argv)
    args.overrides += others
    args.flags = argv[end + 1 :]
    return args


def _interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
