"""One conformance test for every transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import (
    RingTransport,
    SameHostTransport,
    TorchTransport,
    Transport,
    connect,
)
from dynatrain_megatron.errors import TransitionError
from tests.engine.late import LateTransport
from tests.engine.local import LocalTransport
from tests.ranks import run_ranks

Body = Callable[[Transport], Any]
Run = Callable[[int, Body], list[Any]]


def on_threads(size: int, body: Body, hosts: Sequence[int] | None = None) -> list[Any]:
    """Run ``body`` on each end of a mesh of threads; raises the first failure."""
    return on_ends(LocalTransport.mesh(size, hosts), body)


def on_late_threads(size: int, body: Body, hosts: Sequence[int] | None = None) -> list[Any]:
    """The same where messages are late."""
    return on_ends(LateTransport.mesh(size, hosts), body)


def on_ends(ends: Sequence[Transport], body: Body) -> list[Any]:
    """The same on these ends."""
    with ThreadPoolExecutor(len(ends)) as pool:
        futures = [pool.submit(body, end) for end in ends]
        failed = wait(futures, return_when=FIRST_EXCEPTION).done
        for future in failed:  # the first to fail, not those that then waited for it in vain
            future.result()
        return [future.result() for future in futures]


def on_ranks(
    size: int, body: Body, choice: EngineTransport, hosts: Sequence[str] | None = None
) -> list[Any]:
    """Run ``body`` on forked ranks joined by gloo, with the transport that ``choice`` means.

    ``hosts`` are where the ranks are said to be.
    """

    def run(rank: int) -> Any:
        dist.init_process_group("gloo")
        group = dist.new_group()
        transport = connect(
            group,
            torch.device("cpu"),
            choice,
            timeout_s=20,
            host=None if hosts is None else hosts[rank],
        )
        alone = hosts is not None and hosts.count(hosts[rank]) == 1
        assert type(transport) is (TorchTransport if alone else _TYPES[choice])
        result = body(transport)
        dist.barrier()
        transport.close()
        return result

    return run_ranks(size, run, timeout_s=60)


_TYPES = {
    EngineTransport.torch: TorchTransport,
    EngineTransport.vm: SameHostTransport,
    EngineTransport.memfd: RingTransport,
}

on_gloo = partial(on_ranks, choice=EngineTransport.torch)
on_one_host = partial(on_ranks, choice=EngineTransport.vm)
on_two_hosts = partial(on_ranks, choice=EngineTransport.vm, hosts=["a", "b", "a", "b"])
on_rings = partial(on_ranks, choice=EngineTransport.memfd)
on_rings_of_two_hosts = partial(on_ranks, choice=EngineTransport.memfd, hosts=["a", "b", "a", "b"])

TRANSPORTS: dict[str, Run] = {
    "threads": on_threads,
    "threads that read": partial(on_threads, hosts=[0, 1, 0, 1]),
    "late": on_late_threads,
    "late, that read": partial(on_late_threads, hosts=[0, 1, 0, 1]),
    "gloo": on_gloo,
    "one host": on_one_host,
    "two hosts": on_two_hosts,
    "rings": on_rings,
    "rings of two hosts": on_rings_of_two_hosts,
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transport_conformance(name: str) -> None:
    """Order within a pair, windows that overlap, dtypes, rows, and gathers of unequal lengths."""
    size = 4

    def value(src: int, dst: int, number: int) -> int:
        return 100 * src + 10 * dst + number

    def body(transport: Transport) -> tuple[list[bytes], list[bytes]]:
        rank = transport.rank
        peers = [r for r in range(size) if r != rank and {r, rank} != {0, 2}]
        transfers, received = [], []
        for number in range(4):  # windows of their own for each pair: not all have all of them
            sends, receives = [], []
            for peer in (p for p in peers if (p + rank + number) % 3):
                sends.append((peer, message(transport.terms(peer, sending=True), number)))
                sends[-1][1].fill_(value(rank, peer, number))
                receives.append((peer, message(transport.terms(peer, sending=False), number)))
                sends.append((peer, torch.full((), value(rank, peer, -1), dtype=torch.int64)))
                # Bytes count, not dtypes.
                receives.append((peer, torch.zeros(8, dtype=torch.uint8)))
            transfers.append(transport.start(sends, receives))
            received += [(peer, number, tensor) for peer, tensor in receives]
            if number:
                transfers[number - 1].wait(timeout_s=20)
        transfers[-1].wait(timeout_s=20)
        transport.exchange([], [], timeout_s=20)
        for peer, number, tensor in received:
            expected = value(peer, rank, -1 if tensor.dtype == torch.uint8 else number)
            values = tensor.view(torch.int64) if tensor.dtype == torch.uint8 else tensor
            assert (values == expected).all(), (peer, number, values)
        return transport.all_gather(b"x" * rank, timeout_s=20), transport.all_gather(
            b"", timeout_s=20
        )

    def message(terms: Any, number: int) -> torch.Tensor:
        """Of ``number`` + 1 rows, between other columns if the transport can do that."""
        row = 2048
        assert terms.part_bytes <= 1 << 20
        table = torch.zeros(number + 1, 3 * row, dtype=torch.float32)
        rows = table[:, row : 2 * row]
        return rows if terms.fit(rows) else rows.contiguous()

    for texts, empty in TRANSPORTS[name](size, body):
        assert texts == [b"", b"x", b"xx", b"xxx"]
        assert empty == [b"", b"", b"", b""]


def test_local_transport_times_out() -> None:
    end = LocalTransport.mesh(2)[0]
    with pytest.raises(TransitionError, match="nothing from rank 1 within"):
        end.exchange([], [(1, torch.zeros(1, dtype=torch.uint8))], timeout_s=0.05)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (on_gloo, "rank 0: transfer with ranks [1] failed"),
        (on_one_host, "rank 0: reading 1 messages from rank 1 failed"),
        (on_rings, "rank 0: nothing has come from ranks [1] or been taken by them for 1 s"),
    ],
    ids=["gloo", "one host", "rings"],
)
def test_a_transfer_that_times_out_names_the_ranks(run: Run, message: str) -> None:
    def body(transport: Transport) -> str:
        if transport.rank == 1:
            return ""  # never sends
        try:
            transport.exchange([], [(1, torch.zeros(8, dtype=torch.uint8))], timeout_s=1)
        except TransitionError as error:
            return str(error)
        return "no error"

    def failing(transport: Transport) -> str:
        found = body(transport)
        dist.barrier()
        return found

    assert message in run(2, failing)[0]
