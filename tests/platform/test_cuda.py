"""The CUDA platform on a machine that has a GPU, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynatrain_megatron.platform.cuda import CudaPlatform

PROGRAM = """
from dynatrain_megatron import platform

here = platform.install("auto")
assert (here.name, here.backend, here.device.type) == ("cuda", "nccl", "cuda")
assert here.default_flags(["--num-layers", "2"]) == []
from concurrent.futures import ThreadPoolExecutor

import torch

before = here.allocated_bytes()
block = torch.zeros(64 << 20, dtype=torch.uint8, device=here.device)
here.synchronize()
assert here.allocated_bytes() - before >= 64 << 20
del block
assert here.peak_bytes() - before >= 64 << 20
here.reset_peak()
here.empty_cache()
assert here.peak_bytes() - before < 64 << 20
last = torch.cuda.device_count() - 1
torch.cuda.set_device(last)
with ThreadPoolExecutor(1) as threads:
    assert threads.submit(here.in_thread(torch.cuda.current_device)).result(60) == last
print("all seen")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA device")
def test_the_cuda_platform_is_torch_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and "all seen" in done.stdout, done.stderr


def test_groups_made_for_a_switch_alone_end_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    here = CudaPlatform.__new__(CudaPlatform)  # needs no GPU for that
    for before in (None, "3"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        with pytest.raises(ValueError, match="on purpose"), here.only_told_of_errors():
            assert os.environ[name] == "0"
            raise ValueError("on purpose")
        assert os.environ.get(name) == before
