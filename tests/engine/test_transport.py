"""One conformance test for every transport."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynatrain_megatron.engine import LocalTransport, TorchTransport, Transport
from dynatrain_megatron.errors import TransitionError
from tests.ranks import run_ranks

Body = Callable[[Transport], Any]


def on_threads(size: int, body: Body) -> list[Any]:
    """Run ``body`` on each end of a mesh of threads; raises the first failure."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, end) for end in LocalTransport.mesh(size)]
        failed = wait(futures, return_when=FIRST_EXCEPTION).done
        for future in failed:  # the first to fail, not those that then waited for it in vain
            future.result()
        return [future.result() for future in futures]


def on_gloo(size: int, body: Body) -> list[Any]:
    """Run ``body`` on forked ranks joined by gloo."""

    def run(rank: int) -> Any:
        dist.init_process_group("gloo")
        group = dist.new_group()
        result = body(TorchTransport(group, torch.device("cpu")))
        dist.barrier()
        return result

    return run_ranks(size, run, timeout_s=60)


@pytest.mark.parametrize("run", [on_threads, on_gloo])
def test_transport_conformance(run: Callable[[int, Body], list[Any]]) -> None:
    """Order within a pair, many messages, nothing to do, and gathers of unequal lengths."""

    def body(transport: Transport) -> tuple[list[list[int]], list[bytes], list[bytes]]:
        rank, size = transport.rank, transport.size
        peers = [r for r in range(size) if r != rank and {r, rank} != {0, 2}]
        sends, receives = [], []
        for number in range(3):  # three messages a pair, in order, of different lengths
            for peer in peers:
                value = 100 + 10 * rank + number
                sends.append((peer, torch.full((number + 1,), value, dtype=torch.uint8)))
                receives.append((peer, torch.zeros(number + 1, dtype=torch.uint8)))
        transport.exchange(sends, receives, timeout_s=20)
        transport.exchange([], [], timeout_s=20)
        got = [[peer, *tensor.tolist()] for peer, tensor in receives]
        texts = transport.all_gather(b"x" * rank, timeout_s=20)
        empty = transport.all_gather(b"", timeout_s=20)
        return got, texts, empty

    results = run(3, body)
    for rank, (got, texts, empty) in enumerate(results):
        peers = [r for r in range(3) if r != rank and {r, rank} != {0, 2}]
        assert got == [
            [peer, *[100 + 10 * peer + number] * (number + 1)]
            for number in range(3)
            for peer in peers
        ]
        assert texts == [b"", b"x", b"xx"]
        assert empty == [b"", b"", b""]


def test_local_transport_times_out() -> None:
    end = LocalTransport.mesh(2)[0]
    with pytest.raises(TransitionError, match="nothing from rank 1 within"):
        end.exchange([], [(1, torch.zeros(1, dtype=torch.uint8))], timeout_s=0.05)


def test_torch_transport_names_the_ranks_of_a_failed_transfer() -> None:
    def run(rank: int) -> str:
        dist.init_process_group("gloo")
        transport = TorchTransport(dist.new_group(), torch.device("cpu"))
        if rank == 1:
            return ""  # never sends
        try:
            transport.exchange([], [(1, torch.zeros(8, dtype=torch.uint8))], timeout_s=1)
        except TransitionError as error:
            return str(error)
        return "no error"

    message = run_ranks(2, run, timeout_s=60)[0]
    assert "rank 0: transfer with ranks [1] failed" in message
