"""How policies are loaded and asked."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from dynatrain_megatron.errors import ConfigError, LayoutError, SwitchRefused
from dynatrain_megatron.layout import ParallelLayout, derive
from dynatrain_megatron.policies import (
    Answer,
    PolicyContext,
    as_changes,
    ask_policy,
    first_of,
    follow_capacity,
    load_policy,
)
from tests.composed import config_of
from tests.layout.strategies import parallel_layouts

CONTEXT = PolicyContext(
    iteration=7, layout=ParallelLayout(tp=2, dp=2), launch_layout=ParallelLayout(tp=2, dp=2)
)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path, for modules that are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path  # type: ignore[misc]
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_policy(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_policy_is_loaded_by_its_name(modules: Path) -> None:
    (modules / "house").mkdir()
    (modules / "house" / "rules.py").write_text(
        "class Rules:\n    @staticmethod\n    def night(context):\n        return 'dp4'\n"
    )
    config = config_of(["policy=house.rules:Rules.night"])
    assert config.policy is not None
    assert load_policy(config.policy)(CONTEXT) == "dp4"
    shipped = load_policy("dynatrain_megatron.policies:follow_capacity")
    assert shipped is follow_capacity


@pytest.mark.parametrize(
    ("source", "text", "told"),
    [
        ("", "houses:x", "module 'houses' is not found; it must be where Python looks for modules"),
        ("", "house.inner:x", "module 'house.inner' is not found"),
        ("import numpy.nothing", "house:x", "module 'numpy.nothing' is not found"),
        ("1 / 0", "house:x", "module 'house' fails with ZeroDivisionError: division by zero"),
        ("a b", "house:x", "module 'house' fails with SyntaxError: invalid syntax"),
        (
            "def decide(c): ...",
            "house:decides",
            "'house' has no 'decides' (did you mean 'decide'?)",
        ),
        ("decide = 'tp2'", "house:decide", "is str, which cannot be called; name a function"),
        ("", "house", "is not of the form package.module:function"),
    ],
)
def test_what_cannot_be_loaded_is_told(modules: Path, source: str, text: str, told: str) -> None:
    (modules / "house.py").write_text(source + "\n")
    message = refused(text)
    assert message.startswith(f"policy={text}") and told in message


# ---------------------------------------------------------------- asking


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, None),
        ("pp2-dp2", "pp2-dp2"),
        ({"tp": 1, "world": 4}, {"tp": 1, "world": 4}),
        (ParallelLayout(pp=2), as_changes(ParallelLayout(pp=2))),
    ],
)
def test_answers(answer: Answer, expected: object) -> None:
    assert ask_policy(lambda context: answer, CONTEXT) == expected


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("tp2-tp4", "names tp twice"),
        ({"tpp": 2}, "layout key 'tpp' is unknown"),
        (4, "a layout is a text such as"),
        (["tp2"], "a layout is a text such as"),
        ("", "a layout is a text such as"),
    ],
)
def test_a_wrong_answer_is_a_refusal(answer: object, told: str) -> None:
    with pytest.raises(SwitchRefused) as caught:
        ask_policy(lambda context: answer, CONTEXT)  # type: ignore[arg-type,return-value]
    assert "the policy's answer at iteration 7 is not a layout: " in str(caught.value)
    assert told in caught.value.reason
    assert caught.value.next_step == "the job stays in layout tp2-dp2"


def test_a_policy_that_fails_does_not_end_the_job() -> None:
    def broken(context: PolicyContext) -> Answer:
        return {"a": "dp4"}[str(context.iteration)]

    with pytest.raises(SwitchRefused, match=r"failed at iteration 7 with KeyError: '7'; the job"):
        ask_policy(broken, CONTEXT)

    def stopped(context: PolicyContext) -> Answer:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_policy(stopped, CONTEXT)


def test_the_first_that_wants_something_decides() -> None:
    asked = []

    def policy(name: str, answer: Answer) -> object:
        def ask(context: PolicyContext) -> Answer:
            asked.append(name)
            return answer

        return ask

    policies = [policy("a", None), policy("b", "dp4"), policy("c", "tp4")]
    assert first_of(*policies)(CONTEXT) == "dp4" and asked == ["a", "b"]  # type: ignore[arg-type]
    assert first_of()(CONTEXT) is None


def test_a_context_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CONTEXT.waiting = 3  # type: ignore[misc]


def test_capacity_counts_who_stays_and_who_waits() -> None:
    context = PolicyContext(
        iteration=1, layout=ParallelLayout(dp=8), launch_layout=ParallelLayout(dp=4),
        leaving=(0, 7), waiting=5,
    )  # fmt: skip
    assert (context.world, context.capacity) == (8, 11)


def test_changes_say_all_whatever_the_launch_was() -> None:
    from hypothesis import given

    @given(parallel_layouts(), parallel_layouts())
    def check(layout: ParallelLayout, launch: ParallelLayout) -> None:
        try:
            derived = derive(launch, as_changes(layout), layout.world)
        except LayoutError:
            pytest.fail(f"{layout} is not derived from {launch}")
        assert derived == layout

    check()
