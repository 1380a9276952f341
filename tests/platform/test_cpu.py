"""What the CPU platform answers: devices, streams, random numbers, memory and unequal gathers."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynatrain_megatron import platform
from tests.ranks import run_ranks

platform.install("cpu")

import torch  # noqa: E402


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 0), "cpu"])
def test_tensors_for_any_cuda_device_are_on_the_cpu(device: object) -> None:
    made = (
        torch.zeros(2, device=device),
        torch.tensor([1.0], device=device, pin_memory=False),
        torch.empty(3, pin_memory=True),
        torch.arange(4).to(device),
        torch.arange(4).to(device=device, dtype=torch.float32),
        torch.ones(1).new_full((2,), 3.0, device=device),
        torch.randn_like(torch.ones(1), device=device),
        torch.ones(1).cuda().pin_memory(),
    )
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[4].dtype == torch.float32


def test_device_contexts_keep_working() -> None:
    with torch.device("cuda"):
        assert torch.zeros(1).device.type == "cpu"
    with torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert torch.zeros(1, device="meta").to("meta").device.type == "meta"


def test_a_thread_sees_cpu_tensors_too() -> None:
    make = platform.current().in_thread(lambda: torch.zeros(2, device="cuda").device.type)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(make).result(10) == "cpu"


def test_events_measure_time() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        time.sleep(0.02)
        end = torch.cuda.current_stream().record_event(end)
    end.synchronize()
    assert end.query() and 15 < start.elapsed_time(end) < 5000


def test_random_streams_are_separate_by_name_and_repeatable() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draws() -> list[list[float]]:
        torch.cuda.manual_seed(3)
        tracker = CudaRNGStatesTracker()
        tracker.add("one", 1)
        tracker.add("two", 2)
        out = [torch.rand(4, device="cuda").tolist()]
        for name in ("one", "two", "one"):
            with tracker.fork(name):
                out.append(torch.rand(4, device="cuda").tolist())
        return out

    first = draws()
    assert len({tuple(values) for values in first}) == 4
    assert draws() == first


def test_memory_figures_follow_the_process() -> None:
    def worker(rank: int) -> dict[str, int]:
        here = platform.current()
        here.empty_cache()
        before = here.allocated_bytes()
        block = torch.ones(256 << 20, dtype=torch.uint8)
        during = here.allocated_bytes()
        del block
        here.empty_cache()
        peak = here.peak_bytes()
        here.reset_peak()
        assert torch.cuda.memory_allocated() > 0 < torch.cuda.max_memory_reserved()
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
        return {
            "grown": during - before,
            "back": here.allocated_bytes() - before,
            "peak": peak - during,
            "peak after reset": here.peak_bytes() - during,
        }

    (seen,) = run_ranks(1, worker)
    mib = 1 << 20
    assert 240 * mib < seen["grown"] < 300 * mib
    assert seen["back"] < 48 * mib
    assert seen["peak"] > -mib
    assert seen["peak after reset"] < -200 * mib


def test_unequal_pieces_are_gathered_and_scattered() -> None:
    sizes = [3, 0, 2]

    def worker(rank: int) -> tuple[list[list[float]], list[float], list[float]]:
        dist = torch.distributed
        dist.init_process_group("gloo")
        mine = torch.full((sizes[rank], 2), float(rank + 1))
        pieces = [torch.empty(size, 2) for size in sizes]
        dist.all_gather(pieces, mine)
        total = torch.empty(sizes[rank], 2)
        dist.reduce_scatter(total, [piece * (rank + 1) for piece in pieces])
        # gloo itself takes integers only: tensors' elements, as the MoE dispatcher has them.
        counts = torch.tensor([1, 1, 1])
        swapped = torch.empty(3)
        dist.all_to_all_single(
            swapped,
            torch.arange(3.0) + 10 * rank,
            output_split_sizes=list(counts),
            input_split_sizes=list(counts),
        )
        return [piece[:, 0].tolist() for piece in pieces], total[:, 0].tolist(), swapped.tolist()

    results = run_ranks(3, worker)
    for rank, (gathered, total, swapped) in enumerate(results):
        assert gathered == [[1.0] * 3, [], [3.0] * 2]
        assert total == [6.0 * (rank + 1)] * sizes[rank]
        assert swapped == [rank, 10.0 + rank, 20.0 + rank]
