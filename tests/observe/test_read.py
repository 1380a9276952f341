"""What is read from a run's files, and what broken ones say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.errors import ConfigError, DynaTrainError
from dynatrain_megatron.observe.report import as_json, read_run
from dynatrain_megatron.observe.report.compare import loss_differences
from dynatrain_megatron.observe.report.links import loads_of
from dynatrain_megatron.observe.report.read import clean

from .runs import RECORDED, RECORDED_STATIC, refused, steps, switch, write_lines, write_run


def test_a_recorded_run_is_read_whole() -> None:
    run = read_run(RECORDED)
    assert [step.iteration for step in run.steps] == list(range(1, 31))
    assert [(s.number, s.iteration, s.source, s.target) for s in run.switches] == [
        (1, 6, "tp2-dp2", "pp2-dp2"),
        (2, 12, "pp2-dp2", "tp4"),
        (3, 18, "tp4", "pp4"),
        (4, 24, "pp4", "dp4"),
    ]
    assert run.notes == ()
    written = [json.loads(line) for line in (RECORDED / "events.jsonl").read_text().splitlines()]
    for read, event in zip(run.switches, written, strict=True):
        assert read.ok
        assert read.seconds == event["seconds"]
        assert read.moved == event["bytes"]["moved"]
        assert read.bytes_ratio == 1.0
        assert read.groups == event["groups"]
        assert (read.peak_extra, read.planned_peak_extra) == (
            event["peak_extra_bytes"],
            event["planned_peak_extra_bytes"],
        )
        assert read.fingerprint == (event["fingerprint"]["before"], event["fingerprint"]["after"])
        assert [list(row) for row in read.matrix] == event["bytes_matrix"]
        on_diagonal = sum(row[rank] for rank, row in enumerate(read.matrix))
        assert on_diagonal == read.retained
        assert sum(map(sum, read.matrix)) - on_diagonal == read.moved


def test_a_run_beside_its_static_run() -> None:
    told = as_json(read_run(RECORDED), read_run(RECORDED_STATIC))
    assert told["static"]["steps_compared"] == 30
    assert 0 < told["static"]["max_loss_difference"] <= 1e-6
    assert told["first_loss"] > told["last_loss"] > 0


def test_missing_fields_are_none_and_unknown_ones_are_passed_over(tmp_path: Path) -> None:
    older = {"event": "switch", "iteration": 2}
    newer = switch(3, cost="high", bytes={"moved": 1, "lower_bound": 1, "saved": 7})
    run = read_run(write_run(tmp_path, [older, newer]))
    first, second = run.switches
    assert (first.source, first.target, first.ok) == ("?", "?", True)
    for name in ("stall_s", "moved", "bytes_ratio", "ops", "peak_extra", "fingerprint"):
        assert getattr(first, name) is None
    assert (first.seconds, first.groups, first.matrix, first.nodes) == ({}, {}, (), ())
    assert (first.placement, first.world, first.origin, first.time) == (None, None, "", "")
    assert second.bytes_ratio == 1.0


def test_lines_without_an_iteration_are_left_out_and_told_of(tmp_path: Path) -> None:
    events = [{"event": "switch", "ok": True}, switch(), {"event": "refused"}]
    write_lines(tmp_path / "events.jsonl", events)
    write_lines(tmp_path / "steps.jsonl", [{"loss": 4.0}, *steps([3.0])])
    run = read_run(tmp_path)
    assert (len(run.steps), len(run.switches), len(run.refusals)) == (1, 1, 0)
    assert run.notes == (
        "steps.jsonl: 1 lines have no iteration and are left out",
        "events.jsonl: 2 lines have no iteration and are left out",
    )


def test_events_keep_the_order_of_the_file(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [refused(1), switch(2), refused(3), switch(4)]))
    assert [event.iteration for event in run.events] == [1, 2, 3, 4]
    assert [switch.number for switch in run.switches] == [1, 2]


def test_loads_are_split_by_the_node_of_each_rank(tmp_path: Path) -> None:
    matrix = [[9, 1, 20, 0], [0, 9, 300, 0], [0, 0, 9, 4000], [50000, 0, 0, 9]]
    event = switch(bytes_matrix=matrix, nodes=[0, 0, 1, 2])
    unknown = switch(3, bytes_matrix=matrix, nodes=None)
    oblong = switch(4, bytes_matrix=[[1, 2]], nodes=[0])
    known, without, nothing = map(
        loads_of, read_run(write_run(tmp_path, [event, unknown, oblong])).switches
    )
    assert known is not None and without is not None and nothing is None
    assert (known.kept, known.within, known.between) == (36, 1, 54320)
    assert known.links == ((2, 0, 50000), (1, 2, 4000), (0, 1, 320))
    assert (known.sender, known.receiver) == ((3, 50000), (0, 50000))
    assert known.mean_sent == (21 + 300 + 4000 + 50000) / 4
    assert (without.within, without.between, without.sender) == (None, None, known.sender)


def test_null_is_the_same_as_missing(tmp_path: Path) -> None:
    event = dict.fromkeys(switch()) | {"event": "switch", "iteration": 2}
    assert (
        read_run(write_run(tmp_path / "a", [event])).switches
        == read_run(write_run(tmp_path / "b", [{"event": "switch", "iteration": 2}])).switches
    )


@pytest.mark.parametrize("torn", ['{"iteration": 5, "lo', "\x00\x00\x00", '{"event": "switch"\n'])
def test_a_torn_last_line_is_left_out_and_noted(tmp_path: Path, torn: str) -> None:
    run = read_run(write_run(tmp_path, [switch()], torn=torn))
    assert (len(run.steps), len(run.switches)) == (4, 1)
    assert [note for note in run.notes if "torn" in note] == [
        "steps.jsonl: the last line is torn and left out",
        "events.jsonl: the last line is torn and left out",
    ]


def test_a_last_line_cut_inside_a_letter_is_torn_too(tmp_path: Path) -> None:
    write_run(tmp_path, [switch()])
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write('{"event": "switch", "source": "é'.encode()[:-1])
    assert len(read_run(tmp_path).switches) == 1


def test_a_last_line_that_only_lacks_its_end_counts(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [], losses=[2.0], torn='{"iteration": 2, "loss": 1.5}'))
    assert [step.loss for step in run.steps] == [2.0, 1.5]


def test_a_run_that_was_restarted_counts_the_later_line(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    write_lines(tmp_path / "steps.jsonl", [*steps([4.0, 3.0, 2.5]), *steps([2.9, 2.0], first=2)])
    run = read_run(tmp_path)
    assert [(step.iteration, step.loss) for step in run.steps] == [(1, 4.0), (2, 2.9), (3, 2.0)]
    assert "2 steps stand there more than once" in run.notes[0]


def test_losses_that_are_not_finite_are_noted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [], losses=[1.0, None, math.nan, math.inf, 1e200]))
    assert [math.isnan(step.loss) for step in run.steps] == [False, True, True, True, True]
    assert run.notes == ("steps.jsonl: 4 steps have no finite loss and are left out of charts",)
    assert as_json(run, run)["static"]["steps_compared"] == 1


def test_differences_are_of_common_steps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [], losses=[4.0, 3.0, None, 1.0]))
    static = read_run(write_run(tmp_path / "static", None, losses=[4.0, 4.0, 2.0]))
    assert loss_differences(run, static) == {1: 0.0, 2: 0.25}


def test_a_failed_switch_keeps_its_error(tmp_path: Path) -> None:
    event = switch(ok=False, error="rank 3 is gone")
    assert [(s.ok, s.error) for s in read_run(write_run(tmp_path, [event])).switches] == [
        (False, "rank 3 is gone")
    ]


def test_refusals_and_other_events(tmp_path: Path) -> None:
    events = [{"event": "run"}, {"event": "save"}, refused(), {"event": "save"}, {"x": 1}]
    run = read_run(write_run(tmp_path, events))
    assert run.switches == ()
    assert [r.reason for r in run.refusals] == [refused()["reason"]]
    assert run.notes == (
        "events.jsonl: events that this report does not show: unnamed (1), save (2)",
    )


@pytest.mark.parametrize("missing", ["events.jsonl", "steps.jsonl"])
def test_one_of_the_files_may_be_missing(tmp_path: Path, missing: str) -> None:
    write_run(tmp_path, [switch()])
    (tmp_path / missing).unlink()
    run = read_run(tmp_path)
    assert run.notes == (f"there is no {missing}",)
    assert (len(run.steps), len(run.switches)) == ((4, 0) if missing[0] == "e" else (0, 1))


def test_a_folder_without_either_names_the_ones_below(tmp_path: Path) -> None:
    write_run(tmp_path / "switched", [])
    with pytest.raises(ConfigError, match=r"neither steps.jsonl nor events.jsonl; name one of .*/"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{not json}", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("\udcff\udcfe", "line 1 is not JSON"),
        ("9" * 10_000, "line 1 is not JSON"),
        ("[1, 2]", "line 1 is not a JSON object"),
        ('{"event": 5}', "line 1: 'event' should be a text, but is 5"),
        ('{"event": "switch", "iteration": 1.5}', "a whole number from 0 up, but is 1.5"),
        ('{"event": "switch", "iteration": true}', "a whole number from 0 up, but is True"),
        ('{"event": "refused", "iteration": -1}', "a whole number from 0 up, but is -1"),
        (switch(iteration=10**40), "'iteration' should be a whole number"),
        (switch(stall_s="long"), "'stall_s' should be a number, but is 'long'"),
        (switch(stall_s=-1), "'stall_s' should be a finite number from 0 up, but is -1"),
        (switch(stall_s=math.inf), "'stall_s' should be a finite number from 0 up, but is inf"),
        (switch(seconds=[1]), r"'seconds' should be an object, but is \[1\]"),
        (switch(seconds={"pack": "1"}), "'seconds': 'pack' should be a number, but is '1'"),
        (switch(bytes={"moved": 1.5}), "'bytes': 'moved' should be a whole number"),
        (switch(bytes_matrix=5), "'bytes_matrix' should be rows of equal length"),
        (switch(bytes_matrix=[[1], [2, 3]]), "'bytes_matrix' should be rows of equal length"),
        (switch(bytes_matrix=[[]]), "'bytes_matrix' should be rows of equal length"),
        (switch(bytes_matrix=[["a"]]), "'bytes_matrix' should be rows of equal length"),
        (switch(bytes_matrix=[[True]]), "'bytes_matrix' should be rows of equal length"),
        (switch(fingerprint="equal"), "'fingerprint' should be an object"),
        (switch(placement="best"), "'placement' should be an object"),
        (switch(nodes=[0.5]), "'nodes' should be a list of whole numbers"),
        (switch(source={"tp": 2}), "'source' should be a text"),
        (switch(target="\n\x1b[31m", ops=[1]), "'ops' should be a whole number"),
    ],
)
def test_broken_content_is_one_line_that_names_its_place(
    tmp_path: Path, line: str | dict[str, Any], told: str
) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    whole = json.dumps(switch())
    (tmp_path / "events.jsonl").write_text(f"{text}\n{whole}\n", errors="surrogateescape")
    with pytest.raises(DynaTrainError, match=told) as caught:
        read_run(tmp_path)
    assert caught.value.exit_code == 1
    assert str(caught.value).startswith(str(tmp_path / "events.jsonl") + " line 1")
    assert len(str(caught.value).splitlines()) == 1


numbers = st.integers() | st.floats() | st.booleans()
values = st.recursive(
    st.none() | numbers | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([*switch(), "loss", "layout", "reason"]), values),
    st.sampled_from(["switch", "refused", None]),
)
def test_whatever_a_line_holds_is_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], kind: str | None
) -> None:
    directory = tmp_path_factory.mktemp("run")
    record = {"iteration": 1, **fields, **({"event": kind} if kind else {})}
    for name in ("events.jsonl", "steps.jsonl"):
        write_lines(directory / name, [record, record])
    try:
        told = as_json(read_run(directory), None)
    except DynaTrainError as error:
        assert "line 1" in str(error)
    else:
        json.dumps(told, allow_nan=False).encode()


def test_clean_shows_what_does_not_print() -> None:
    assert clean("tp2 → é\n\ud800\x1b\u202e") == "tp2 → é����"
