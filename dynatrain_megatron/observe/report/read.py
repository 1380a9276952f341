"""A run directory's files as plain values: training steps, switches, refused requests.

The files may come from a run that is still going on or was killed (a torn last line is left out
and noted), from an older version or another program (fields that are missing are None, lines
without an iteration are left out and noted) or a newer one (fields that are not known are passed
over). Anything else that does not fit is an error that names its line.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dynatrain_megatron.errors import ConfigError, DynaTrainError
from dynatrain_megatron.observe.records import EVENTS, STEPS

_LARGEST_WHOLE = 2**63
_LARGEST_LOSS = 1e100
"""Beyond it a loss is as good as infinite, and axes would run out of numbers."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step; ``loss`` is NaN where the step had none or it was not finite."""

    iteration: int
    loss: float
    layout: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Bytes that move where every process keeps its rank, and with the best placement."""

    identity: int | None
    best: int | None


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch made after step ``iteration``, or one that failed there (``ok`` False).

    ``number`` counts from 1 in the order of the file; ``time`` is when it was over, ISO 8601.
    Seconds, and sizes in bytes; ``matrix`` [source ranks][target ranks] has on its diagonal what
    stays where it is, ``nodes`` the node of each of its ranks. None, or empty: not recorded.
    """

    number: int
    iteration: int
    time: str
    source: str
    target: str
    origin: str
    ok: bool
    error: str
    world: int | None
    joined: int | None
    left: int | None
    stall_s: float | None
    seconds: dict[str, float]
    moved: int | None
    lower_bound: int | None
    retained: int | None
    rebuilt: int | None
    ops: int | None
    rounds: int | None
    schedule: str
    predicted_s: float | None
    verify: str
    groups: dict[str, int]
    keep_source: str
    stages: int | None
    peak_extra: int | None
    planned_peak_extra: int | None
    bound_peak_extra: int | None
    placement: Placement | None
    fingerprint: tuple[str, str] | None
    matrix: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes moved by the lower bound; 1 where nothing had to move and nothing did."""
        if self.moved is None or self.lower_bound is None:
            return None
        if self.lower_bound == 0:
            return 1.0 if self.moved == 0 else math.inf
        return self.moved / self.lower_bound


@dataclass(frozen=True, slots=True)
class Refusal:
    """A switch that was asked for and not made; the job went on in ``source``.

    ``called_off`` is one that had begun.
    """

    iteration: int
    time: str
    source: str
    target: str
    called_off: bool
    reason: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Run:
    """What one run directory tells. Steps by iteration; ``notes`` say what was odd in the files.

    ``events`` are in the order of the file.
    """

    directory: Path
    steps: tuple[Step, ...]
    events: tuple[Switch | Refusal, ...]
    notes: tuple[str, ...]

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The switches among the events."""
        return tuple(event for event in self.events if isinstance(event, Switch))

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The others."""
        return tuple(event for event in self.events if isinstance(event, Refusal))


def read_run(directory: Path) -> Run:
    """Read ``steps.jsonl`` and ``events.jsonl``, of which one may be missing.

    Raises ConfigError for a directory that has neither, DynaTrainError for broken content.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder; name the run_dir of a run")
    if not any((directory / name).is_file() for name in (STEPS, EVENTS)):
        below = sorted({path.parent for path in directory.glob(f"*/{STEPS}")})
        hint = f"; name one of {', '.join(map(str, below))}" if below else ""
        raise ConfigError(f"{directory} has neither {STEPS} nor {EVENTS}{hint}")
    notes: list[str] = []
    steps = _read_steps(directory / STEPS, notes)
    events = _read_events(directory / EVENTS, notes)
    return Run(directory, steps, events, tuple(notes))


