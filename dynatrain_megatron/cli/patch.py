"""Give the training scripts of a Megatron-LM checkout the flag --dynatrain, or take it out again.

CHECKOUT is the folder with pretrain_gpt.py in it. A patch adds a few lines at the top of a script
and changes none; without --dynatrain on the command line they do nothing. Each is bound to one
exact file of one release, by the hash that git gives it; a file that no patch fits is left alone.
Such a script, or one that shall stay as it is, runs without a patch:

    torchrun … -m dynatrain_megatron.launch CHECKOUT/pretrain_gpt.py … --dynatrain …

apply    put the patches in; what is patched already stays
remove   take them out: the files are then what they were, to the last byte
status   tell what each script is: original, patched, edited (patched and changed besides),
         unneeded (runs another script), unknown (no patch fits)
"""

import argparse
import json
from pathlib import Path
from typing import Any

from dynatrain_megatron.cli import patch_files
from dynatrain_megatron.cli.patch_files import Patch, Script, State

SUMMARY = "give a Megatron-LM checkout's scripts the flag --dynatrain"

_DONE = {"apply": "patched now", "remove": "as before the patch"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain patch`."""
    parser.add_argument("action", choices=("apply", "remove", "status"))
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="the checkout's folder")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FILE", help="this script only; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print the scripts as JSON")


def run(args: argparse.Namespace) -> int:
    """Do it and say what each script is now."""
    changed: list[Script] = []
    if args.action == "apply":
        changed = patch_files.apply(args.checkout, args.only)
    elif args.action == "remove":
        changed = patch_files.remove(args.checkout, args.only)
    scripts = patch_files.scripts_of(args.checkout, args.only)
    names = {script.name for script in changed}
    if args.json:
        rows = [_as_json(script, script.name in names) for script in scripts]
        print(json.dumps({"checkout": str(args.checkout), "scripts": rows}, indent=2))
    else:
        for script in scripts:
            done = f", {_DONE[args.action]}" if script.name in names else ""
            print(f"{script.name}: {script.state}{_of_tag(script)}{done}")
    return 0


def _exact(script: Script) -> Patch | None:
    """The patch whose file this is, but for its own lines."""
    return script.patch if script.state in (State.original, State.patched) else None


def _of_tag(script: Script) -> str:
    patch = _exact(script)
    return "" if patch is None else f" ({patch.source})"


def _as_json(script: Script, changed: bool) -> dict[str, Any]:
    patch = _exact(script)
    return {
        "file": script.name,
        "state": str(script.state),
        "blob": patch_files.blob_of(script.data),
        "tag": None if patch is None else patch.tag,
        "commit": None if patch is None else patch.commit,
        "patch": None if patch is None else patch.path,
        "changed": changed,
    }
