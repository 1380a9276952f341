"""The contract with torch and Megatron: every name the platforms replace exists."""

import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from dynatrain_megatron import platform
from dynatrain_megatron.errors import HostMismatch, PlatformError
from dynatrain_megatron.platform.replace import Replacement, apply
from tests.ranks import run_ranks

# Factories of torch that Megatron does not use; one that is neither here nor in the table is new.
UNUSED_FACTORIES = {
    *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window"),
    *("empty_permuted", "empty_quantized", "fft_fftfreq", "fft_rfftfreq", "nested_tensor", "range"),
    *("sparse_coo_tensor", "sparse_compressed_tensor", "sparse_csr_tensor", "sparse_csc_tensor"),
    *("sparse_bsr_tensor", "sparse_bsc_tensor"),
}

# What Megatron names in torch.cuda and a CPU rank does not reach, or can use as it is.
LEFT_ALONE = {
    "CUDA graphs": {"CUDAGraph", "graph", "graph_pool_handle"},
    "memory pools and snapshots": {"MemPool", "use_mem_pool", "memory", "memory_snapshot"},
    "profiling and telemetry": {
        *("cudart", "check_error", "profiler", "power_draw", "temperature", "utilization"),
        *("clock_rate", "_sleep"),
    },
    "streams of other libraries": {"ExternalStream"},
    "types that exist without CUDA": {
        *("FloatTensor", "HalfTensor", "BFloat16Tensor", "OutOfMemoryError", "amp"),
    },
    "modules whose members are in the table": {"nvtx", "random"},
}


def tables() -> list[Replacement]:
    platform.install("cpu")
    from dynatrain_megatron.platform import cpu, host
    from dynatrain_megatron.platform.versions import megatron_release

    release = megatron_release()
    return [*cpu.CPU_TABLE, *(row for row in host.HOST_TABLE if release in row.releases)]


@pytest.mark.host
def test_every_target_exists_and_is_listed_once_with_a_reason() -> None:
    rows = tables()
    for row in rows:
        row.locate()
        assert len(row.reason) > 10, row
    assert [name for name, count in Counter(row.target for row in rows).items() if count > 1] == []


@pytest.mark.host
def test_every_factory_of_torch_is_replaced_or_known_to_be_unused() -> None:
    targets = {row.target.removeprefix("torch.") for row in tables()}
    import torch

    factories = {f.__name__ for f in torch.utils._device._device_constructors()}
    assert factories - targets == UNUSED_FACTORIES
    methods = {name for name in dir(torch.Tensor) if name.startswith("new_")}
    assert methods - {t.removeprefix("Tensor.") for t in targets} == set()


@pytest.mark.host
def test_every_name_of_torch_cuda_in_megatron_is_replaced_or_left_alone_on_purpose() -> None:
    targets = {row.target for row in tables()}
    import megatron.core

    root = Path(megatron.core.__file__).parent
    used: set[str] = set()
    for source in (*root.rglob("*.py"), *(root.parent / "training").rglob("*.py")):
        # The inference engine is not for training, and FSDP is refused.
        if not {"inference", "fsdp"} & set(source.parts):
            used.update(re.findall(r"\btorch\.cuda\.(\w+)", source.read_text()))
    replaced = {t.split(".")[2] for t in targets if t.startswith("torch.cuda.")}
    assert used - replaced - set().union(*LEFT_ALONE.values()) == set()


def test_a_missing_target_is_named_and_nothing_is_replaced() -> None:
    module = types.ModuleType("dynatrain_test_host")
    module.present = old = object()  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        rows = [
            Replacement(f"{module.__name__}.{name}", "it stands in the way", lambda _: "new")
            for name in ("present", "renamed")
        ]
        with pytest.raises(HostMismatch, match=r"dynatrain_test_host\.renamed .*in the way"):
            apply(rows)
        assert module.present is old
        applied = apply(rows[:1])
        assert module.present == "new"
        applied.undo()
        assert module.present is old
    finally:
        del sys.modules[module.__name__]


def test_uninstall_puts_every_name_back() -> None:
    def worker(rank: int) -> tuple[int, int]:
        before = list(platform._applied)
        platform.uninstall()
        rows = 0
        for applied in before:
            for row in applied.rows:
                owner, name = row.locate()
                left = vars(owner).get(name, applied.originals[row.target])
                assert left is applied.originals[row.target], row
                rows += 1
        with pytest.raises(PlatformError, match="no platform is installed"):
            platform.current()
        return rows, len(before)

    assert run_ranks(1, worker) == [(len(tables()), 2)]


def test_install_is_idempotent_and_keeps_to_one_platform() -> None:
    installed = platform.install("cpu")
    assert platform.install("auto") is platform.install("cpu") is platform.current() is installed
    with pytest.raises(PlatformError, match="after platform=cpu"):
        platform.install("cuda")
    with pytest.raises(PlatformError, match="'tpu' is unknown; choose one of auto, cuda, cpu"):
        platform.install("tpu")


def test_install_refuses_to_come_after_megatron() -> None:
    def worker(rank: int) -> None:
        platform.uninstall()
        with pytest.raises(PlatformError, match="before Megatron is imported"):
            platform.install("cpu")

    run_ranks(1, worker)


def run_python(program: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_users_environment_stays() -> None:
    program = (
        "import os, sys; from dynatrain_megatron import platform; platform._set_cpu_environment();"
        "assert 'torch' not in sys.modules;"
        "print(os.environ['THP_MEM_ALLOC_ENABLE'], os.environ['OMP_NUM_THREADS'])"
    )
    assert run_python(program, OMP_NUM_THREADS="3") == ["1", "3"]


@pytest.mark.host
@pytest.mark.skipif(
    "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this kernel has huge pages switched off",
)
@pytest.mark.parametrize(
    "start",
    [
        "import torch; from dynatrain_megatron import platform; platform._set_cpu_environment();",
        # What scripts/pretrain_gpt.py does in each process that torchrun starts.
        "from dynatrain_megatron.plugin import entry; entry.prepare([]);",
    ],
    ids=["torch is imported already", "the training script"],
)
def test_tensors_lie_in_huge_pages(start: str) -> None:
    program = (
        f"{start} import torch;"
        "block = torch.ones(64 << 20, dtype=torch.uint8);"
        "print([line for line in open('/proc/self/smaps_rollup') if 'AnonHuge' in line][0])"
    )
    assert int(run_python(program)[-2]) >= 48 << 10  # KiB
