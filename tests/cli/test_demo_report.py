"""Comparing two recorded runs, and how the result is shown."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from dynatrain_megatron.cli.demo_report import (
    Comparison,
    as_json,
    compare,
    print_table,
    relative_difference,
)
from dynatrain_megatron.errors import DynaTrainError
from dynatrain_megatron.observe.report import read_run

STATIC = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def _write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _steps(losses: list[float], layouts: list[str]) -> list[dict[str, object]]:
    return [
        {"iteration": i, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, "layout": layout}
        for i, (loss, layout) in enumerate(zip(losses, layouts, strict=True), start=1)
    ]


def _switch(iteration: int, source: str, target: str, **changes: object) -> dict[str, object]:
    event = {
        "event": "switch",
        "iteration": iteration,
        "source": source,
        "target": target,
        "ok": True,
        "stall_s": 0.25,
        "bytes": {"moved": 3_000_000, "lower_bound": 2_000_000, "retained": 1},
    }
    return event | changes


EVENTS = [
    {"event": "run", "layout": "tp2-dp2"},
    _switch(2, "tp2-dp2", "pp2-dp2"),
    _switch(4, "pp2-dp2", "tp4", stall_s=1.5),
]
REFUSED = {
    "event": "refused",
    "iteration": 4,
    "ok": False,
    "reason": "tp=3 must divide 4",
    "next_step": "the job stays in pp2-dp2",
}


def _record(tmp_path: Path, switched: list[float], events: list[dict[str, object]]) -> Comparison:
    layouts = ["tp2-dp2"] * 2 + ["pp2-dp2"] * 2 + ["tp4"] * 2
    _write_lines(tmp_path / "static" / "steps.jsonl", _steps(STATIC, ["tp2-dp2"] * 6))
    _write_lines(tmp_path / "switched" / "steps.jsonl", _steps(switched, layouts))
    _write_lines(tmp_path / "switched" / "events.jsonl", events)
    return _compare(tmp_path)


def _compare(tmp_path: Path, iterations: int = 6) -> Comparison:
    static, switched = (read_run(tmp_path / name) for name in ("static", "switched"))
    return compare(static, switched, iterations=iterations, switches=2)


def test_each_switch_has_the_largest_difference_of_its_own_steps(tmp_path: Path) -> None:
    # Step 4 is the last in pp2-dp2, although the switch of iteration 4 follows it.
    result = _record(
        tmp_path, [6.0, 5.0, 4.0 * (1 - 1e-8), 3.0 * (1 + 4e-7), 2.0, 1 + 2e-7], EVENTS
    )
    (first, of_first), (second, of_second) = result.switches
    assert of_first == pytest.approx(4e-7, rel=1e-6)
    assert of_second == pytest.approx(2e-7, rel=1e-6)
    assert result.max_loss_difference == of_first
    assert result.agrees
    assert (first.stall_s, second.stall_s) == (0.25, 1.5)
    assert first.bytes_ratio == 1.5


def test_a_difference_before_the_first_switch_counts_too(tmp_path: Path) -> None:
    result = _record(tmp_path, [6.0 * (1 + 2e-6), *STATIC[1:]], EVENTS)
    assert [difference for _, difference in result.switches] == [0.0, 0.0]
    assert not result.agrees


def test_a_loss_that_is_no_number_never_agrees(tmp_path: Path) -> None:
    result = _record(tmp_path, [*STATIC[:5], math.nan], EVENTS)
    (_, of_first), (_, of_second) = result.switches
    assert math.isnan(of_second) and of_first == 0.0
    assert not result.agrees
    told = as_json(result, {}, 1.0)
    assert json.loads(json.dumps(told, allow_nan=False))["max_loss_difference"] is None


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [(1.5, 1.0, 0.5), (-1.0, -2.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, math.inf)],
)
def test_relative_difference(value: float, reference: float, expected: float) -> None:
    assert relative_difference(value, reference) == expected


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (EVENTS[:2], "1 of 2 switches were made"),
        ([*EVENTS[:2], REFUSED], "iteration 4: tp=3 must divide 4; the job stays in pp2-dp2$"),
        (
            [EVENTS[1], _switch(4, "a", "b", ok=False, error="lost rank 3")],
            "iteration 4: lost rank 3$",
        ),
    ],
)
def test_a_switch_that_was_not_made_is_an_error(
    tmp_path: Path, events: list[dict[str, object]], told: str
) -> None:
    with pytest.raises(DynaTrainError, match=told) as caught:
        _record(tmp_path, STATIC, events)
    assert "1 of 2 switches were made" in str(caught.value)


def test_missing_steps_are_an_error(tmp_path: Path) -> None:
    _record(tmp_path, STATIC, EVENTS)
    with pytest.raises(DynaTrainError, match=r"steps 1 to 7, but has 6 \(1, 2, 3, 4, 5, 6\)"):
        _compare(tmp_path, iterations=7)
    (tmp_path / "switched" / "steps.jsonl").unlink()
    with pytest.raises(DynaTrainError, match=r"switched/steps.jsonl should .* but has none"):
        _compare(tmp_path)


def _shown(result: Comparison, *, terminal: bool) -> str:
    stream = io.StringIO()
    print_table(Console(file=stream, force_terminal=terminal, width=120), result)
    return stream.getvalue()


def test_the_plain_table(tmp_path: Path) -> None:
    result = _record(tmp_path, [*STATIC[:5], 1 + 2e-7], EVENTS)
    lines = [line.split() for line in _shown(result, terminal=False).splitlines()]
    assert lines[1:3] == [
        ["2", "tp2-dp2", "pp2-dp2", "250", "ms", "3.00", "MB", "1.500", "0.0e+00"],
        ["4", "pp2-dp2", "tp4", "1.50", "s", "3.00", "MB", "1.500", "2.0e-07"],
    ]
    assert " ".join(lines[3]) == (
        "Losses agree: the largest relative difference from the run that never switched is"
        " 2.0e-07 (limit 1e-06)."
    )


def test_a_terminal_gets_a_frame_and_colours(tmp_path: Path) -> None:
    result = _record(tmp_path, [*STATIC[:5], 2.0], EVENTS)
    shown = _shown(result, terminal=True)
    assert "╭" in shown
    assert "\x1b[1;31mDIFFER" in shown


def test_the_json_form(tmp_path: Path) -> None:
    result = _record(tmp_path, STATIC, EVENTS)
    told = as_json(result, {"static": tmp_path / "static"}, 12.345)
    assert told["switches"][1] == {
        "iteration": 4,
        "source": "pp2-dp2",
        "target": "tp4",
        "stall_s": 1.5,
        "bytes_moved": 3_000_000,
        "bytes_lower_bound": 2_000_000,
        "bytes_ratio": 1.5,
        "max_loss_difference": 0.0,
    }
    del told["switches"]
    assert told == {
        "agrees": True,
        "tolerance": 1e-6,
        "iterations": 6,
        "max_loss_difference": 0.0,
        "first_loss": 6.0,
        "last_loss": 1.0,
        "seconds": 12.3,
        "runs": {"static": str(tmp_path / "static")},
    }
