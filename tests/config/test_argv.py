"""Taking our part out of a command line."""

import pytest

from dynatrain_megatron.config import split_argv
from dynatrain_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "host", "overrides"),
    [
        ("", [], None),
        ("--bf16 --lr 1", ["--bf16", "--lr", "1"], None),
        ("--bf16 --dynatrain", ["--bf16"], []),
        ("--dynatrain a=1 b.c=2", [], ["a=1", "b.c=2"]),
        ("--lr 1 --dynatrain a=1 --bf16 x", ["--lr", "1", "--bf16", "x"], ["a=1"]),
        ("--dynatrain --bf16 a=1", ["--bf16", "a=1"], []),
        ("--dynatrain a=1 -x b=2", ["-x", "b=2"], ["a=1"]),
        ("--dynatrain-like a=1", ["--dynatrain-like", "a=1"], None),
    ],
)
def test_what_belongs_to_whom(argv: str, host: list[str], overrides: list[str] | None) -> None:
    assert split_argv(argv.split()) == (host, overrides)


def test_an_argument_with_spaces_stays_one() -> None:
    schedule = "schedule=[{iteration: 5, layout: {tp: 1}}]"
    assert split_argv(["--dynatrain", schedule])[1] == [schedule]


@pytest.mark.parametrize("argv", [["--dynatrain"] * 2, ["--dynatrain", "a=1", "-x", "--dynatrain"]])
def test_the_flag_given_twice_is_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--dynatrain is given twice"):
        split_argv(argv)


def test_the_flag_with_an_equals_sign_is_refused() -> None:
    with pytest.raises(ConfigError, match="write --dynatrain a=b, with a space"):
        split_argv(["--dynatrain=a=b"])
