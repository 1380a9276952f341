"""What is shipped: a source archive that a wheel can be made of, and the wheel in a clean place."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from dynatrain_megatron import __version__

ROOT = Path(__file__).parents[2]

pytest.importorskip("hatchling", reason="hatchling, of the extra dev, builds the packages")


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    # Neither the repository nor what an editable installation puts in the path.
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True, text=True, check=False, timeout=120, cwd=cwd,
        env={**plain, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    hatchling = Path(__import__("hatchling").__file__).parents[1]
    run(
        *(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out),
        cwd=source,
        PYTHONPATH=str(hatchling),
    )
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the archive, as whoever builds from source does."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it; torch and the like are those of this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=folder)
    own = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).strip()
    # Their files are found; the .pth files among them, such as of an editable project, do nothing.
    (Path(own) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_the_wheel_has_all_files_and_no_others(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "dynatrain_megatron"
    ours = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    patches = {
        f"dynatrain_megatron/{path.relative_to(ROOT)}"
        for path in (ROOT / "patches").rglob("*")
        if path.is_file()
    }
    info = f"dynatrain_megatron-{__version__}.dist-info"
    assert {name for name in names if not name.startswith(info)} == ours | patches
    assert {"dynatrain_megatron/py.typed", f"{info}/licenses/LICENSE"} <= names


def test_the_archive_has_what_a_reader_needs(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    wanted = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "scripts/setup.sh"}
    assert wanted | {"patches/index.toml", "tests/conftest.py", "docs/checkouts.md"} <= names
    assert not [name for name in names if name.startswith(".ci")]


@pytest.mark.host
def test_the_wheel_works_without_the_repository(clean: Path, tmp_path: Path) -> None:
    dynatrain = clean / "bin" / "dynatrain"
    where = run(
        clean / "bin" / "python", "-c", "import dynatrain_megatron as d; print(d.__file__)",
        cwd=tmp_path,
    )  # fmt: skip
    assert Path(where.strip()).is_relative_to(clean)
    assert run(dynatrain, "--version", cwd=tmp_path) == f"dynatrain-megatron {__version__}\n"
    assert "doctor" in run(dynatrain, "--help", cwd=tmp_path)
    found = json.loads(run(dynatrain, "doctor", "--json", cwd=tmp_path))
    assert found["ok"] is True and "change the layout of a job" in found["works"]
    (tmp_path / "pretrain_gpt.py").write_text("import time\n")
    assert "unknown" in run(dynatrain, "patch", "status", tmp_path, cwd=tmp_path)
