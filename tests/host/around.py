"""What a run wrote for its user, read back: log lines, TensorBoard and W&B curves, checkpoints."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dynatrain_megatron.layout import ParallelLayout

Fields = dict[str, str]
Curves = dict[str, list[tuple[int, float]]]

# Figures that depend on the machine's speed, by the words of log lines and of scalar tags.
_TIMED = re.compile(r"elapsed time|throughput|-time$|time across")
# Figures that differ more between layouts: sums over the ranks are rounded differently, and the
# norm of the parameters, as Megatron counts it, is another one in each layout without any switch.
_LOOSE = {"grad norm": 1e-5, "grad-norm": 1e-5, "params norm": 1e-3, "params-norm": 1e-3}
# A float32 loss of 6.9 has steps of 5e-7; log lines have seven digits.
_TIGHT = 1e-6


def training_lines(text: str) -> list[Fields]:
    """Megatron's line of each logged iteration as its fields; ``when`` is the time of the line."""
    lines = []
    for when, rest in re.findall(r"\[(\S+ \S+)\] (iteration +\d+/.*)", text):
        head, *fields = (part.strip() for part in rest.split("|") if part.strip())
        line = {"when": when, "iteration": head.split()[1].rstrip("/")}
        line |= dict(re.split(r":\s+", field, maxsplit=1) for field in fields)
        lines.append(line)
    return lines


def validation_lines(text: str) -> dict[str, float]:
    """Losses of all evaluations by what they were at; an evaluation said twice is an error."""
    found = re.findall(r"validation(\S*) loss at (.+?) \| lm loss value: (\S+) ", text)
    losses = {at + of: float(loss) for of, at, loss in found}
    assert len(losses) == len(found), found
    return losses


def seconds_between(before: Fields, after: Fields) -> float:
    """Seconds between two log lines."""
    times = [datetime.fromisoformat(line["when"]) for line in (before, after)]
    return (times[1] - times[0]).total_seconds()


def assert_same_lines(got: Sequence[Fields], expected: Sequence[Fields]) -> None:
    """The same iterations, once each, with the same fields in the same order and same figures."""
    assert [line["iteration"] for line in got] == [line["iteration"] for line in expected]
    for a, b in zip(got, expected, strict=True):
        assert list(a) == list(b)
        for name in a.keys() - {"when"}:
            if not _TIMED.search(name):
                at = f"{name} of iteration {a['iteration']}"
                assert_close(float(a[name]), float(b[name]), _LOOSE.get(name, _TIGHT), at)


def assert_same_curves(got: Curves, expected: Curves) -> None:
    """The same tags with the same steps, once each; the same values where they are no times."""
    assert sorted(got) == sorted(expected)
    for tag, points in expected.items():
        assert [step for step, _ in got[tag]] == [step for step, _ in points], tag
        if not _TIMED.search(tag):
            tolerance = next((t for word, t in _LOOSE.items() if word in tag), _TIGHT)
            for (step, a), (_, b) in zip(got[tag], points, strict=True):
                assert_close(a, b, tolerance, f"{tag} at {step}")


def assert_close(got: float, expected: float, tolerance: float, what: str) -> None:
    """Equal within a relative tolerance."""
    assert got == pytest.approx(expected, rel=tolerance), what


def scalars(directory: Path) -> Curves:
    """All scalars in TensorBoard's event files of a directory, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: Curves = {}
    for path in sorted(directory.glob("events.out.tfevents.*")):
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            points = [(event.step, event.value) for event in accumulator.Scalars(tag)]
            curves.setdefault(tag, []).extend(points)
    return curves


def board_texts(directory: Path, tag: str) -> list[tuple[int, str]]:
    """The texts of a tag in TensorBoard's event files of a directory, with their steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        accumulator = EventAccumulator(str(path), size_guidance={"tensors": 0})
        accumulator.Reload()
        if f"{tag}/text_summary" in accumulator.Tags()["tensors"]:
            for event in accumulator.Tensors(f"{tag}/text_summary"):
                found.append((event.step, event.tensor_proto.string_val[0].decode()))
    return found


def own(curves: Curves) -> Curves:
    """Take our own curves out of Megatron's and return them."""
    tags = [tag for tag in curves if tag.startswith("dynatrain")]
    return {tag: curves.pop(tag) for tag in tags}


def assert_tells_of_switches(curves: Curves, done: Sequence[Mapping[str, Any]]) -> None:
    """Our curves are those of these events, in the order of steps: figures, and layouts as steps.

    Of the seconds of phases the rank that writes the curves has its own, beside rank 0's.
    """
    at = [event["iteration"] for event in done]
    curves = {tag: sorted(points) for tag, points in curves.items()}
    for phase in ("plan", "build", "commit"):
        assert [step for step, _ in curves[f"dynatrain/{phase}_s"]] == at, phase
        assert all(seconds > 0 for _, seconds in curves[f"dynatrain/{phase}_s"]), phase
    for tag, values in {
        "stall_s": [event["stall_s"] for event in done],
        "wire_s": [event["seconds"]["wire"] for event in done],
        "bytes_moved": [event["bytes"]["moved"] for event in done],
        "bytes_lower_bound": [event["bytes"]["lower_bound"] for event in done],
        "peak_extra_bytes": [event["peak_extra_bytes"] for event in done],
    }.items():
        points = zip(at, values, strict=True)
        assert curves[f"dynatrain/{tag}"] == [(step, pytest.approx(v)) for step, v in points], tag
    layouts = [(at, event["source"]) for at, event in zip(at, done, strict=True)]
    layouts += [(event["iteration"] + 1, event["target"]) for event in done]
    for axis in ("tp", "pp", "dp", "world"):
        read = dict(curves[f"dynatrain/{axis}"])
        for step, text in sorted(layouts):
            assert read[step] == getattr(ParallelLayout.parse(text), axis), (axis, step)


def wandb_curves(directory: Path) -> Curves:
    """All numbers that offline W&B runs below a directory have logged."""
    from wandb.proto import wandb_internal_pb2

    curves: Curves = {}
    for path in sorted(directory.rglob("run-*.wandb")):
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in items.items():
                if isinstance(value, int | float) and not name.startswith("_"):
                    curves.setdefault(name, []).append((items["_step"], value))
    return curves


def _records(data: bytes) -> Iterator[bytes]:
    """Records of W&B's file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    block, at, pieces = 1 << 15, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield pieces
            pieces = b""


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """The records of ``steps.jsonl``."""
    return json_lines(run_dir / "steps.jsonl")


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The records of ``events.jsonl``."""
    return json_lines(run_dir / "events.jsonl")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def saved_iterations(directory: Path) -> list[int]:
    """Iterations with a whole checkpoint (its metadata is written last)."""
    return sorted(int(p.parent.name[5:]) for p in directory.glob("iter_*/metadata.json"))


def latest_iteration(directory: Path) -> int:
    """The iteration that ``--load`` would take."""
    return int((directory / "latest_checkpointed_iteration.txt").read_text())


def at_each_log(do: Callable[[Mapping[str, Any]], None]) -> None:
    """Call ``do`` with the arguments of ``training_log`` before each of its calls; in a rank."""
    from megatron.training import training

    real = training.training_log
    signature = inspect.signature(real)

    @functools.wraps(real)
    def logged(*args: Any, **kwargs: Any) -> Any:
        do(signature.bind(*args, **kwargs).arguments)
        return real(*args, **kwargs)

    training.training_log = logged
