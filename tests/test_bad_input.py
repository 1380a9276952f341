"""Whatever a user, a file or a stranger gives: it is taken, or refused by one message.

Each test makes up input of one kind, from plausible to hostile, and lets nothing through but a
result or an error of the package's own, said in one line. Overrides as Hydra reads them, lines of
events, damaged checkpoints and words of `dynatrain plan` are made up beside their own tests.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynatrain_megatron.cli import main
from dynatrain_megatron.cli.fingerprint import _switch as switch_of
from dynatrain_megatron.config import DynaTrainConfig, ScheduleStep
from dynatrain_megatron.elastic import control
from dynatrain_megatron.elastic.control import JobFile, opened, signed
from dynatrain_megatron.elastic.directory import Directory, JobCard
from dynatrain_megatron.elastic.store import StoreAddress, StoreOwner
from dynatrain_megatron.errors import (
    ConfigError,
    DynaTrainError,
    LayoutError,
    SwitchRefused,
    WorldError,
)
from dynatrain_megatron.layout import LAYOUT_KEYS, ParallelLayout, derive, read_changes
from dynatrain_megatron.observe.report import as_json, read_run
from dynatrain_megatron.planner import Topology, read_topology_file
from dynatrain_megatron.plugin.leader import Leader
from dynatrain_megatron.transition.posted import Board
from tests.adapters.test_saved_state import example as saved_tensors
from tests.adapters.test_saved_state import write as write_checkpoint
from tests.composed import config_of
from tests.layout.strategies import parallel_layouts

DEEP = "[" * 100_000
DIGITS = "9" * 5_000

numbers = st.integers(-2, 9) | st.integers() | st.sampled_from([1e400, -0.0, 1 << 70, 10**400])
words = st.text(max_size=8) | st.sampled_from(
    ["tp2", "tp2-pp2", "auto", "\ud800", "a\nb", "0-3", "3-1", "pipeline:", "${x}", DIGITS, "²"]
)
scalars = st.none() | st.booleans() | numbers | st.floats() | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@contextlib.contextmanager
def refused_in_one_line(*kinds: type[DynaTrainError], most: int = 2_000) -> Iterator[None]:
    """What is raised inside, if anything, is one of these with one line that is no essay."""
    try:
        yield
    except kinds as error:
        said = str(error)
        assert said and len(said.splitlines()) == 1 and len(said) < most, said
        said.encode("utf-8")  # it can be printed


def command(*argv: str) -> tuple[int, str]:
    """Exit code and complaints of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(argv))
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
    return code, err.getvalue()


# ---------------------------------------------------------------------- layouts and schedules

pipelines = st.text("Etm|L,()*0123456789", max_size=12) | st.sampled_from(
    ["E(t|)*9999999999L", "(t*9999)*9999", "|", "E" * 20_000]
)
changes = st.dictionaries(
    st.sampled_from([*LAYOUT_KEYS, "tpp", ""]), values | st.integers(1, 8) | pipelines, max_size=4
)
layouts = changes | words | values | st.builds("pp2-pipeline:{}".format, pipelines)


@settings(max_examples=200)
@given(parallel_layouts(), layouts, st.integers(1, 64))
def test_any_layout_is_one_or_refused(base: ParallelLayout, wanted: Any, world: int) -> None:
    with refused_in_one_line(LayoutError):
        found = derive(base, wanted, world)
        assert found.world == world
        assert read_changes(wanted).get("world") in (None, world)


@pytest.mark.parametrize("pipeline", ["E(t|)*9999999999L", "(t*9999)*9999", "t" * 20_000])
def test_a_pipeline_layout_that_no_model_has_is_not_unrolled(pipeline: str) -> None:
    with pytest.raises(LayoutError, match="more than 10000 letters"):
        derive(ParallelLayout(pp=2), {"pipeline": pipeline}, 2)


