"""Where presets are: YAML files by group, ours and those in a user's own folder.

::

    configs/                        DIR of --dynatrain-config-dir DIR
      topology/h100.yaml              topology/mine.yaml
      experiment/rlhf_phases.yaml     engine/careful.yaml

``topology=h100`` takes the file of that name; one in the user's folder goes before ours. A name is
of letters, digits and ``_ . -``. Which groups there are to choose from is for
:mod:`dynatrain_megatron.config` to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynatrain_megatron.errors import ConfigError, did_you_mean

FLAG = "--dynatrain-config-dir"
PACKAGE = "dynatrain_megatron.configs"
FOLDER = Path(__file__).parent / "configs"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SUFFIX = ".yaml"


@dataclass(frozen=True, slots=True)
class Presets:
    """Ours, and those of ``own`` where that is given. Raises ConfigError where it is no folder."""

    own: Path | None = None

    def __post_init__(self) -> None:
        """Check the folder once."""
        if self.own is not None and not self.own.is_dir():
            raise ConfigError(
                f"{FLAG} {self.own} is not a folder; it must have presets such as "
                "topology/NAME.yaml or experiment/NAME.yaml"
            )

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files are looked for, in order."""
        return (FOLDER,) if self.own is None else (self.own.resolve(), FOLDER)

    def names(self, group: str) -> list[str]:
        """All presets of a group, sorted."""
        found = {
            path.name.removesuffix(_SUFFIX)
            for folder in self.folders
            for path in (folder / group).glob(f"*{_SUFFIX}")
        }
        return sorted(name for name in found if _NAME.fullmatch(name))

    def has(self, group: str, name: object) -> bool:
        """Whether ``name`` is a preset of the group."""
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            return False
        return any((folder / group / f"{name}{_SUFFIX}").is_file() for folder in self.folders)

    def hint(self, group: str, name: object) -> str:
        """What there is instead of ``name``: `` (did you mean 'h100'?); presets: a800, h100``."""
        names = self.names(group)
        return f"{did_you_mean(str(name), names)}; presets: {', '.join(names) or 'none'}"


def take_config_dir(argv: Sequence[str]) -> tuple[list[str], Path | None]:
    """The command line without ``--dynatrain-config-dir DIR``, and that folder.

    Raises ConfigError where the flag is given twice or has no folder.
    """
    rest: list[str] = []
    found: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == FLAG:
            found.append(next(arguments, ""))
        elif argument.startswith(f"{FLAG}="):
            found.append(argument.partition("=")[2])
        else:
            rest.append(argument)
    if len(found) > 1:
        raise ConfigError(f"{FLAG} is given twice; put all presets into one folder")
    if found and (not found[0] or found[0].startswith("-") or "\0" in found[0]):
        raise ConfigError(f"{FLAG} {found[0]!r} names no folder; write {FLAG} DIR")
    return rest, Path(found[0]) if found else None
