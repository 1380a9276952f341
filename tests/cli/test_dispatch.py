"""The dispatcher: versions, help, and what wrong usage costs."""

import subprocess
import sys

import pytest

from dynatrain_megatron import __version__
from dynatrain_megatron.cli import COMMANDS, demo, main


def _exit_code(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("--version") == 0
    assert capsys.readouterr().out == f"dynatrain-megatron {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(command, "--help") == 0
    assert f"usage: dynatrain {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["demo", "--colour"], "unrecognized arguments: --colour"),
        (["demo", "--iterations", "many"], "'many' is not a number of steps"),
        (["demo", "--iterations", "4"], "4 is too few: 5 layouts need a step each"),
    ],
)
def test_wrong_usage_exits_2_and_says_why(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(*argv) == 2
    assert told in capsys.readouterr().err


def test_a_folder_of_others_is_not_touched(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "static" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "is not empty and was not made by this demo" in capsys.readouterr().err
    assert precious.read_text() == "years of work"


def test_an_earlier_demo_gives_way_but_its_data_stay(tmp_path) -> None:
    out = tmp_path / "out"
    demo.claim_folder(out)
    for name in ("static", "data"):
        (out / name).mkdir()
    demo.claim_folder(out)
    assert sorted(path.name for path in out.iterdir()) == ["data", "demo.json"]


def test_an_interrupt_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "dynatrain demo: interrupted\n"


def test_the_command_line_loads_no_torch() -> None:
    code = (
        "import sys; from dynatrain_megatron.cli import build_parser; build_parser();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'hydra')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_schedule_gives_every_layout_its_steps() -> None:
    assert [(at, str(layout)) for at, layout in demo.plan_schedule(30)] == [
        (6, "pp2-dp2"),
        (12, "tp4"),
        (18, "pp4"),
        (24, "dp4"),
    ]
    assert [at for at, _ in demo.plan_schedule(5)] == [1, 2, 3, 4]
