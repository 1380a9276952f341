"""In which releases of megatron-core a name is relied on, and whether it is there as expected."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from dynatrain_megatron.errors import HostMismatch

Release = tuple[int, int]
"""Major and minor number of a release."""


@dataclass(frozen=True, slots=True)
class Releases:
    """Releases from ``since`` on and below ``before``."""

    since: Release = (0, 0)
    before: Release | None = None

    def __contains__(self, release: Release) -> bool:
        """Whether a release is one of these."""
        return self.since <= release and (self.before is None or release < self.before)


ALL = Releases()


def megatron_version() -> str:
    """The version of the megatron-core that is found; imports it."""
    return str(_package_info().__version__)


def megatron_release() -> Release:
    """Major and minor number of the megatron-core that is found; imports it."""
    info = _package_info()
    return int(info.MAJOR), int(info.MINOR)


def problem_of(name: str, parameters: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a dotted name of the host; None where it is as expected.

    The modules on the way are imported. ``parameters`` are those that a function must have.
    """
    try:
        value = _look_up(name)
    except (ImportError, AttributeError) as error:
        if (package := _foreign(error, name)) is not None:
            return f"{name} cannot be imported without the package {package}: pip install {package}"
        return f"{name} is missing ({error})"
    if parameters:
        if not callable(value):
            return f"{name} is no function"
        taken = inspect.signature(value).parameters
        if lacking := [parameter for parameter in parameters if parameter not in taken]:
            return f"{name} takes no {', '.join(lacking)}"
    return None


def _foreign(error: Exception, name: str) -> str | None:
    """The package of others that was not found while ``name`` was imported."""
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    found = isinstance(error, ModuleNotFoundError) and missing != name.partition(".")[0]
    return missing if found else None


def _look_up(name: str) -> Any:
    """The value of a dotted name: modules as far as they go, then attributes."""
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part) and hasattr(value, "__path__"):
            importlib.import_module(".".join(parts[:depth]))
        value = getattr(value, part)
    return value


def _package_info() -> Any:
    try:
        return importlib.import_module("megatron.core.package_info")
    except ModuleNotFoundError as error:
        raise HostMismatch(
            f"megatron-core is not installed ({error}); install it, or run from a Megatron-LM "
            "checkout"
        ) from error
