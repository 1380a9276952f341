"""What every way of starting a run does first: read ``--dynatrain``, choose the platform, attach.

Our own script, Megatron-LM's scripts run by ``launch`` and patched ones all come through
:func:`start`, before anything of Megatron is imported.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from dynatrain_megatron import platform
from dynatrain_megatron.config import (
    FLAG,
    DynaTrainConfig,
    asks_to_show,
    compose,
    split_argv,
)
from dynatrain_megatron.errors import ConfigError, DynaTrainError, HostMismatch, PlatformError
from dynatrain_megatron.platform import flags
from dynatrain_megatron.presets import FLAG as CONFIG_DIR_FLAG
from dynatrain_megatron.presets import take_config_dir

if TYPE_CHECKING:
    from dynatrain_megatron.plugin.session import Session

HELP = ("-h", "--help")

_USAGE = 2  # exit code for mistakes on the command line


def start(argv: Sequence[str], refused: Sequence[flags.RefusedFlag] = ()) -> Session | None:
    """Make this process ready to train, and leave Megatron's flags in ``sys.argv``.

    Runs on every rank, with torchrun's environment variables; not a collective. Mistakes in flags
    and overrides end the process with one message and exit code 2, before a process group is made.

    Args:
        argv: the command line without the script.
        refused: flags that the script to be run cannot do.

    Returns:
        The session behind ``--dynatrain``; None without the flag.
    """
    _speak_on_first_rank()
    try:
        config = prepare(argv, refused)
        if not set(HELP).isdisjoint(argv):
            _show_flag()
        if config is None:
            return None
        from dynatrain_megatron.plugin import attach

        return attach(config)
    except DynaTrainError as error:
        end(error)


def end(error: DynaTrainError) -> NoReturn:
    """End this process before anything was started, with one message for all ranks of a host."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{error}\n")
    usage = isinstance(error, ConfigError | PlatformError)
    raise SystemExit(_USAGE if usage else error.exit_code) from None


def prepare(
    argv: Sequence[str], refused: Sequence[flags.RefusedFlag] = ()
) -> DynaTrainConfig | None:
    """Read the overrides, install the platform and leave Megatron's flags in ``sys.argv``.

    With ``cfg=job`` among the overrides the first rank shows the configuration, and all end.

    Returns:
        The configuration behind ``--dynatrain``; None without the flag.

    Raises:
        ConfigError: for a wrong override.
        PlatformError: for a flag that cannot work here.
        HostMismatch: for a Megatron or torch in which a name to be replaced is missing.
    """
    rest, config_dir = take_config_dir(argv)
    host_argv, overrides = split_argv(rest)
    if overrides is None and config_dir is not None:
        raise ConfigError(f"{CONFIG_DIR_FLAG} needs {FLAG}, whose presets it adds to")
    composed = None if overrides is None else compose(overrides, config_dir)
    if composed is not None and asks_to_show(overrides or ()):
        if os.environ.get("RANK", "0") == "0":
            print(composed.text, end="")
        raise SystemExit(0)
    config = None if composed is None else composed.config
    flags.refuse(host_argv, refused, "in this entry")
    chosen = platform.install("auto" if config is None else config.platform)
    host_argv += chosen.default_flags(host_argv)
    sys.argv = [sys.argv[0], *host_argv, *flags.local_stack(host_argv)]
    return config


class _PlainHelp(argparse.HelpFormatter):
    """Shows a help text as it is where argparse cannot fill it in."""

    def _expand_help(self, action: argparse.Action) -> str:
        # Some help texts of Megatron have a bare per cent sign, which ends --help with an error.
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


@functools.cache  # a patched script that launch runs starts twice
def _show_flag() -> None:
    """Show ``--dynatrain`` in Megatron's --help; it was taken out of the arguments before."""
    host = importlib.import_module("megatron.training.arguments")
    original: Callable[..., Any] | None = getattr(host, "add_megatron_arguments", None)
    if original is None:
        raise HostMismatch(
            "megatron.training.arguments.add_megatron_arguments is missing in the installed "
            "Megatron; install a megatron-core version named in the README"
        )

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return _add_flag(original(parser))

    setattr(host, "add_megatron_arguments", add_megatron_arguments)  # noqa: B010


def _add_flag(parser: Any) -> Any:
    parser.formatter_class = _PlainHelp
    group = parser.add_argument_group(title="dynatrain")
    group.add_argument(
        FLAG,
        nargs="*",
        metavar="OVERRIDE",
        default=argparse.SUPPRESS,
        help="change the parallel layout while training; Hydra overrides follow, for example "
        "schedule=[{iteration: 50, layout: {tp: 1, pp: 2}}]; with cfg=job they are shown as one "
        "configuration, and nothing is run",
    )
    group.add_argument(
        CONFIG_DIR_FLAG,
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="folder with presets of your own for --dynatrain, such as topology/NAME.yaml",
    )
    return parser


def _speak_on_first_rank() -> None:
    """Show what the package logs on the first rank, on the others warnings of the package only."""
    first = os.environ.get("RANK", "0") == "0"
    package = logging.getLogger("dynatrain_megatron")
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[dynatrain] %(message)s"))
        package.addHandler(handler)
        package.propagate = False
    package.setLevel(logging.INFO if first else logging.WARNING)
    if not first:
        # Megatron warns of each library that it does not find, on every rank.
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=r"megatron\.")
