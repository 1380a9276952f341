"""Fingerprints of a saved checkpoint: of its whole state, and of each part of it.

CHECKPOINT_DIR is a Megatron torch_dist checkpoint (iter_0000005) or a folder of them, of which the
latest is read. They are the same numbers that events.jsonl has of a switch with
engine.verify=fingerprint, whatever the layout was when the checkpoint was saved; the optimizer
state has to be saved with --dist-ckpt-optim-fully-reshardable. No process group and no GPU is
needed, and no more memory than for the largest part of a tensor as saved.

Parameters that are rounded from saved main parameters are told apart: a switch rebuilds them. They
also show whether the checkpoint has been damaged while it was saved: up to megatron-core 0.19.2
parameters behind a padded bucket of a gradient buffer are saved shifted (exit code 1).
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynatrain_megatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from dynatrain_megatron.adapters.saved_state import SavedState

SUMMARY = "compute the fingerprints of a saved checkpoint, to compare it with a running job"
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain fingerprint`."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR", help="the checkpoint")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="RUN_DIR",
        dest="run_dir",
        help="compare with the run's switch at the checkpoint's iteration",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the fingerprints; 1 where the checkpoint is damaged, or is not what the run had."""
    # torch takes seconds to import.
    from dynatrain_megatron.adapters.saved import SavedCheckpoint
    from dynatrain_megatron.adapters.saved_state import fingerprint_saved

    try:
        checkpoint = SavedCheckpoint(args.checkpoint)
        switch = None if args.run_dir is None else _switch(args.run_dir, checkpoint.directory)
        saved = fingerprint_saved(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    different = [] if switch is None else _different(saved, switch)
    content = {
        "checkpoint": str(checkpoint.directory),
        "fingerprint": saved.fingerprint,
        "states": saved.states,
        "rounded": saved.rounded,
        "shifted": [{"key": each.key, "zeros": each.zeros} for each in saved.shifted],
        "incomplete": saved.incomplete,
    }
    if switch is not None:
        content["run"] = {"iteration": switch["iteration"], "different": different}
    if args.json:
        print(json.dumps(content, indent=2))
    else:
        _tell(content, saved, switch, different)
    return int(bool(saved.shifted or saved.incomplete or different))


def _switch(run_dir: Path, checkpoint: Path) -> Mapping[str, Any]:
    """The run's last switch at the checkpoint's iteration that has a fingerprint."""
    number = checkpoint.name.removeprefix("iter_")
    if not (number.isascii() and number.isdecimal()):
        raise ConfigError(f"--run: {checkpoint} is not named for its iteration (iter_0000005)")
    path = run_dir / "events.jsonl"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"--run: {path}: {error.strerror}") from error
    found: dict[int, Mapping[str, Any]] = {}
    for count, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            if count == len(lines):  # the run is writing it just now
                continue
            raise ConfigError(f"--run: {path}, line {count} is no JSON object") from None
        marks = event.get("fingerprint") if isinstance(event, dict) else None
        at = event.get("iteration") if isinstance(event, dict) else None
        if type(at) is int and isinstance(marks, dict) and isinstance(marks.get("after"), str):
            found[at] = event
    if int(number) not in found:
        raise ConfigError(
            f"--run: {path} has no switch with a fingerprint at iteration {int(number)}, but at "
            f"{', '.join(map(str, found)) or 'none'}; a run has them with "
            "engine.verify=fingerprint, and save_after_switch=true saves at the same iteration"
        )
    return found[int(number)]


def _different(saved: "SavedState", switch: Mapping[str, Any]) -> list[str]:
    """The states that are not those the run had, or that the whole is not."""
    if saved.fingerprint == switch["fingerprint"]["after"]:
        return []
    had = switch.get("state_fingerprints")
    if not isinstance(had, dict):
        return ["the whole"]
    return sorted(
        name for name in had.keys() | saved.states if had.get(name) != saved.states.get(name)
    )


def _tell(
    content: Mapping[str, Any],
    saved: "SavedState",
    switch: Mapping[str, Any] | None,
    different: list[str],
) -> None:
    print(f"checkpoint   {content['checkpoint']}")
    print(f"fingerprint  {saved.fingerprint}, of {len(saved.states)} states")
    for name, digits in saved.states.items():
        print(f"  {digits}  {name}")
    if saved.rounded:
        print(f"rounded from main parameters, which a switch rebuilds: {len(saved.rounded)}")
        for name, digits in saved.rounded.items():
            print(f"  {digits}  {name.removesuffix(' plain')}")
    if switch is not None:
        where = f"the run after its switch at iteration {switch['iteration']}"
        print(f"different from {where}: {_some(different)}" if different else f"equal to {where}")
    if saved.incomplete:
        print(f"INCOMPLETE: elements are missing of {_some(saved.incomplete)}")
    if saved.shifted:
        zeros = max(each.zeros for each in saved.shifted)
        print(
            f"DAMAGED: main parameters are not what the parameters were rounded from, of "
            f"{_some([each.key for each in saved.shifted])}; up to {zeros} zeros at an end.\n"
            "Megatron-core up to 0.19.2 saves the optimizer state of parameters behind a padded "
            "bucket of a gradient buffer shifted, and the end of the last one as zeros. Load an "
            "earlier checkpoint, or one saved with one bucket for each buffer "
            "(--ddp-num-buckets 1, or without --overlap-grad-reduce)."
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
