"""Every command in README.md and docs/ is run, or held against the programs it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.commands import (
    PLACEHOLDERS,
    Wrong,
    called,
    check,
    check_dynatrain,
    check_option,
    check_overrides,
)
from tests.docs.pages import SHELLS, Block, page, pages
from tests.docs.running import fits, make_clone, run_page

BLOCKS = [block for one in pages() for block in one.commands]
PARSED = [block for block in BLOCKS if not block.is_run]
RUN = [one.name for one in pages() if any(block.is_run for block in one.commands)]
TRAINS = ("docs/first-switch.md",)
"""Pages whose commands start a job of their own."""
_LOOKS_LIKE_ONE = re.compile(
    r"^\s*(\$ |dynatrain |torchrun |srun |sbatch |kubectl |scripts/\S+\.sh)"
)
_KEY = re.compile(r"(?:engine|elastic|topology)\.[a-z_.]+=\S+|[a-z_]+=\S+")


def test_every_block_of_commands_says_how_it_is_tested() -> None:
    for block in BLOCKS:
        ways = [w for w in block.words if w in ("run", "check") or w.startswith("recipe=")]
        assert block.language == "bash" and len(ways) == 1, (
            f"{block}: write ```bash run (tests/docs runs it), ```bash check (its command lines "
            "are parsed), or ```bash recipe=NAME (tests/hosts runs it)"
        )


def test_no_command_hides_in_a_block_of_something_else() -> None:
    for one in pages():
        for block in one.blocks:
            if block.language not in SHELLS:
                odd = [line for line in block.text.splitlines() if _LOOKS_LIKE_ONE.match(line)]
                assert not odd, f"{block}: {odd[0]} is a command; make it a block ```bash"


@pytest.mark.parametrize("block", PARSED, ids=str)
def test_a_command_is_one(block: Block) -> None:
    commands = called(block.text)
    assert commands or block.text.startswith("export "), block
    for command in commands:
        try:
            check(command)
        except Wrong as wrong:
            pytest.fail(f"{block}: {wrong}")


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs a page, after the one it continues; the folder it was run in."""
    folders: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in folders:
            one = page(name)
            if one.continues is None:
                folders[name] = make_clone(tmp_path_factory.mktemp("clone") / "clone")
            else:
                folders[name] = run(f"docs/{one.continues}")
            run_page(one, folders[name])
        return folders[name]

    return run


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TRAINS)) for name in RUN]
)
def test_the_commands_of_a_page_do_what_it_says(name: str, run_once: Callable[[str], Path]) -> None:
    run_once(name)


def test_commands_and_settings_within_the_text_are_real() -> None:
    """``dynatrain …`` with its options, and ``key=value`` of ``--dynatrain``."""
    for one in pages():
        for span in one.spans:
            try:
                _check_span(span)
            except Wrong as wrong:
                pytest.fail(f"{one.name}: `{span}`: {wrong}")


def _check_span(span: str) -> None:
    words = [word for word in span.removeprefix("… ").split() if word != "…"]
    if not words:
        return
    if words[0] == "dynatrain" and len(words) > 1 and "|" not in words:
        if len(words) == 3 and words[2].startswith("--"):  # an option by its name alone
            check_option(words[1], words.pop())
        if len(words) == 2:  # the command by its name alone
            words.append("--help")
        for command in called(" ".join(PLACEHOLDERS.get(word, word) for word in words)):
            check_dynatrain(command[1:])
    elif words[0] == "--dynatrain" or all(_KEY.fullmatch(word) for word in words):
        settings = [word for word in words if word != "--dynatrain" and _is_setting(word)]
        if settings:
            check_overrides([word.replace("N", "4") if "=N" in word else word for word in settings])


def _is_setting(word: str) -> bool:
    """Not a setting of something else, an equation, or one whose value is left to the reader."""
    from dynatrain_megatron.config import _ALLOWED

    key, _, value = word.partition("=")
    return key in _ALLOWED and value not in ("…", "HOST", "DIR") and key != "model"


def test_what_is_shown_is_compared() -> None:
    assert fits("a  \nb …\nc", "a\nb 1 2\nc\n")
    assert fits("first\n…\nlast", "first\nx\ny\nlast")
    assert not fits("a\nb", "a\nb\nc")
    assert not fits("a …", "b 1")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dynatrain plan modle=llama2_7b source=tp2 target=pp2", "modle"),
        ("dynatrain switch --targt tp2", "--targt"),
        ("dynatrain switch --target tpp2", "tpp2"),
        ("torchrun --nproc-per-node 2 scripts/pretrain_gpt.py --num-layer 4", "--num-layer"),
        ("torchrun scripts/pretrain_gpt.py --bf16 --dynatrain engine.verfy=off", "verfy"),
        ("torchrun scripts/no_such.py", "no_such"),
        ("torchrun --nprocs-per-node 2 scripts/pretrain_gpt.py", "nprocs"),
        ("srun --wait=0 scripts/slurm_rank.sh dynatrain stor", "stor"),
        ("scripts/test.sh tests/no_such.py", "no_such"),
        ("rm -rf /", "rm is no command"),
        ("dynatrain plan 'a", "the shell says"),
        ("dynatrain report $NOBODY_KNOWS", "RUN_DIR"),
    ],
)
def test_a_wrong_command_is_found(text: str, told: str) -> None:
    with pytest.raises(Wrong, match=re.escape(told)):
        for command in called(text):
            check(command)
