"""`dynatrain patch`: what fits is patched and comes back to the last byte; the rest is left."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.cli import main, patch_files
from dynatrain_megatron.cli.patch_files import Index, Patch, State, blob_of, read_diff
from dynatrain_megatron.errors import ConfigError, HostMismatch

SCRIPT = b'"""Trains."""\nimport time\n\n_STARTED = time.time()\n\nimport torch\r\n# \xff end'
BLOCK = (b"\n", b"# begin\n", b"import sys\n", b"# end\n")


def made_up(after: int = 4, data: bytes = SCRIPT, file: str = "pretrain_gpt.py") -> Patch:
    return Patch("core_v0.1.0", "c" * 40, (0, 1, 0), file, blob_of(data), "x.patch", after, BLOCK)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one script, for which there is a patch, and one that needs none."""
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    info = "MAJOR = 0\nMINOR = 2\nPATCH = 3\nPRE_RELEASE = ''\n"
    (tmp_path / "megatron" / "core" / "package_info.py").write_text(info)
    (tmp_path / "pretrain_gpt.py").write_bytes(SCRIPT)
    (tmp_path / "pretrain_mamba.py").write_bytes(b"runs another\n")
    far = Patch("core_v9.0.0", "d" * 40, (9, 0, 0), "pretrain_mamba.py", "0" * 40, "y", 1, BLOCK)
    unneeded = {("pretrain_mamba.py", blob_of(b"runs another\n")): "runs another"}
    index = Index((made_up(), far), unneeded)
    monkeypatch.setattr(patch_files, "load_index", lambda: index)
    return tmp_path


def states(checkout: Path) -> dict[str, State]:
    return {script.name: script.state for script in patch_files.scripts_of(checkout)}


def test_put_in_and_taken_out_again(checkout: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    script.chmod(0o750)
    assert [changed.name for changed in patch_files.apply(checkout)] == ["pretrain_gpt.py"]
    patched = script.read_bytes()
    assert patched == SCRIPT.replace(b"time()\n", b"time()\n" + b"".join(BLOCK))
    assert states(checkout) == {
        "pretrain_gpt.py": State.patched,
        "pretrain_mamba.py": State.unneeded,
    }
    assert patch_files.apply(checkout) == [] and script.read_bytes() == patched
    assert [changed.name for changed in patch_files.remove(checkout)] == ["pretrain_gpt.py"]
    assert script.read_bytes() == SCRIPT
    assert patch_files.remove(checkout) == [] and states(checkout)[script.name] is State.original
    assert script.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in checkout.iterdir()) == [
        "megatron", "pretrain_gpt.py", "pretrain_mamba.py"
    ]  # fmt: skip


