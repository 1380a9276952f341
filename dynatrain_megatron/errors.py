"""The errors this package raises on purpose, and nothing else.

Every message names the rule that was broken, the values that were seen, and what to do next.
Anything that is not a :class:`DynaTrainError` is a programmer's mistake, here or in the host.

    DynaTrainError
    ├── ConfigError      a --dynatrain override or schedule is wrong (exit code 2)
    ├── LayoutError      a layout is wrong in itself or for this model (also a ValueError)
    ├── SwitchRefused    the wanted switch is impossible or not supported
    ├── HostMismatch     Megatron or torch is not shaped as this version expects
    ├── TransitionError  something failed while a switch was under way
    │   ├── SwitchAborted    ... and was called off: the job is as it was
    │   ├── CommitError      ... after all had agreed to it: this process must end
    │   └── SplitStateError  ... after parts of the old state were gone: the job must end
    ├── CheckpointError  a checkpoint on disk cannot be read
    ├── WorldError       a world of processes could not be built, or the store is out of reach
    └── PlatformError    the device platform cannot be set up
"""

import difflib
import traceback
from collections.abc import Iterable

SHOWN_CHARS = 200
"""Of a value in a message."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """`` (did you mean 'tp'?)`` for the closest of ``allowed``, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: object) -> str:
    """A value as it is written in Python, cut off where that is long; one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python prints, lists without end
        return "…"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


class DynaTrainError(Exception):
    """Root of all errors raised on purpose; ``exit_code`` is what a command line ends with."""

    exit_code: int = 1


class ConfigError(DynaTrainError):
    """An override or a schedule that a user wrote is wrong; raised before anything is started."""

    exit_code = 2


class LayoutError(DynaTrainError, ValueError):
    """A layout that is wrong in itself or for this model; names the rule and both values."""


class SwitchRefused(DynaTrainError):
    """A wanted switch cannot be done, found out before anything was changed.

    The job can go on in the layout it has. ``reason`` says what stands against the switch and
    ``next_step`` what the user can do about it.
    """

    def __init__(self, reason: str, next_step: str = "") -> None:
        """Keep both parts, so that the event log can show them apart."""
        super().__init__(reason, next_step)
        self.reason = reason
        self.next_step = next_step

    def __str__(self) -> str:
        """Both parts as one line."""
        return f"{self.reason}; {self.next_step}" if self.next_step else self.reason


class HostMismatch(DynaTrainError):
    """A Megatron or torch name that this package relies on is missing or has another shape."""


class TransitionError(DynaTrainError):
    """A switch failed after it had begun."""


class SwitchAborted(TransitionError):
    """A switch was called off on all its processes, before any committed; the job is as it was."""


class CommitError(TransitionError):
    """A switch failed on this process, or another of the target, after all had voted for it.

    Nothing may be trained on or saved after it; the process has to end.
    """


class SplitStateError(TransitionError):
    """A switch failed when neither the old nor the new layout had the whole state any more.

    Nothing may be trained on or saved after it; the job has to end.
    """


class CheckpointError(DynaTrainError):
    """A checkpoint on disk is none, is of another format, or is damaged."""


class WorldError(DynaTrainError):
    """A world could not be built, on any of its processes; the one in force is as it was.

    Also: what such a world needs is missing, above all its store.
    """


class PlatformError(DynaTrainError):
    """The device platform cannot be installed, or it was installed too late."""


def release_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold, and those of what it came from."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
