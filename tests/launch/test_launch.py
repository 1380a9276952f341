"""`python -m dynatrain_megatron.launch`: other people's scripts, with our flag and our plugin."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynatrain_megatron import launch
from dynatrain_megatron.cli import patch_files
from tests.ranks import TINY_LLAMA, run_ranks

FLAGS = [*TINY_LLAMA, "--use-distributed-optimizer", "--bf16"]

SHOWS = """
import sys
from pathlib import Path
assert __name__ == "__main__"
print("ARGV", sys.argv[1:])
print("FOLDER", sys.path[0] == str(Path(__file__).parent), sys.argv[0] == __file__)
"""

# Trains as a script of one's own would: through megatron.training.pretrain.
TRAINS = """
from dynatrain_megatron.plugin.pretrain_gpt import _train
if __name__ == "__main__":
    _train()
"""


def events(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "no script is named"),
        (["--lr", "1"], "the script comes first, before flags, but the first word is '--lr'"),
        (["no/such/script.py"], "'no/such/script.py' is no file"),
        (["nul\0byte.py"], "is no file"),
        ([os.devnull], "is no file"),
        ([__file__.removesuffix(".py")], "is no file"),
    ],
)
def test_wrong_usage_exits_2_and_says_why(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch.main(argv)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_help_needs_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    launch.main(["--help"])
    assert "usage: python -m dynatrain_megatron.launch SCRIPT.py" in capsys.readouterr().out


@pytest.mark.host
def test_a_script_sees_megatrons_flags_and_what_a_cpu_needs(tmp_path: Path) -> None:
    script = tmp_path / "shows.py"
    script.write_text(SHOWS)
    command = ["-m", "dynatrain_megatron.launch", str(script), "--lr", "1"]
    done = run_python(*command, "--dynatrain", "platform=cpu", f"run_dir={tmp_path}", "--bf16")
    assert done.returncode == 0, done.stderr
    assert "ARGV ['--lr', '1', '--bf16', '--distributed-backend', 'gloo'," in done.stdout
    assert "FOLDER True True" in done.stdout
    assert "shows.py has ended without training" in done.stderr
    wrong = run_python(*command, "--dynatrain", "switch_at=many")
    assert wrong.returncode == 2 and "switch_at=many is not allowed" in wrong.stderr


@pytest.mark.host
def test_a_script_of_ones_own_switches(tmp_path: Path) -> None:
    script = tmp_path / "trains.py"
    script.write_text(TRAINS)
    flags = [
        *TINY_LLAMA,
        "--use-distributed-optimizer",
        "--data-cache-path",
        str(tmp_path / "cache"),
    ]
    overrides = [f"run_dir={tmp_path}", "target=pp2", "switch_at=2"]

    def rank(_rank: int) -> None:
        launch.main([str(script), *flags, "--dynatrain", *overrides])

    run_ranks(2, rank, timeout_s=120, log_dir=tmp_path)
    assert [(event["target"], event["ok"]) for event in events(tmp_path)] == [("pp2", True)]


# -- on a real checkout --------------------------------------------------------------------------

REAL = os.environ.get("MEGATRON_LM_DIR")
real_checkout = pytest.mark.skipif(
    REAL is None, reason="MEGATRON_LM_DIR names no Megatron-LM checkout"
)
WAYS = ("launched", "patched")


def run_python(
    *words: str, timeout_s: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, check=False, timeout=timeout_s, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
    )  # fmt: skip


def copy_of_checkout(folder: Path, *, patched: bool) -> Path:
    """What a job needs of the checkout, and compiled helpers, which a checkout has not got."""
    assert REAL is not None
    for script in Path(REAL).glob("*.py"):
        shutil.copy(script, folder)
    shutil.copytree(Path(REAL) / "megatron", folder / "megatron")
    here = folder / "megatron" / "core" / "datasets"
    if not list(here.glob("helpers_cpp*.so")):
        spec = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
        assert spec is not None and spec.origin is not None
        shutil.copy(spec.origin, here)
    if patched:
        assert patch_files.apply(folder)
    for name in ("six", "regex", "pydantic") if minor_of(folder) < 17 else ():
        pytest.importorskip(name, reason=f"Megatron-LM 0.16 imports {name}, which is not here")
    return folder


def minor_of(checkout: Path) -> int:
    """Its release: 19 for core_v0.19.0."""
    said = (checkout / "megatron" / "core" / "package_info.py").read_text()
    return int(said.partition("MINOR = ")[2].split()[0])


def start(script: Path, way: str) -> list[str]:
    return ["-m", "dynatrain_megatron.launch", str(script)] if way == "launched" else [str(script)]


@real_checkout
@pytest.mark.host
@pytest.mark.parametrize("way", WAYS)
def test_help_of_a_real_script_shows_the_flag(way: str, tmp_path: Path) -> None:
    checkout = copy_of_checkout(tmp_path, patched=way == "patched")
    shown = run_python(*start(checkout / "pretrain_gpt.py", way), "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--dynatrain [OVERRIDE ...]" in shown.stdout and "--num-layers" in shown.stdout


@real_checkout
@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_real_script_switches(way: str, tmp_path: Path) -> None:
    checkout = copy_of_checkout(tmp_path, patched=way == "patched")
    run_dir = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = start(checkout / "pretrain_gpt.py", way)
    command = [
        *torchrun, *script, *FLAGS, "--data-cache-path", str(tmp_path / "cache"),
        *("--save", str(tmp_path / "saved"), "--save-interval", "4"),
        "--dynatrain", f"run_dir={run_dir}",
    ]  # fmt: skip
    done = run_python(*command, "target=pp2", "switch_at=2")
    if minor_of(checkout) < 18:  # refused before the start; without a schedule it is recorded
        assert done.returncode != 0
        assert "layouts change from megatron-core 0.18 on, and this is 0.1" in done.stderr
        done = run_python(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len((run_dir / "steps.jsonl").read_text().splitlines()) == 4
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(event["target"], event["ok"]) for event in events(run_dir)] == [("pp2", True)]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "4"
