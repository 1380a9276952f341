"""Replacing names of the host in a controlled way: a table, applied once, with an undo.

A :class:`Replacement` is one row: the dotted name of the host, why it cannot stay as it is, and a
function that makes the new value from the old one. :func:`apply` checks that every name exists
before it changes the first, so that a renamed host function is an error and never goes unnoticed.
The tables themselves are in :mod:`.cpu` (torch on a machine without a GPU) and :mod:`.host`
(Megatron on a machine without Transformer Engine and Apex).
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dynatrain_megatron.errors import HostMismatch
from dynatrain_megatron.platform.versions import ALL, Releases

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Replacement:
    """One replaced name of torch or Megatron.

    Args:
        target: dotted name, for example ``torch.cuda.Stream`` or ``torch.Tensor.to``.
        reason: why the platform cannot leave the name alone.
        make: takes what the name stands for now, returns what it shall stand for.
        releases: of megatron-core that have the name; elsewhere the row is left out.
    """

    target: str
    reason: str
    make: Callable[[Any], Any] = field(repr=False)
    releases: Releases = ALL

    def locate(self) -> tuple[Any, str]:
        """The module or class that holds the name, and the name's last part.

        Raises:
            HostMismatch: if the name does not exist in the installed version.
        """
        *path, name = self.target.split(".")
        owner: Any = importlib.import_module(path[0])
        for depth, part in enumerate(path[1:], start=2):
            owner = getattr(owner, part, _ABSENT)
            if owner is _ABSENT:
                owner = _import_or_none(".".join(path[:depth]))
        if owner is None or not hasattr(owner, name):
            raise HostMismatch(
                f"{self.target} does not exist in {_installed(path[0])}, and the platform has to "
                f"replace it ({self.reason}); install a version that dynatrain-megatron supports "
                "or update dynatrain-megatron"
            )
        return owner, name


@dataclass(frozen=True, slots=True)
class Applied:
    """The rows in force and what stood there before."""

    rows: tuple[Replacement, ...]
    originals: dict[str, Any]

    def undo(self) -> None:
        """Put every original back, last row first."""
        for row in reversed(self.rows):
            owner, name = row.locate()
            original = self.originals[row.target]
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def apply(table: Iterable[Replacement]) -> Applied:
    """Put every row of ``table`` in force.

    Raises:
        HostMismatch: if a target is missing; nothing has been replaced then.
    """
    rows = tuple(table)
    located = [row.locate() for row in rows]
    made = [
        row.make(getattr(owner, name)) for row, (owner, name) in zip(rows, located, strict=True)
    ]
    originals: dict[str, Any] = {}
    for row, (owner, name), value in zip(rows, located, made, strict=True):
        # Read past descriptors: a static method or an inherited name has to come back as it was.
        originals[row.target] = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
    return Applied(rows, originals)


def _import_or_none(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None


def _installed(package: str) -> str:
    module = importlib.import_module(package)
    version = getattr(module, "__version__", None)
    if version is None and package == "megatron":
        version = importlib.import_module("megatron.core").__version__
    return f"the installed {package} {version}"
