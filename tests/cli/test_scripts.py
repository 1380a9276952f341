"""scripts/setup.sh with a pretended Python: what it looks for, does, skips and says."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "chmod", "cksum", "cp", "dirname", "head", "mkdir", "rm", "tail", "tee")

# Answers what setup.sh asks of a Python: can it make environments, make one, run pip in it.
PRETENDED_PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"import sys, venv"*) [[ "$PRETENDED_PYTHON_USABLE" == yes ]] ;;
  *python_version*) echo "Python 3.12.9" ;;
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo venv >>"$CALLS" ;;
  "-m pip --version") echo "pip 99" ;;
  "-m pip "*)
    echo "pip in $PWD: $*" >>"$CALLS"
    echo "  Downloading torch-2.14.1-cp312-x86_64.whl (555.1 MB)"
    echo "Installing collected packages: torch"
    [[ "$PIP_OUTCOME" == ok ]] || { echo "ERROR: the line is down" && exit 1; }
    ;;
  *) exit 99 ;;
esac
"""


class Checkout:
    """A copy of what setup.sh reads, with a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone with spaces"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.calls_file = folder / "calls"
        self.environment = {
            "PATH": str(self.bin),
            "HOME": str(folder / "home"),
            "CALLS": str(self.calls_file),
            "PRETENDED_PYTHON_USABLE": "yes",
            "PIP_OUTCOME": "ok",
        }

    def add_python(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PRETENDED_PYTHON.replace("/usr/bin/env bash", str(self.bin / "bash")))
        path.chmod(0o755)

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls_file.write_text("")
        return subprocess.run(
            [str(self.bin / "bash"), str(self.root / "scripts" / "setup.sh")],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    @property
    def calls(self) -> list[str]:
        return [line.split()[0] for line in self.calls_file.read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_no_python_is_one_clear_error(checkout: Checkout) -> None:
    done = checkout.setup()
    assert done.returncode == 1
    assert "no Python 3.12, 3.13 or 3.14 found on PATH or under pyenv, and no uv" in done.stderr
    assert "pyenv install 3.12" in done.stderr


def test_the_environment_is_made_once(checkout: Checkout) -> None:
    checkout.add_python(checkout.bin / "python3.12")
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    assert checkout.calls == ["venv", "pip"]
    pip = checkout.calls_file.read_text()
    assert f"in {checkout.root}: -m pip" in pip
    assert pip.endswith(
        "install --constraint constraints.txt --editable .[dev] --progress-bar off\n"
    )
    assert "downloading torch-2.14.1 (555.1 MB)" in done.stderr
    again = checkout.setup()
    assert (again.returncode, again.stderr) == (0, "[setup] environment is up to date (.venv)\n")
    assert checkout.calls == []
    assert done.stdout == again.stdout == ""


def test_a_changed_pin_is_installed_into_the_same_environment(checkout: Checkout) -> None:
    checkout.add_python(checkout.bin / "python3.12")
    checkout.setup()
    with (checkout.root / "constraints.txt").open("a") as constraints:
        constraints.write("numpy==9.9\n")
    assert checkout.setup().returncode == 0
    assert checkout.calls == ["pip"]


def test_a_moved_clone_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.add_python(checkout.bin / "python3.12")
    checkout.setup()
    checkout.root = checkout.root.rename(checkout.root.parent / "moved")
    assert checkout.setup().returncode == 0
    assert checkout.calls == ["venv", "pip"]


def test_a_failed_installation_is_told_and_taken_up_again(checkout: Checkout) -> None:
    checkout.add_python(checkout.bin / "python3.12")
    failed = checkout.setup(PIP_OUTCOME="no network")
    assert failed.returncode == 1
    assert "ERROR: the line is down" in failed.stderr
    assert "run scripts/setup.sh again" in failed.stderr
    assert checkout.setup().returncode == 0
    assert checkout.calls == ["pip"]


def test_an_unfinished_environment_is_made_anew(checkout: Checkout) -> None:
    checkout.add_python(checkout.bin / "python3.12")
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    assert checkout.setup().returncode == 0
    assert checkout.calls == ["venv", "pip"]


def test_pyenv_is_searched_where_the_path_has_only_a_dead_shim(checkout: Checkout) -> None:
    shim = checkout.bin / "python3.12"
    shim.write_text(f"#!{checkout.bin / 'bash'}\nexit 127\n")
    shim.chmod(0o755)
    python = Path(checkout.environment["HOME"]) / ".pyenv/versions/3.13.4/bin/python3"
    checkout.add_python(python)
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    assert f"Python 3.12.9 ({python})" in done.stderr


def test_uv_is_the_last_resort(checkout: Checkout) -> None:
    checkout.add_python(checkout.bin / "uv-python")
    uv = checkout.bin / "uv"
    uv.write_text(
        f"#!{checkout.bin / 'bash'}\n"
        '[[ "$*" == "venv --quiet --seed --python 3.12 "* ]] || exit 2\n'
        f'mkdir -p "$6/bin" && cp {checkout.bin / "uv-python"} "$6/bin/python"\n'
    )
    uv.chmod(0o755)
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    assert "making .venv with uv" in done.stderr
    assert checkout.calls == ["pip"]


def test_a_python_that_was_named_must_work(checkout: Checkout) -> None:
    checkout.add_python(checkout.bin / "mine")
    named = str(checkout.bin / "mine")
    assert checkout.setup(PYTHON=named).returncode == 0
    refused = checkout.setup(PYTHON=str(checkout.bin / "bash"), HOME=os.devnull)
    assert refused.returncode == 0, "an environment that is up to date needs no Python"
    shutil.rmtree(checkout.root / ".venv")
    refused = checkout.setup(PYTHON=named, PRETENDED_PYTHON_USABLE="no")
    assert refused.returncode == 1
    assert f"PYTHON={named} is not a working Python" in refused.stderr