steps = st.fixed_dictionaries(
    {}, optional={"iteration": st.integers(1, 9) | values, "layout": layouts, "more": values}
)


@settings(max_examples=150)
@given(st.lists(steps | values, max_size=3), values, st.none() | numbers)
def test_any_schedule_is_one_or_refused(entries: list[Any], target: Any, at: Any) -> None:
    for settings_ in ({"schedule": tuple(entries)}, {"target": target, "switch_at": at}):
        with refused_in_one_line(ConfigError):
            config = DynaTrainConfig(**settings_)
            assert all(isinstance(step, ScheduleStep) for step in config.steps())


@pytest.mark.parametrize(
    "override",
    [
        f"elastic.store=h:{DIGITS}",
        f"elastic.join=h:{DIGITS}",
        "elastic.store=h:²",
        "target='pp2-pipeline:E(t|)*9999999999L'",
        "schedule=[{iteration: 1, layout: {pipeline: '(t*9999)*9999'}}]",
        "topology={speeds: {near_gb_s: 1e400}}",
        "engine.timeout_s=nan",
        "elastic.timeout_s=1e400",
        f"engine.staging_mib={DIGITS[:400]}",
        f"topology={{node_width: {DIGITS[:400]}}}",
    ],
)
def test_an_override_out_of_all_bounds_is_refused(override: str) -> None:
    overrides = [override, *(["switch_at=2"] if override.startswith("target") else [])]
    with pytest.raises(ConfigError):
        config = config_of(overrides)
        read_topology_file(config.topology)


# ---------------------------------------------------------------------- what is asked of a job


@settings(max_examples=150)
@given(st.text(max_size=40) | values.map(json.dumps), st.integers(0, 9), st.text(max_size=8))
@example(json.dumps({"request": "\ud800", "mac": ""}), 0, "secret")
@example(json.dumps({"request": "", "mac": "\ud800"}), 0, "secret")
@example(DEEP, 0, "secret")
@example(f'{{"request": {DIGITS}}}', 0, "secret")
def test_a_stranger_asks_in_vain(message: str, number: int, secret: str) -> None:
    assert opened(message, number, secret) is None
    if len(message) <= control.MOST_CHARS:
        with contextlib.suppress(UnicodeEncodeError):  # the asker's own text, refused there
            assert opened(signed(message, number, secret), number, secret) == message
            assert opened(signed(message, number, secret), number + 1, secret) is None


@dataclass
class Answers:
    """What a leader told those that ask, and what it announced; stands for a job's store."""

    told: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    posted: list[Any] = field(default_factory=list)

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        json.dumps(answer).encode()
        self.told.append((number, answer))

    def owner(self) -> StoreOwner:
        return StoreOwner()

    def post(self, posted: Any) -> None:
        assert type(posted).from_json(posted.to_json()).layout is not None
        self.posted.append(posted)


def asked(text: str) -> Answers:
    """What becomes of a request at a job of four processes in tp2-dp2, two more waiting."""
    answers = Answers()
    ids = iter(range(1, 100))
    job: Any = SimpleNamespace(
        iteration=5,
        num_changes=0,
        processes=("a", "b", "c", "d"),
        layout=ParallelLayout(tp=2, dp=2),
        store=SimpleNamespace(new_world_ids=lambda count: [next(ids) for _ in range(count)]),
    )
    membership: Any = SimpleNamespace(
        requests=[(3, text)],
        waiting=lambda: ("e", "f"),
        notices=set(),
        directory=answers,
        answer=answers.answer,
        is_answered=lambda number: False,
        board=answers,
        leads=True,
        given_up=[],
    )

    def feasible(wanted: Any, world: int, at: int = 0) -> ParallelLayout:
        try:
            return derive(job.layout, wanted, world)
        except LayoutError as error:
            raise SwitchRefused(str(error)) from error

    leader = Leader(job, membership, feasible, lead_steps=0, policy=None, launch_layout=job.layout)
    leader.announce(5, [])
    assert not membership.requests
    return answers


