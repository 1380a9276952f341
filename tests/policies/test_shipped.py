"""The policies that are shipped, step by step and without ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.advisor import Machine, Workload, estimate_memory
from dynatrain_megatron.errors import ConfigError, SwitchRefused
from dynatrain_megatron.layout import ParallelLayout, derive
from dynatrain_megatron.policies import (
    Policy,
    PolicyContext,
    alternate,
    as_changes,
    ask_policy,
    first_of,
    follow_capacity,
    schedule,
)
from dynatrain_megatron.shapes import MODELS
from tests.composed import config_of

GIB = 1 << 30
DOCS = Path(__file__).parents[2] / "docs"
LLAMA = Workload(model=MODELS["7B"], global_batch_size=480)


def context(layout: str = "dp8", **changes: Any) -> PolicyContext:
    parsed = ParallelLayout.parse(layout)
    values = {"iteration": 5, "layout": parsed, "launch_layout": parsed, "workload": LLAMA}
    return PolicyContext(**values | changes)


def run(policy: Policy, iterations: int, **changes: Any) -> Iterator[tuple[int, object]]:
    """(iteration, answer) of each boundary at which a policy wants something."""
    previous = 0
    for iteration in range(changes.pop("first", 1), iterations + 1):
        answer = ask_policy(
            policy, context(iteration=iteration, previous_iteration=previous, **changes)
        )
        previous = iteration
        if answer is not None:
            yield iteration, answer


# ---------------------------------------------------------------- schedule and phases

STEPS = config_of(
    ["schedule=[{iteration: 3, layout: tp2}, {iteration: 6, layout: {pp: 2}}, "
     "{iteration: 7, layout: dp8}]"]
).steps()  # fmt: skip


def test_a_schedule_as_a_policy() -> None:
    expected = [(3, "tp2"), (6, {"pp": 2}), (7, "dp8")]
    assert list(run(schedule, 20, schedule=STEPS)) == expected
    assert list(run(schedule, 20)) == []


def test_a_run_that_goes_on_behind_several_steps_takes_the_last() -> None:
    assert list(run(schedule, 20, first=7, schedule=STEPS)) == [(7, "dp8")]
    assert list(run(schedule, 20, first=6, schedule=STEPS)) == [(6, {"pp": 2}), (7, "dp8")]


def test_phases_take_turns() -> None:
    policy = alternate("tp4", {"dp": 4, "tp": 1}, every=5)
    back = {"dp": 4, "tp": 1}
    assert list(run(policy, 20)) == [(5, back), (10, "tp4"), (15, back), (20, "tp4")]
    # After a restart the job is in its launch's layout, the first one.
    assert list(run(policy, 12, first=7)) == [(7, back), (10, "tp4")]
    assert list(run(policy, 16, first=12)) == [(15, back)]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "5"])
def test_a_phase_has_a_step_at_least(every: Any) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of steps"):
        alternate("tp2", "dp2", every=every)


def test_phases_name_layouts() -> None:
    with pytest.raises(ConfigError, match="alternate: 'tpp2' is not a layout: "):
        alternate("tp2", "tpp2", every=3)


def test_the_schedule_goes_first() -> None:
    policy = first_of(schedule, alternate("tp4", "dp4", every=3))
    assert list(run(policy, 6, schedule=STEPS[:1])) == [(3, "tp2"), (6, "tp4")]


# ---------------------------------------------------------------- follow_capacity


def wanted(**changes: Any) -> ParallelLayout | None:
    """The layout that follow_capacity asks for, derived as a switch derives it."""
    asked = context(**changes)
    answer = ask_policy(follow_capacity, asked)
    if answer is None:
        return None
    assert isinstance(answer, Mapping)
    world = answer["world"]
    assert isinstance(world, int)
    return derive(asked.launch_layout, answer, world)


def test_nothing_changes_where_nobody_comes_or_goes() -> None:
    assert wanted() is None
    assert wanted(machine=Machine(memory_bytes=1)) is None


def test_who_waits_is_taken_in() -> None:
    found = wanted(waiting=4)
    assert found is not None and found.world == 12


def test_who_leaves_is_done_without() -> None:
    found = wanted(leaving=(2, 3))
    assert found is not None and found.world == 6


def test_as_many_in_as_out_keep_the_layout() -> None:
    found = wanted(layout="tp2-pp2-dp2", leaving=(0,), waiting=1)
    assert found == ParallelLayout.parse("tp2-pp2-dp2")


def test_ranks_of_no_use_are_left_over() -> None:
    # 16 layers, 480 samples: nothing divides by 17, 19 or 23.
    small = Workload(model=MODELS["1B"], global_batch_size=480)
    grown = wanted(layout="dp16", workload=small, waiting=7)
    assert grown is not None and grown.world == 22
    assert wanted(layout="dp16", workload=small, waiting=1) is None  # it goes on waiting
    shrunk = wanted(layout="dp20", workload=small, leaving=(7,))
    assert shrunk is not None and shrunk.world == 18


def test_options_of_the_launch_stay() -> None:
    found = wanted(layout="tp2-pp2-vpp2-cp2-dp1-sp-noopt-mbs2", waiting=4)
    assert found is not None
    assert (found.world, found.cp, found.mbs, found.dist_opt) == (12, 2, 2, False)


def test_memory_is_a_limit() -> None:
    machine = Machine(memory_bytes=80 * GIB)
    large = Workload(model=MODELS["70B"], global_batch_size=480)
    common = {"layout": "tp8-pp4-sp", "workload": large, "machine": machine}
    grown = wanted(**common, waiting=16)
    assert grown is not None and grown.world == 48
    usable = machine.usable_bytes
    assert usable is not None and estimate_memory(large, grown).total <= usable
    with pytest.raises(SwitchRefused, match="no layout of 4 ranks or fewer fits") as caught:
        wanted(**common, leaving=tuple(range(28)))
    assert "let fewer ranks leave" in caught.value.next_step


def test_an_estimate_that_the_job_disproves_is_no_limit() -> None:
    layout = ParallelLayout.parse("tp2-dp4-sp")
    needs = estimate_memory(LLAMA, layout).total
    tight = Machine(memory_bytes=needs // 2)
    found = wanted(layout=str(layout), machine=tight, waiting=4)
    assert found is not None and found.world == 12
    assert estimate_memory(LLAMA, found).total <= needs


def test_what_was_refused_is_not_asked_for_again() -> None:
    first = wanted(waiting=4)
    assert first is not None
    second = wanted(waiting=4, refused=(as_changes(first),))
    assert second is not None and second.world == 12 and second != first
    kept = as_changes(ParallelLayout(dp=8))
    other = wanted(leaving=(0,), waiting=1, refused=(kept,))
    assert other is not None and other.world == 8 and as_changes(other) != kept


def test_a_model_that_is_not_known_is_said() -> None:
    with pytest.raises(SwitchRefused, match="needs the sizes of the model"):
        wanted(workload=None, waiting=1)
    kept = wanted(workload=None, waiting=1, leaving=(0,))
    assert kept == ParallelLayout(dp=8)


def test_where_all_leave_there_is_no_layout_to_ask_for() -> None:
    assert wanted(layout="dp2", leaving=(0, 1)) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.sets(st.integers(0, 7), max_size=8), st.booleans())
def test_it_settles_in_one_switch(waiting: int, leaving: set[int], tight: bool) -> None:
    machine = Machine(memory_bytes=80 * GIB if tight else None)
    asked = context("tp2-dp4-sp", waiting=waiting, leaving=tuple(leaving), machine=machine)
    try:
        answer = follow_capacity(asked)
    except SwitchRefused:
        assert leaving and tight
        return
    if answer is None:
        assert not leaving or asked.capacity < 1
        return
    assert isinstance(answer, dict) and answer["world"] <= asked.capacity
    layout = derive(asked.launch_layout, answer, answer["world"])
    layout.check(LLAMA.shape)
    over = asked.capacity - layout.world
    assert follow_capacity(replace(asked, layout=layout, waiting=over, leaving=())) is None


# ---------------------------------------------------------------- the page


def test_the_policy_on_the_docs_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "policies.md").read_text(), re.DOTALL)
    spaces: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "policies.md", "exec"), spaces)
    stuck = context("tp2-dp4", metrics={"lm loss": float("nan")}, step_s=9.0)
    policies = [one for name, one in spaces.items() if name in ("rl", "decide")]
    assert len(policies) == 2
    for policy in policies:
        ask_policy(policy, stuck)
    assert [at for at, _ in run(spaces["rl"], 100)] == [50, 100]
    long_enough = context("tp2-dp4", iteration=1000, previous_iteration=999)
    assert ask_policy(spaces["decide"], long_enough) is not None
