"""Whether a command of a page is one, found out without running it.

A shell takes the page's text apart, with its variables and quotes; every command in it only says
how it was called. Then ``dynatrain`` is parsed by its own parsers, torchrun by torch's, Megatron's
flags by Megatron's, and what follows ``--dynatrain`` composed with the real schema.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dynatrain_megatron import cli
from dynatrain_megatron.cli import switch
from dynatrain_megatron.config import compose, compose_ahead, split_argv
from dynatrain_megatron.errors import DynaTrainError
from tests.docs.pages import ROOT

Argv = tuple[str, ...]

KNOWN = {
    "FLAGS": "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16",
    "RUN_DIR": "runs/a",
    "STORE": "head:29400",
    "HEAD": "head",
    "NPROC": "2",
    "PIDS": "17 18",
}
"""Variables that pages leave to their reader, and what they may be."""

PLACEHOLDERS = {
    "HOST:PORT": "head:29400",
    "HEAD": "head",
    "FLAGS": "--bf16",
    "N": "4",
    "I": "10",
    "LAYOUT": "tp2-pp2",
    "RUN_DIR": "runs/a",
}
"""Words in capitals that stand for the reader's own."""

_NOT_RUN = r"""
command_not_found_handle() {
  printf '%s\037' "$@" >>"$CALLS"; printf '\036' >>"$CALLS"; [ "$1" != pgrep ]
}
say() { command_not_found_handle "$@"; }
kill() { say kill "$@"; }; cd() { say cd "$@"; }; source() { say source "$@"; }
exec() { "$@"; }; hostname() { echo head; }; wait() { builtin wait; }; trap() { :; }; sleep() { :; }
"""


class Wrong(AssertionError):
    """A command that its program would not take."""