requests = st.fixed_dictionaries(
    {},
    optional={
        "layout": layouts,
        "world": st.integers(1, 7) | values,
        "at": st.integers(1, 9) | values,
        "dry_run": st.booleans() | values,
        "more": values,
    },
)


@settings(max_examples=150)
@given(requests.map(json.dumps) | values.map(json.dumps) | st.text(max_size=20))
@example(DEEP)
@example('{"layout": ' + DEEP)
@example(f'{{"world": {DIGITS}}}')
@example(f'{{"layout": {{"tp": {DIGITS[:4000]}}}}}')
def test_every_request_is_answered_once_and_nothing_else_happens(text: str) -> None:
    found = asked(text)
    ((number, answer),) = found.told
    assert number == 3 and answer["state"] in ("refused", "possible", "announced", "waiting")
    assert bool(found.posted) == (answer["state"] == "announced")
    if answer["state"] == "refused":
        assert len(answer["reason"].splitlines()) == 1


def test_what_can_be_done_is_announced() -> None:
    """So that the test above does not pass because everything is refused."""
    assert asked('{"layout": "tp4"}').posted[0].layout == "tp4"
    assert asked('{"world": 6}').posted[0].change.target == ("a", "b", "c", "d", "e", "f")
    assert asked('{"world": 6, "dry_run": true}').told[0][1]["state"] == "possible"


class Values:
    """A store's client that holds these texts."""

    def __init__(self, texts: dict[str, bytes]) -> None:
        self.texts = texts

    def add(self, key: str, count: int) -> int:
        return int(self.texts.get(key, b"0")) + count

    def check(self, keys: list[str]) -> bool:
        return all(key in self.texts for key in keys)

    def get(self, key: str) -> bytes:
        return self.texts[key]


def directory_of(texts: dict[str, bytes]) -> Directory:
    store: Any = SimpleNamespace(here=lambda: Values(texts))
    return Directory(store)


def board_of(texts: dict[str, bytes]) -> Board:
    store: Any = SimpleNamespace(here=lambda: Values(texts))
    return Board(store)


@settings(max_examples=100)
@given(st.binary(max_size=20) | values.map(lambda value: json.dumps(value).encode()))
@example(DEEP.encode())
@example(b"[]")
def test_whatever_strangers_write_into_the_store_ends_nothing(data: bytes) -> None:
    directory = directory_of(
        {"requests": b"1", "request/0": data, "status": data, "answer/0": data, "owner": data}
    )
    (message,) = directory.requests(0)
    assert opened(message, 0, "secret") is None
    for read in (directory.status, lambda: directory.answer_of(0), directory.owner):
        with refused_in_one_line(WorldError):
            found = read()
            assert found is None or isinstance(found, dict | StoreOwner)
    keys = ("latest", "1/spec", "1/begin", "1/stop")
    board = board_of({f"switch/{key}": data for key in keys})
    for look in (board.read, board.boundary, board.begins, lambda _: board.latest()):
        with refused_in_one_line(WorldError):
            assert look(1) is not None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=20)
    | values.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(
        {"store": words | st.just("h:1") | values, "job": values, "secret": values}
    ).map(lambda value: json.dumps(value).encode())
)
@example(DEEP.encode())
@example(json.dumps({"store": f"h:{DIGITS}", "job": "", "secret": ""}).encode())
def test_any_job_file_is_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    (tmp_path / control.JOB_FILE).write_bytes(data)
    with refused_in_one_line(ConfigError):
        assert isinstance(JobFile.read(tmp_path), JobFile)

    def connect(self: StoreAddress, *, timeout_s: float) -> Any:
        raise WorldError(f"no store answers at {self}")

    monkeypatch.setattr(StoreAddress, "connect", connect)
    for words_ in (["status"], ["switch", "--target", "tp2"]):
        code, said = command(*words_, "--run-dir", str(tmp_path))
        assert code in (1, 2) and said.startswith(f"dynatrain {words_[0]}: "), said
        assert len(said.splitlines()) == 1