def clean(text: str) -> str:
    """``text`` with whatever does not print (line ends, escapes, lone surrogates) made visible."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


# ---------------------------------------------------------------- the two files


def _read_steps(path: Path, notes: list[str]) -> tuple[Step, ...]:
    by_iteration: dict[int, Step] = {}
    again = 0
    for record, iteration in _with_iteration(path, _records(path, notes), notes):
        again += iteration in by_iteration
        loss = record.number("loss")
        if loss is None or not abs(loss) < _LARGEST_LOSS:
            loss = math.nan
        by_iteration[iteration] = Step(iteration, loss, record.text("layout"))
    if again:
        notes.append(
            f"{path.name}: {again} steps stand there more than once, as after a restart from a "
            "checkpoint; the later line counts"
        )
    without = sum(math.isnan(step.loss) for step in by_iteration.values())
    if without:
        notes.append(f"{path.name}: {without} steps have no finite loss and are left out of charts")
    return tuple(by_iteration[iteration] for iteration in sorted(by_iteration))


def _read_events(path: Path, notes: list[str]) -> tuple[Switch | Refusal, ...]:
    known: list[_Record] = []
    others: Counter[str] = Counter()
    for record in _records(path, notes):
        kind = record.text("event")
        if kind in ("switch", "refused"):
            known.append(record)
        else:
            others[kind] += 1
    events: list[Switch | Refusal] = []
    number = 0
    for record, iteration in _with_iteration(path, known, notes):
        if record.text("event") == "switch":
            number += 1
            events.append(_switch(record, iteration, number))
        else:
            events.append(_refusal(record, iteration))
    others.pop("run", None)
    if others:
        told = ", ".join(f"{kind or 'unnamed'} ({count})" for kind, count in sorted(others.items()))
        notes.append(f"{path.name}: events that this report does not show: {told}")
    return tuple(events)


def _with_iteration(
    path: Path, records: Iterable["_Record"], notes: list[str]
) -> list[tuple["_Record", int]]:
    """Those that say of which iteration they are, with it."""
    found, without = [], 0
    for record in records:
        iteration = record.whole("iteration")
        if iteration is None:
            without += 1
        else:
            found.append((record, iteration))
    if without:
        notes.append(f"{path.name}: {without} lines have no iteration and are left out")
    return found


def _switch(record: "_Record", iteration: int, number: int) -> Switch:
    sizes = record.inside("bytes")
    prints = record.inside("fingerprint")
    return Switch(
        number=number,
        iteration=iteration,
        time=record.text("time"),
        source=record.text("source", "?"),
        target=record.text("target", "?"),
        origin=record.text("origin"),
        ok=record.fields.get("ok") is not False,
        error=record.text("error") or record.text("reason"),
        world=record.whole("world"),
        joined=record.whole("joined"),
        left=record.whole("left"),
        stall_s=record.number("stall_s", finite=True),
        seconds=record.numbers("seconds"),
        moved=sizes.whole("moved"),
        lower_bound=sizes.whole("lower_bound"),
        retained=sizes.whole("retained"),
        rebuilt=sizes.whole("rebuilt"),
        ops=record.whole("ops"),
        rounds=record.whole("rounds"),
        schedule=record.text("schedule"),
        predicted_s=record.number("predicted_s", finite=True),
        verify=record.text("verify"),
        groups={name: int(count) for name, count in record.numbers("groups").items()},
        keep_source=record.text("keep_source"),
        stages=record.whole("stages"),
        peak_extra=record.whole("peak_extra_bytes"),
        planned_peak_extra=record.whole("planned_peak_extra_bytes"),
        bound_peak_extra=record.whole("bound_peak_extra_bytes"),
        placement=_placement(record.inside("placement")),
        fingerprint=(prints.text("before", "?"), prints.text("after", "?"))
        if prints.fields
        else None,
        matrix=record.matrix("bytes_matrix"),
        nodes=record.wholes("nodes"),
    )


def _placement(record: "_Record") -> Placement | None:
    if not record.fields:
        return None
    moved = record.inside("bytes")
    return Placement(moved.whole("identity"), moved.whole("best"))


def _refusal(record: "_Record", iteration: int) -> Refusal:
    return Refusal(
        iteration,
        record.text("time"),
        record.text("source", "?"),
        record.text("target", "?"),
        record.fields.get("called_off") is True,
        record.text("reason", "no reason recorded"),
        record.text("next_step"),
    )


def _records(path: Path, notes: list[str]) -> list["_Record"]:
    """The objects of a JSON-lines file; a file that is not there has none."""
    if not path.exists():
        notes.append(f"there is no {path.name}")
        return []
    lines = [
        (i, line) for i, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip()
    ]
    records: list[_Record] = []
    for number, line in lines:
        where = f"{path} line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == lines[-1][0]:
                notes.append(f"{path.name}: the last line is torn and left out")
                break
            raise DynaTrainError(f"{where} is not JSON; mend or remove it") from error
        if not isinstance(fields, dict):
            raise DynaTrainError(f"{where} is not a JSON object; mend or remove it")
        records.append(_Record(where, fields))
    return records


# ---------------------------------------------------------------- fields of a line


@dataclass(frozen=True, slots=True)
class _Record:
    """One object and where it stands; each method reads a field or says what is wrong with it."""

    where: str
    fields: Mapping[str, Any]

    def text(self, name: str, default: str = "") -> str:
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self._wrong(name, "a text", value)
        return clean(value)

    def number(self, name: str, *, finite: bool = False) -> float | None:
        """A number; with ``finite`` also neither negative nor infinite nor NaN."""
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(name, "a number", value)
        if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
            self._wrong(name, "a number of 64 bits", value)
        if finite and not 0 <= value < _LARGEST_WHOLE:
            self._wrong(name, "a finite number from 0 up", value)
        return float(value)

    def whole(self, name: str) -> int | None:
        value = self.fields.get(name)
        if value is None:
            return None
        if not _is_whole(value):
            self._wrong(name, "a whole number from 0 up", value)
        assert isinstance(value, int)
        return value

    def inside(self, name: str) -> "_Record":
        """The object in a field; an empty one where there is none."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            self._wrong(name, "an object", value)
        return _Record(f"{self.where}, {name!r}", value or {})

    def numbers(self, name: str) -> dict[str, float]:
        """An object of numbers from 0 up, in the order of the file."""
        inside = self.inside(name)
        read = {clean(key): inside.number(key, finite=True) for key in inside.fields}
        return {key: value for key, value in read.items() if value is not None}

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers from 0 up."""
        value = self.fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(map(_is_whole, value)):
            self._wrong(name, "a list of whole numbers from 0 up", value)
        return tuple(value)

    def matrix(self, name: str) -> tuple[tuple[int, ...], ...]:
        value = self.fields.get(name)
        if value is None:
            return ()
        rows: list[Any] = value if isinstance(value, list) else [value]
        wholes = [list(filter(_is_whole, row)) if isinstance(row, list) else [] for row in rows]
        if wholes != rows or [] in rows or len(set(map(len, rows))) > 1:
            self._wrong(name, "rows of equal length of whole numbers from 0 up", value)
        return tuple(map(tuple, rows))

    def _wrong(self, name: str, expected: str, value: object) -> NoReturn:
        try:
            shown = clean(repr(value))
        except ValueError:  # more digits than Python prints
            shown = "a very large number"
        shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
        raise DynaTrainError(f"{self.where}: {name!r} should be {expected}, but is {shown}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_WHOLE
