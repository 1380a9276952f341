"""Patches for the training scripts of a Megatron-LM checkout: which fits, put in, taken out.

A patch only adds lines, has no lines of context, and is bound to one exact file by the hash that
git gives it. ``patches/index.toml`` lists them. Bytes in, bytes out: taking a patch out gives the
file that was there before, to the last byte.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from dynatrain_megatron.errors import ConfigError, DynaTrainError, HostMismatch

_HUNK = re.compile(rb"@@ -(\d+),0 \+(\d+),(\d+) @@")
_VERSION = re.compile(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", re.MULTILINE)

_PACKAGE = Path(__file__).parents[1]
# In the wheel the patches lie in the package, in a checkout of ours beside it.
_FOLDERS = (_PACKAGE / "patches", _PACKAGE.parent / "patches")


class State(StrEnum):
    """What a script of a checkout is to us."""

    original = "original"  # as its tag has it; a patch fits
    patched = "patched"  # our lines are in, and nothing else was changed
    edited = "edited"  # our lines are in, and the file was changed besides
    unneeded = "unneeded"  # runs another script, which takes the patch
    unknown = "unknown"  # no patch fits


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch: lines of bytes that go in after line ``after`` (from 1) of one exact file."""

    tag: str
    commit: str
    version: tuple[int, int, int]
    file: str
    blob: str
    path: str
    after: int
    lines: tuple[bytes, ...]

    @property
    def source(self) -> str:
        """Where its file comes from."""
        return f"commit {self.commit[:9]} of main" if self.tag == "main" else self.tag

    @property
    def block(self) -> bytes:
        """What is added, in one piece."""
        return b"".join(self.lines)

    def put_in(self, data: bytes) -> bytes:
        """The file with the patch; ``data`` has to be the file it is bound to."""
        assert blob_of(data) == self.blob
        lines = _lines(data)
        return b"".join([*lines[: self.after], *self.lines, *lines[self.after :]])

    def take_out(self, data: bytes) -> bytes | None:
        """The file without the patch; None where the lines are not there exactly once."""
        return data.replace(self.block, b"") if data.count(self.block) == 1 else None


@dataclass(frozen=True, slots=True)
class Index:
    """All patches, and the files that need none: (file, hash) → why."""

    patches: tuple[Patch, ...]
    unneeded: dict[tuple[str, str], str]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the scripts that are known, each once."""
        return tuple(dict.fromkeys(patch.file for patch in self.patches))


@dataclass(frozen=True, slots=True)
class Script:
    """One script of a checkout, as found: ``patch`` fits it or is in it."""

    name: str
    path: Path
    data: bytes
    state: State
    patch: Patch | None = None


def blob_of(data: bytes) -> str:
    """The hash that git gives a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _lines(data: bytes) -> list[bytes]:
    """Cut after each newline, and nowhere else, as git does."""
    return io.BytesIO(data).readlines()


@cache
def load_index() -> Index:
    """Read the patches that came with this package."""
    folder = next((folder for folder in _FOLDERS if (folder / "index.toml").is_file()), None)
    if folder is None:
        raise DynaTrainError(
            f"patches/index.toml is neither in {_FOLDERS[0]} nor in {_FOLDERS[1]}; "
            "install dynatrain-megatron again"
        )
    table = tomllib.loads((folder / "index.toml").read_text(encoding="utf-8"))
    patches: list[Patch] = []
    for entry in table["patch"]:
        after, lines = read_diff((folder / entry["path"]).read_bytes())
        major, minor, micro = map(int, entry["version"].split("."))
        patch = Patch(
            tag=entry["tag"],
            commit=entry["commit"],
            version=(major, minor, micro),
            file=entry["file"],
            blob=entry["blob"],
            path=entry["path"],
            after=after,
            lines=lines,
        )
        patches.append(patch)
    unneeded = {(entry["file"], entry["blob"]): entry["why"] for entry in table["unneeded"]}
    return Index(tuple(patches), unneeded)


def read_diff(text: bytes) -> tuple[int, tuple[bytes, ...]]:
    """Line number and lines of a unified diff of one hunk that adds lines and shows no others."""
    lines = _lines(text)
    start = next((i for i, line in enumerate(lines) if line.startswith(b"@@")), len(lines))
    hunk = _HUNK.fullmatch(lines[start].rstrip(b"\n")) if start < len(lines) else None
    added = lines[start + 1 :]
    if hunk is None or not added or not all(line.startswith(b"+") for line in added):
        raise ValueError("a patch is one hunk, '@@ -N,0 +M,K @@', of added lines and nothing else")
    after, at, count = map(int, hunk.groups())
    if at != after + 1 or count != len(added):
        raise ValueError(f"line numbers of the hunk do not fit its {len(added)} lines")
    return after, tuple(line[1:] for line in added)