@settings(max_examples=60)
@given(layouts.filter(lambda wanted: isinstance(wanted, str)) | st.text("{}tp: 2,[]()'\"*9|E"))
def test_any_target_of_a_request_is_read_or_refused(text: str) -> None:
    code, said = command("switch", "--run-dir", "/nowhere", f"--target={text}")
    assert code == 2 and "Traceback" not in said
    assert said.startswith("dynatrain switch: ") and len(said.splitlines()) == 1


def test_a_card_of_another_version_is_refused() -> None:
    for data in (b'{"name": 1}', b"[]", b'{"more": 1}', DEEP.encode(), b"\xff"):
        client = SimpleNamespace(wait=lambda *_: None, get=lambda _, data=data: data)
        address: Any = SimpleNamespace(connect=lambda client=client, **_: client)
        with pytest.raises(WorldError, match="another way than this version"):
            JobCard.read(address, timeout_s=1)


# ---------------------------------------------------------------------- files


names = st.sampled_from(
    ["nodes", "ranks_per_node", "node_width", "speeds", "hosts", "ranks", "near_gb_s", "a"]
)
topologies = st.recursive(
    scalars | st.sampled_from(["0-3", "gpu-*", [0, 1], 2, f"0-{DIGITS}"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names | words, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(topologies, st.integers(1, 6))
@example({"speeds": {"near_gb_s": 10**400}}, 4)
@example({"nodes": {"a": {"ranks": f"0-{DIGITS}"}}}, 4)
@example({"node_width": 1 << 20_000}, 4)
def test_any_topology_is_one_or_refused(content: Any, num_ranks: int) -> None:
    with refused_in_one_line(ConfigError):
        found = read_topology_file(content if isinstance(content, dict) else {"nodes": content})
        topology = found.over(Topology.single_node(num_ranks), ["gpu-1"] * num_ranks)
        assert len(topology.node) == num_ranks


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("nodesrankw_ithp:{}[]-0123456789.&*!${} \n\t'\"#", max_size=60) | st.binary())
@example(DEEP[:400])
@example("node_width: 0x" + "f" * 5_000)
@example("a: &a [*a]")
@example("nodes: !!python/object/apply:os.system [exit]")
def test_any_topology_file_is_read_or_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused_in_one_line(ConfigError):
        read_topology_file(str(path))


presets = st.sampled_from(["layout", "engine", "elastic", "experiment", "topology"])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    presets,
    values.map(lambda value: json.dumps(value).encode())
    | st.text("tpdefaults:override/ {}[]-01_@package\n\"'$", max_size=60).map(str.encode)
    | st.binary(max_size=20),
)
@example("engine", b"window_ops: ${engine.window_ops}")
@example("experiment", b"defaults: [experiment: mine]")
@example("experiment", b"# @package _global_\nfaults: 3")
@example("layout", DEEP[:400].encode())
def test_any_preset_file_is_read_or_refused(tmp_path: Path, group: str, content: bytes) -> None:
    (tmp_path / group).mkdir(exist_ok=True)
    (tmp_path / group / "mine.yaml").write_bytes(content)
    override = ["target=mine", "switch_at=2"] if group == "layout" else [f"{group}=mine"]
    with refused_in_one_line(ConfigError):
        config = config_of(override, tmp_path)
        if not isinstance(config.topology, str):
            read_topology_file(config.topology)


EVENTS = [
    {"event": "run", "iteration": 0},
    {
        "event": "switch", "iteration": 5, "source": "tp2", "target": "pp2", "ok": True,
        "stall_s": 0.5, "seconds": {"wire": 0.1}, "bytes": {"moved": 8, "lower_bound": 8},
        "bytes_matrix": [[1, 2], [3, 4]], "fingerprint": {"before": "a", "after": "a"},
    },
    {"event": "refused", "iteration": 9, "source": "tp2", "target": "tp3", "reason": "no"},
]  # fmt: skip


def damaged(data: st.DataObject, sound: bytes) -> bytes:
    """``sound`` cut off, or with some bytes changed, lost, put in or said twice."""
    changed = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        kind = data.draw(st.sampled_from(["cut", "change", "lose", "twice"]))
        if kind == "cut":
            del changed[at:]
        elif kind == "change":
            changed[at : at + 4] = data.draw(st.binary(max_size=6))
        elif kind == "lose":
            del changed[at : at + data.draw(st.integers(1, 200))]
        else:
            changed[at:at] = changed[at : at + data.draw(st.integers(1, 200))]
    return bytes(changed)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_record_of_a_run_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    for name, lines in (
        ("events.jsonl", EVENTS),
        ("steps.jsonl", [{"iteration": i, "loss": 1.5, "layout": "tp2"} for i in range(4)]),
    ):
        sound = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (tmp_path / name).write_bytes(damaged(data, sound))
    with refused_in_one_line(DynaTrainError):
        json.dumps(as_json(read_run(tmp_path), None), allow_nan=False)
    with refused_in_one_line(ConfigError):
        assert switch_of(tmp_path, Path("iter_0000005"))["iteration"] == 5


def numbers_of(found: Any) -> list[Callable[[int], None]]:
    """Setters of the numbers that the description of a checkpoint has."""
    setters: list[Callable[[int], None]] = []

    def setter(owner: Any, name: str) -> Callable[[int], None]:
        return lambda value: setattr(owner, name, value)

    def sizes(owner: Any, name: str) -> Iterator[Callable[[int], None]]:
        for place in range(len(getattr(owner, name))):

            def set_one(value: int, place: int = place) -> None:
                old = list(getattr(owner, name))
                old[place] = value
                object.__setattr__(owner, name, torch.Size(old) if value >= 0 else tuple(old))

            yield set_one

    for info in found.storage_data.values():
        setters += [setter(info, "offset"), setter(info, "length")]
    for entry in found.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            setters += sizes(entry, "size")
            for chunk in entry.chunks:
                setters += [*sizes(chunk, "offsets"), *sizes(chunk, "sizes")]
    return setters


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_checkpoint_that_is_described_wrongly_is_refused(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Numbers as a broken disk or another version could leave them: lost, huge, negative."""
    directory = tmp_path / "checkpoint"
    if not directory.exists():
        write_checkpoint(saved_tensors(), directory)
    path = directory / ".metadata"
    sound = path.read_bytes()
    found = pickle.loads(sound)
    setters = numbers_of(found)
    for _ in range(data.draw(st.integers(1, 2))):
        wrong = st.sampled_from([-1, 0, 1, 2, 7, 1 << 31, 1 << 40, 1 << 62])
        data.draw(st.sampled_from(setters))(data.draw(wrong))
    path.write_bytes(pickle.dumps(found))
    try:
        code, said = command("fingerprint", str(directory))
    finally:
        path.write_bytes(sound)
    assert code in (0, 1) and "Traceback" not in said
    assert said == "" or said.startswith("dynatrain fingerprint: ")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_checkpoint_with_a_damaged_file_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    directory = tmp_path / "checkpoint"
    if not directory.exists():
        write_checkpoint(saved_tensors(), directory)
    path = data.draw(st.sampled_from(sorted(directory.iterdir())))
    sound = path.read_bytes()
    path.write_bytes(damaged(data, sound))
    try:
        code, said = command("fingerprint", str(directory))
    finally:
        path.write_bytes(sound)
    assert code in (0, 1)
    assert said == "" or said.startswith("dynatrain fingerprint: ")


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    command("status", "--endpoint", "nowhere")
    assert dict(os.environ) == before
