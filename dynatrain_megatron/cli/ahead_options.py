"""What `dynatrain plan` and `dynatrain simulate` have in common: options, and the cases they name.

Everything after ``--`` are a job's Megatron flags; before it come Hydra overrides, as after
``--dynatrain`` in a job, with ``model`` beside them.
"""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from dynatrain_megatron.cli.numbers import count
from dynatrain_megatron.errors import ConfigError

if TYPE_CHECKING:
    from dynatrain_megatron.config import Composed

_EXAMPLE = "model=llama2_70b source=tp8-pp4-dp4 target=tp4-pp8-dp4"


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides, flags, and options that say what is looked at."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help=f"what to look at, as Hydra overrides: {_EXAMPLE} topology=a800 (hosts of H100 if it "
        "is left out); source and target are layouts or presets of them; cfg=job shows the "
        "configuration alone. After --: a job's Megatron flags instead of model and source",
    )
    parser.add_argument(
        "--world", type=count, metavar="N", help="ranks of the job whose Megatron flags are given"
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="move bf16 weights alone, without the optimizer's state",
    )
    parser.add_argument(
        "--dynatrain-config-dir",
        type=Path,
        metavar="DIR",
        help="folder with presets of your own, such as topology/NAME.yaml or model/NAME.yaml",
    )
    parser.add_argument(
        "--efficiency",
        type=_share,
        default=0.8,
        metavar="SHARE",
        help="share of the links' rates that messages reach in the simulation (default: 0.8)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def compose_on(
    overrides: list[str], config_dir: Path | None, topology: str = "topology=h100"
) -> "Composed":
    """The configuration, on ``topology`` where it says nothing of one."""
    from dynatrain_megatron.config import compose_ahead

    composed = compose_ahead(overrides, config_dir)
    if composed.config.topology == "auto":
        composed = compose_ahead([topology, *overrides], config_dir)
    return composed


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0.01 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a share from 0.01 to 1")
    return share


def check_picture(path: Path) -> None:
    """Raise ConfigError where no picture can be written to ``path``, before any work is done."""
    suffixes = (".png", ".svg", ".pdf")
    if path.suffix not in suffixes:
        raise ConfigError(f"--picture {path} must end in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: {path.parent} is not a folder")
