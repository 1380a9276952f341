"""Run a training script of a Megatron-LM checkout as it is, with ``--dynatrain`` understood.

    torchrun … -m dynatrain_megatron.launch PATH/pretrain_gpt.py MEGATRON FLAGS… [--dynatrain …]

The script may be pretrain_gpt.py, pretrain_hybrid.py or pretrain_mamba.py of a checkout that a
release of megatron-core was made from, or a script of one's own that trains through
``megatron.training.pretrain``. The checkout's own ``megatron`` is used where it has one. On a
machine without CUDA the CPU platform is installed and the flags Megatron needs there are added.

A script that carries our patch (``dynatrain patch``) calls :func:`enter` instead.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dynatrain_megatron.plugin import entry

logger = logging.getLogger("dynatrain_megatron.launch")  # run with -m, __name__ is another

_USAGE = "usage: python -m dynatrain_megatron.launch SCRIPT.py [MEGATRON FLAGS] [--dynatrain …]"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script that ``argv`` begins with, as Python itself would; on every rank.

    Mistakes on the command line end the process with one message and exit code 2.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in entry.HELP:
        print(f"{_USAGE}\n\n{__doc__}")
        return
    script = _script(given)
    # Python puts the folder of the script it runs first; the checkout's packages are found there.
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *given[1:]]
    session = entry.start(given[1:])
    runpy.run_path(str(script), run_name="__main__")
    if session is not None and session.job is None:
        logger.warning(
            "%s has ended without training through megatron.training.pretrain: no layout could "
            "be changed",
            script.name,
        )


def enter(run_name: str) -> None:
    """What a patched script calls before it imports Megatron, with its own ``__name__``.

    Takes ``--dynatrain`` out of ``sys.argv`` and attaches; does nothing where the script is
    imported and not run.
    """
    if run_name == "__main__":
        entry.start(sys.argv[1:])


def _script(given: Sequence[str]) -> Path:
    if not given:
        _refuse("no script is named")
    script = Path(given[0])
    if given[0].startswith("-"):
        _refuse(f"the script comes first, before flags, but the first word is {given[0]!r}")
    try:
        found = script.is_file()
    except ValueError:  # a null byte
        found = False
    if not found:
        _refuse(f"{given[0]!r} is no file; name a script such as Megatron-LM/pretrain_gpt.py")
    if script.suffix != ".py":
        _refuse(f"{given[0]!r} is not a Python script")
    return script.resolve()


def _refuse(message: str) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"{message}\n{_USAGE}\n")
    raise SystemExit(2)


if __name__ == "__main__":
    main()