def test_what_a_user_changed_besides_stays(checkout: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    patch_files.apply(checkout)
    script.write_bytes(script.read_bytes() + b"\nmine = 1\n")
    assert states(checkout)[script.name] is State.edited
    assert patch_files.apply(checkout) == []
    patch_files.remove(checkout)
    assert script.read_bytes() == SCRIPT + b"\nmine = 1\n"
    assert states(checkout)[script.name] is State.unknown


def test_a_file_that_no_patch_fits_is_refused_and_nothing_is_changed(checkout: Path) -> None:
    strange = b"something else\n"
    (checkout / "pretrain_mamba.py").write_bytes(strange)
    with pytest.raises(HostMismatch) as caught:
        patch_files.apply(checkout)
    told = str(caught.value)
    assert (
        f"no patch fits pretrain_mamba.py (blob {blob_of(b'something else' + b'\n')[:12]})" in told
    )
    assert "megatron-core 0.2.3, and core_v0.1.0 is nearest" in told
    assert f"python -m dynatrain_megatron.launch {checkout}/pretrain_mamba.py" in told
    assert (checkout / "pretrain_gpt.py").read_bytes() == SCRIPT
    assert patch_files.apply(checkout, ["pretrain_gpt.py"])


def test_lines_that_were_damaged_are_nothing_of_ours(checkout: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    patch_files.apply(checkout)
    damaged = script.read_bytes().replace(b"import sys\n", b"import os\n")
    script.write_bytes(damaged)
    assert states(checkout)[script.name] is State.unknown
    assert patch_files.remove(checkout) == [] and script.read_bytes() == damaged


def test_a_link_stays_a_link(checkout: Path, tmp_path: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    real = tmp_path / "elsewhere.py"
    script.rename(real)
    script.symlink_to(real)
    patch_files.apply(checkout)
    assert script.is_symlink() and real.read_bytes().count(b"# begin") == 1
    patch_files.remove(checkout)
    assert real.read_bytes() == SCRIPT


@given(st.binary(), st.integers(0, 50))
def test_any_file_comes_back_to_the_last_byte(data: bytes, after: int) -> None:
    patch = made_up(min(after, data.count(b"\n")), data)
    patched = patch.put_in(data)
    if data.count(patch.block) == 0 and patched.count(patch.block) == 1:
        assert patch.take_out(patched) == data
    assert len(patched) == len(data) + len(patch.block)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["apply", "no/such/folder"], "no/such/folder has no pretrain_gpt.py"),
        (["status", "nul\0byte"], "cannot be read"),
        (["status", "/", "--only", "train.py"], "'train.py' is no script to patch"),
        (["remove", "/", "--only", "pretrain_gpt.py"], "/ has no pretrain_gpt.py"),
    ],
)
def test_what_is_no_checkout_is_one_message(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["patch", *argv]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_message(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(patch_files.os, "replace", full)
    assert main(["patch", "apply", str(checkout)]) == 1
    assert "pretrain_gpt.py cannot be written: No space left" in capsys.readouterr().err
    assert (checkout / "pretrain_gpt.py").read_bytes() == SCRIPT
    assert len(list(checkout.iterdir())) == 3


def test_the_command_tells_what_it_did(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "apply", str(checkout)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pretrain_gpt.py: patched (core_v0.1.0), patched now",
        "pretrain_mamba.py: unneeded",
    ]
    assert main(["patch", "remove", str(checkout), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scripts"][0] == {
        "file": "pretrain_gpt.py",
        "state": "original",
        "blob": blob_of(SCRIPT),
        "tag": "core_v0.1.0",
        "commit": "c" * 40,
        "patch": "x.patch",
        "changed": True,
    }


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"@@ -1,0 +2,1 @@\n",
        b"@@ -1,0 +2,1 @@\n+a\n b\n",
        b"@@ -1,0 +2,1 @@ def main():\n+a\n",
        b"@@ -1,1 +1,1 @@\n-a\n+b\n",
        b"@@ -1,0 +2,2 @@\n+a\n",
        b"@@ -1,0 +5,1 @@\n+a\n",
    ],
)
def test_a_diff_that_does_more_than_add_lines_is_no_patch(text: bytes) -> None:
    with pytest.raises(ValueError, match="hunk"):
        read_diff(text)


# -- the patches that are shipped ----------------------------------------------------------------

ROOT = Path(__file__).parents[2]
INDEX = patch_files.load_index()
RELEASES = {"core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0", "main"}


def test_all_releases_have_patches_for_the_scripts_they_have() -> None:
    found = {(patch.tag, patch.file) for patch in INDEX.patches}
    assert {tag for tag, file in found if file == "pretrain_gpt.py"} == RELEASES
    hybrid = {tag for tag, file in found if file != "pretrain_gpt.py"}
    assert hybrid == RELEASES
    assert len({patch.blob for patch in INDEX.patches}) == len(INDEX.patches)


def test_patches_hold_nothing_but_our_own_lines() -> None:
    assert len({patch.lines for patch in INDEX.patches}) == 1
    files = {path for path in (ROOT / "patches").rglob("*") if path.is_file()}
    known = {ROOT / "patches" / patch.path for patch in INDEX.patches}
    assert files - known == {ROOT / "patches" / "index.toml", ROOT / "patches" / "README.md"}
    for patch in INDEX.patches:
        lines = (ROOT / "patches" / patch.path).read_text().splitlines()
        assert lines[:2] == [f"--- a/{patch.file}", f"+++ b/{patch.file}"]
        assert re.fullmatch(r"@@ -\d+,0 \+\d+,\d+ @@", lines[2])


def test_the_lines_do_nothing_without_the_flag() -> None:
    block = INDEX.patches[0].block.decode()
    code = f"{block}\nassert 'dynatrain_megatron' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-I", "-c", code, "--lr", "1"], check=True, env=environment)


def test_the_nearest_release_is_found() -> None:
    assert patch_files.nearest((0, 18, 0)).tag == "core_v0.18.2"
    assert patch_files.nearest((0, 15, 3)).tag == "core_v0.16.1"
    assert patch_files.nearest((0, 19, 2)).tag == "core_v0.19.0"
    assert patch_files.nearest((1, 0, 0)).source.endswith("of main")


# -- on a real checkout --------------------------------------------------------------------------

REAL = os.environ.get("MEGATRON_LM_DIR")
real_checkout = pytest.mark.skipif(
    REAL is None, reason="MEGATRON_LM_DIR names no Megatron-LM checkout"
)


@real_checkout
def test_a_real_checkout_is_patched_and_restored(tmp_path: Path) -> None:
    assert REAL is not None
    before: dict[str, bytes] = {}
    for name in INDEX.files:
        source = Path(REAL) / name
        if source.is_file():
            before[name] = source.read_bytes()
            shutil.copy(source, tmp_path / name)
    assert State.unknown not in states(tmp_path).values()
    changed = patch_files.apply(tmp_path)
    assert changed
    for script in changed:
        compile(script.path.read_bytes(), script.name, "exec")
        if shutil.which("git"):
            by_git = tmp_path / "by-git"
            by_git.mkdir(exist_ok=True)
            (by_git / script.name).write_bytes(before[script.name])
            assert script.patch is not None
            subprocess.run(
                ["git", "apply", "--unidiff-zero", str(ROOT / "patches" / script.patch.path)],
                check=True, cwd=by_git,
                env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)},
            )  # fmt: skip
            assert (by_git / script.name).read_bytes() == script.path.read_bytes()
    patch_files.remove(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_config_errors_are_usage() -> None:
    with pytest.raises(ConfigError):
        patch_files.scripts_of(Path("/nowhere"))
