"""Plan a switch without a job: what it moves, from where to where, and what it takes.

    dynatrain plan model=qwen3_235b_a22b source=tp4-pp8-dp4-ep8-etp1-sp \\
        target=tp4-pp4-dp8-ep16-etp1-sp topology=h200
    dynatrain plan model=llama2_7b source=tp4-dp2 target=pp4-dp2 --memory-gib 80
    dynatrain plan target=tp4-pp2 --world 16 -- MEGATRON FLAGS…

No GPU, no ranks and no Megatron are needed. A model is a preset or a mapping of sizes, or read from
a job's Megatron flags; layouts are checked as a job would check them, and where one cannot be the
rule it breaks is said and the exit code is 1. A schedule is planned switch by switch. Messages are
those that a job would send; their seconds are simulated on the links of the topology.
"""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from dynatrain_megatron.cli.ahead_options import (
    add_case_arguments,
    check_picture,
    compose_on,
)
from dynatrain_megatron.errors import ConfigError, DynaTrainError

if TYPE_CHECKING:
    from dynatrain_megatron.ahead.cases import Case, Impossible
    from dynatrain_megatron.ahead.estimate import Estimate

SUMMARY = "plan a switch without a job: bytes, rounds, memory, seconds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatrain plan`."""
    add_case_arguments(parser)
    parser.add_argument(
        "--bound",
        action="store_true",
        help="also solve the linear program of how little the busiest rank could have to do; needs "
        "scipy: pip install dynatrain-megatron[bound]",
    )
    parser.add_argument(
        "--memory-gib",
        type=_memory,
        metavar="GIB",
        help="memory of a rank's device; the switch is found not feasible where it takes more",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="write bytes from rank to rank and the split of time as a picture (png, svg, pdf); "
        "needs matplotlib: pip install dynatrain-megatron[report]",
    )


def run(args: argparse.Namespace) -> int:
    """Plan every switch that was asked for."""
    from dynatrain_megatron.ahead.cases import Case, Impossible, read_cases
    from dynatrain_megatron.config import asks_to_show

    overrides, flags = args.overrides, args.flags
    composed = compose_on(overrides, args.dynatrain_config_dir)
    if asks_to_show(overrides):
        print(composed.text, end="")
        return 0
    if args.picture is not None:
        check_picture(args.picture)
    cases = read_cases(composed.config, flags, world=args.world, weights_only=args.weights_only)
    if args.picture is not None and sum(isinstance(case, Case) for case in cases) > 1:
        raise ConfigError("--picture is of one switch, but the schedule has several")
    found = [_of(case, args) for case in cases]
    if args.json:
        print(json.dumps([_json(one) for one in found], indent=2))
    else:
        print("\n\n".join("\n".join(_lines(one)) for one in found))
    return 1 if any(isinstance(one, Impossible) or one.refusal for one in found) else 0


def _of(case: "Case | Impossible", args: argparse.Namespace) -> "Estimate | Impossible":
    from dynatrain_megatron.ahead.cases import Impossible
    from dynatrain_megatron.ahead.estimate import estimate

    if isinstance(case, Impossible):
        return case
    try:
        found = estimate(
            case,
            efficiency=args.efficiency,
            bound=args.bound,
            memory_bytes=None if args.memory_gib is None else int(args.memory_gib * 2**30),
        )
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "scipy":
            raise
        raise DynaTrainError(
            "--bound needs scipy, which is not installed; pip install dynatrain-megatron[bound]"
        ) from error
    if args.picture is not None:
        _draw(found, args.picture)
    return found


def _memory(text: str) -> float:
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 < gib < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of GiB")
    return gib


def _draw(found: "Estimate", path: Path) -> None:
    try:
        from dynatrain_megatron.ahead.picture import draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise DynaTrainError(
            "--picture needs matplotlib, which is not installed; "
            "pip install dynatrain-megatron[report]"
        ) from error
    try:
        draw(found, path)
    except OSError as error:
        raise DynaTrainError(f"{path}: {error.strerror}") from error


def _json(found: "Estimate | Impossible") -> dict[str, object]:
    from dynatrain_megatron.ahead.cases import Impossible

    if isinstance(found, Impossible):
        return {
            "feasible": False,
            "source": str(found.source),
            "target": found.target,
            "reason": found.reason,
        }
    return found.as_json()


def _lines(found: "Estimate | Impossible") -> list[str]:
    from dynatrain_megatron.ahead.cases import Impossible
    from dynatrain_megatron.ahead.text import estimate_lines, impossible_lines

    return impossible_lines(found) if isinstance(found, Impossible) else estimate_lines(found)