def called(text: str) -> list[Argv]:
    """The commands of a shell text as they would be called, in order; none of them is run."""
    scripts = [path for folder in ("scripts", "benchmarks") for path in ROOT.glob(f"{folder}/*.sh")]
    names = [str(path.relative_to(ROOT)) for path in scripts]
    functions = "".join(f'function {name} {{ say {name} "$@"; }}\n' for name in names)
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder, "calls")
        calls.touch()
        ran = subprocess.run(
            ["/bin/bash", "-c", f"{_NOT_RUN}{functions}PATH=/nowhere\n{text}\n"],
            cwd=folder, env={"CALLS": str(calls), **KNOWN},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        found = calls.read_text()
    if ran.stderr:
        raise Wrong(f"the shell says {ran.stderr}")
    return [tuple(line.split("\037")[:-1]) for line in found.split("\036")[:-1]]


def check(argv: Argv) -> None:
    """Raises :class:`Wrong` where the command cannot be meant so, or is none that is known."""
    program, *words = (PLACEHOLDERS.get(word, word) for word in argv if word != "…")
    if program not in _CHECKS:
        raise Wrong(f"{program} is no command that tests/docs/commands.py knows")
    _CHECKS[program](words)


def check_dynatrain(words: Sequence[str]) -> None:
    """A ``dynatrain`` command by its own parsers, Hydra overrides by their schema."""
    given = [re.sub(r"=HOST:PORT$", "=head:29400", word) for word in words]
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            args = cli._parse(given)
            if args.command == "switch":
                switch._request(args)
            if hasattr(args, "overrides"):
                compose_ahead(args.overrides)
    except SystemExit as end:
        if end.code:
            raise Wrong(f"dynatrain {' '.join(words)}: {told.getvalue()}") from None
        return  # its help was asked for
    except DynaTrainError as error:
        raise Wrong(f"dynatrain {' '.join(words)}: {error}") from None
    _check_megatron(getattr(args, "flags", []))


def check_option(command: str, option: str) -> None:
    """Whether a ``dynatrain`` command has an option of that name."""
    commands = cli.build_parser()._actions[-1].choices
    assert isinstance(commands, dict)
    if command not in commands or option not in commands[command]._option_string_actions:
        raise Wrong(f"dynatrain {command} has no {option}")


def check_overrides(overrides: Sequence[str]) -> None:
    """What follows ``--dynatrain``."""
    _composes(tuple(re.sub(r"=HOST:PORT$", "=head:29400", word) for word in overrides))


@cache
def _composes(overrides: Argv) -> None:
    try:
        compose(overrides)
    except DynaTrainError as error:
        raise Wrong(str(error)) from None


def _check_torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    with _refusals_of("torchrun"):
        args = parser.parse_args(list(words))
    start = ["-m"] if args.module else []
    _check_python([*start, args.training_script, *args.training_script_args])


def _check_python(words: Sequence[str]) -> None:
    """A module or a script, and where it trains its flags."""
    is_module = words[0] == "-m"
    target, *rest = words[is_module:]
    if is_module and importlib.util.find_spec(target) is None:
        raise Wrong(f"there is no module {target}")
    if not is_module and not _is_there(target):
        raise Wrong(f"there is no script {target}")
    if target == "dynatrain_megatron.launch":
        script, *rest = rest
        if not script.endswith(".py"):
            raise Wrong(f"launch takes a script first, not {script}")
    trains = target in ("dynatrain_megatron.launch", "dynatrain_megatron.plugin.pretrain_gpt")
    if trains or target.endswith("pretrain_gpt.py"):
        flags, overrides = split_argv(rest)
        _check_megatron(flags)
        check_overrides(overrides or ())
    elif not is_module:
        source = (ROOT / target).read_text()
        odd = [word for word in rest if word.startswith("--") and f'"{word}"' not in source]
        if odd:
            raise Wrong(f"{target} has no {' '.join(odd)}")


def _check_megatron(flags: Sequence[str]) -> None:
    with _refusals_of("Megatron"):
        _, unknown = _megatron_parser().parse_known_args([flag for flag in flags if flag != "…"])
    if unknown:
        raise Wrong(f"Megatron does not know {' '.join(unknown)}")


@cache
def _megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser: argparse.ArgumentParser = add_megatron_arguments(
        argparse.ArgumentParser(allow_abbrev=False)
    )
    return parser


@contextlib.contextmanager
def _refusals_of(program: str) -> Any:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            yield
    except SystemExit:
        raise Wrong(f"{program}: {told.getvalue()}") from None


def _check_srun(words: Sequence[str]) -> None:
    """What Slurm starts."""
    start = next(i for i, word in enumerate(words) if not word.startswith("-"))
    check(tuple(words[start:]))


def _check_rank(words: Sequence[str]) -> None:
    check(tuple(words))


def _check_paths(words: Sequence[str]) -> None:
    """Paths of the project among the words are there."""
    for word in words:
        path = word.partition("::")[0]
        if path.startswith(("tests/", "docs/", "scripts/", "benchmarks/")) and not _is_there(path):
            raise Wrong(f"there is no {path}")


def _is_there(path: str) -> bool:
    """In the project, or the reader's own (in his home, or in a checkout)."""
    return path.startswith(("~", "/", "$")) or "Megatron-LM" in path or (ROOT / path).exists()


def _check_pip(words: Sequence[str]) -> None:
    if words[:1] != ["install"] or len(words) < 2:
        raise Wrong(f"pip {' '.join(words)}")


_CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "dynatrain": check_dynatrain,
    "torchrun": _check_torchrun,
    "python": _check_python,
    "srun": _check_srun,
    "pip": _check_pip,
    **{
        str(path.relative_to(ROOT)): _check_paths
        for folder in ("scripts", "benchmarks")
        for path in sorted((ROOT / folder).glob("*.sh"))
        if os.access(path, os.X_OK)
    },
    "scripts/slurm_rank.sh": _check_rank,
    **dict.fromkeys(
        ("cat", "cd", "git", "head", "kill", "kubectl", "ls", "nc", "pgrep", "pkill", "sbatch",
         "scancel", "scontrol", "sinfo", "source", "squeue", "tail"),
        _check_paths,
    ),
}  # fmt: skip
"""Programs that pages name. The last ones are others': of them only paths of ours are looked at."""