def scripts_of(checkout: Path, only: Sequence[str] = ()) -> list[Script]:
    """What the known training scripts of ``checkout`` are; ``only`` these where some are named.

    Raises:
        ConfigError: where there are none, or a named one is missing or unknown by name.
    """
    index = load_index()
    if strange := [name for name in only if name not in index.files]:
        raise ConfigError(f"{strange[0]!r} is no script to patch; those are {_list(index.files)}")
    try:
        wanted = {name: (checkout / name).resolve() for name in only or index.files}
        missing = [name for name in only if not wanted[name].is_file()]
        scripts = [_inspect(name, path, index) for name, path in wanted.items() if path.is_file()]
    except (OSError, ValueError) as error:  # ValueError: a null byte in a path
        raise ConfigError(f"{str(checkout)!r} cannot be read: {error}") from error
    if missing or not scripts:
        names = missing or index.files
        raise ConfigError(
            f"{checkout} has no {_list(names, 'or')}; name the folder of a Megatron-LM checkout"
        )
    return scripts


def _inspect(name: str, path: Path, index: Index) -> Script:
    data = path.read_bytes()
    blob = blob_of(data)
    if (name, blob) in index.unneeded:
        return Script(name, path, data, State.unneeded)
    state, found = State.unknown, None
    for patch in index.patches:
        if patch.file != name:
            continue
        if patch.blob == blob:
            return Script(name, path, data, State.original, patch)
        without = patch.take_out(data)
        if without is not None and blob_of(without) == patch.blob:
            return Script(name, path, data, State.patched, patch)
        if without is not None:
            state, found = State.edited, patch
    return Script(name, path, data, state, found)


def apply(checkout: Path, only: Sequence[str] = ()) -> list[Script]:
    """Put the patches into the scripts of ``checkout``; returns those that were changed.

    What is patched already stays. Raises :class:`HostMismatch` where no patch fits one of them;
    nothing is changed then.
    """
    scripts = scripts_of(checkout, only)
    if strange := [script for script in scripts if script.state is State.unknown]:
        raise HostMismatch(_no_fit(checkout, strange))
    changed = [script for script in scripts if script.state is State.original]
    for script in changed:
        assert script.patch is not None
        _replace(script.path, script.patch.put_in(script.data))
    return changed


def remove(checkout: Path, only: Sequence[str] = ()) -> list[Script]:
    """Take the patches out of the scripts of ``checkout``; returns those that were changed.

    A file that was changed besides keeps its other changes. Without the patch nothing is done.
    """
    has_patch = (State.patched, State.edited)
    changed = [script for script in scripts_of(checkout, only) if script.state in has_patch]
    for script in changed:
        assert script.patch is not None
        without = script.patch.take_out(script.data)
        assert without is not None
        _replace(script.path, without)
    return changed


def nearest(version: tuple[int, int, int]) -> Patch:
    """The patch whose tag is closest to a version of megatron-core."""

    def on_a_line(version: tuple[int, int, int]) -> int:
        major, minor, micro = version
        return (major * 1000 + minor) * 1000 + micro

    return min(
        load_index().patches,
        key=lambda patch: abs(on_a_line(patch.version) - on_a_line(version)),
    )


def version_of(checkout: Path) -> tuple[int, int, int] | None:
    """The version that a checkout says it is; None where it does not."""
    try:
        text = (checkout / "megatron/core/package_info.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    found = {name: int(value) for name, value in _VERSION.findall(text)}
    if len(found) != 3:
        return None
    return found["MAJOR"], found["MINOR"], found["PATCH"]


def _no_fit(checkout: Path, strange: Sequence[Script]) -> str:
    """Say which files no patch fits, what comes closest, and how to do without a patch."""
    version = version_of(checkout)
    files = _list([f"{script.name} (blob {blob_of(script.data)[:12]})" for script in strange])
    if version is None:
        sources = dict.fromkeys(patch.source for patch in load_index().patches)
        closest = f"there are patches for {_list(list(sources))}"
    else:
        says = ".".join(map(str, version))
        close = nearest(version).source
        closest = f"it says it is megatron-core {says}, and {close} is nearest to that"
    return (
        f"no patch fits {files} of {checkout}; {closest}. Nothing was changed. Take the script "
        "from there, or run the one you have without a patch: "
        f"python -m dynatrain_megatron.launch {checkout / strange[0].name} …"
    )


def _replace(path: Path, data: bytes) -> None:
    """Write a file in one step, so that nobody ever sees half of it; its mode stays."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            shutil.copymode(path, name)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise DynaTrainError(f"{path} cannot be written: {error.strerror}") from error


def _list(names: Sequence[str], word: str = "and") -> str:
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last
