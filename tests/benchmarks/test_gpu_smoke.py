"""benchmarks/gpu_smoke: it runs, its oracle can fail, and without a GPU it says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_smoke
from benchmarks.gpu_smoke import REHEARSAL, Mismatch

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so_and_ends_well() -> None:
    if any(Path("/dev").glob("nvidia*")):
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu_smoke.sh"], capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout[:15]) == (0, "No CUDA device:"), done.stderr


def test_a_rehearsal_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    argv = ["gpu_smoke", "--rehearse", "--parts", "bandwidth", "streams", "staged"]
    monkeypatch.setattr(sys, "argv", [*argv, "--out", str(out)])
    assert gpu_smoke.main() == 0
    told = capsys.readouterr().out
    assert "run 1: every element equal" in told and "pp to tp: every element equal" in told
    found = json.loads(out.read_text())
    assert set(found["parts"]) == {"bandwidth", "streams", "staged"}
    assert all(part["failure"] is None for part in found["parts"].values())


def test_one_wrong_element_is_found() -> None:
    fragments = gpu_smoke.bind(REHEARSAL, "tp", 1, CPU, filled=True)
    gpu_smoke.check(REHEARSAL, "tp", 1, fragments)
    fragments.views[5][1].view(-1)[-1] += 1
    with pytest.raises(Mismatch, match="rank 1: 1 of "):
        gpu_smoke.check(REHEARSAL, "tp", 1, fragments)


def test_values_are_those_of_the_whole_tensor_and_differ() -> None:
    tensor, _, _ = gpu_smoke.tensors(REHEARSAL)[0]
    whole = gpu_smoke.Region.whole(tensor.shape)
    part = gpu_smoke.Region((8, 0), (16, tensor.shape[1]))
    for k in range(len(tensor.states)):
        full = gpu_smoke.values(tensor, k, whole, CPU)
        assert torch.equal(gpu_smoke.values(tensor, k, part, CPU), full[8:16])
        assert len(full.unique()) == min(full.numel(), gpu_smoke.MODULUS[tensor.states[k].dtype])


def test_a_part_that_fails_is_told_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_args: object) -> list[gpu_smoke.Line]:
        raise Mismatch("element 7 is wrong")

    monkeypatch.setitem(gpu_smoke.PARTS, "streams", broken)
    monkeypatch.setattr(sys, "argv", ["gpu_smoke", "--rehearse", "--parts", "streams", "bandwidth"])
    assert gpu_smoke.main() == 1
    told = capsys.readouterr().out
    assert "streams (FAILED" in told and "Mismatch: element 7 is wrong" in told
    assert "plain copy" in told
