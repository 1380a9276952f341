"""The same-host transport: how it is chosen, and what becomes of its failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import (
    RingTransport,
    TorchTransport,
    Transport,
    connect,
    process_memory,
    same_host,
)
from dynatrain_megatron.errors import SwitchRefused, TransitionError
from tests.engine.test_transport import on_one_host
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def joined(choice: EngineTransport, **kwargs: Any) -> Transport:
    dist.init_process_group("gloo")
    return connect(dist.new_group(), CPU, choice, timeout_s=20, **kwargs)


def test_neighbours_are_the_other_ranks_of_the_host() -> None:
    def run(rank: int) -> tuple[list[int], list[int]]:
        transport = joined(EngineTransport.auto, host="aab"[rank])
        if rank == 2:
            assert type(transport) is TorchTransport
            return [], []
        assert isinstance(transport, same_host.SameHostTransport)
        near = transport.neighbours
        return sorted(near.processes), sorted(near.readers)

    assert run_ranks(3, run) == [([1], [1]), ([0], [0]), ([], [])]


def test_without_permission_rings_are_used_and_vm_is_refused() -> None:
    """One rank of two cannot read: the other way it still works, and ``vm`` means all or none."""

    def run(rank: int) -> tuple[bool, bool, str]:
        real = process_memory._readv

        def refuse(*args: Any) -> int:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        process_memory._readv = refuse if rank == 0 else real
        transport = joined(EngineTransport.auto)
        assert isinstance(transport, RingTransport)
        sent = torch.full((3,), rank)
        got = torch.zeros(3, dtype=torch.int64)
        transport.exchange([(1 - rank, sent)], [(1 - rank, got)], timeout_s=20)
        assert got.tolist() == [1 - rank] * 3
        (link,) = transport.links.values()
        rings = link.outgoing is not None, link.incoming is not None
        transport.close()
        try:
            connect(dist.new_group(), CPU, EngineTransport.vm, timeout_s=20)
        except SwitchRefused as refusal:
            return *rings, str(refusal)
        return *rings, "not refused"

    found = run_ranks(2, run)
    assert [rings for *rings, _ in found] == [[False, True], [True, False]]
    for *_, refusal in found:
        assert "rank 0 cannot read rank 1: [Errno 1] Operation not permitted" in refusal


def test_a_process_of_the_same_number_in_another_container_is_not_mistaken() -> None:
    kept = torch.arange(16, dtype=torch.uint8)
    right = bytes(range(16))
    assert same_host._try_to_read(os.getpid(), kept.data_ptr(), right) == ""
    problem = same_host._try_to_read(os.getpid(), kept.data_ptr(), right[::-1])
    assert problem == f"process {os.getpid()} is another one here"


def test_device_memory_cannot_be_read() -> None:
    def run(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        group = dist.new_group()
        device = torch.device("cuda", 0)
        assert type(connect(group, device, EngineTransport.auto, timeout_s=9)) is TorchTransport
        told = []
        for choice in (EngineTransport.vm, EngineTransport.memfd):
            with pytest.raises(SwitchRefused) as refusal:
                connect(group, device, choice, timeout_s=9)
            told.append(str(refusal.value))
        return told

    vm, memfd = run_ranks(1, run)[0]
    assert "engine.transport=vm is for host memory, and the state is on cuda:0" in vm
    assert "engine.transport=memfd is for host memory" in memfd


def failures(spoil: Callable[[same_host.SameHostTransport, torch.Tensor], Any]) -> list[str]:
    """What rank 0, which reads, and rank 1, which is read, are told after ``spoil`` on each."""

    def body(transport: Transport) -> str:
        assert isinstance(transport, same_host.SameHostTransport)
        tensor = torch.zeros(1 << 16)
        kept = spoil(transport, tensor)
        message = [(1 - transport.rank, tensor)]
        sends, receives = (message, []) if transport.rank else ([], message)
        try:
            transport.exchange(sends, receives, timeout_s=20)
        except TransitionError as error:
            return str(error)
        finally:
            del kept
        return "no error"

    return on_one_host(2, body)


def test_a_bad_address_fails_on_both_sides() -> None:
    def give_back_too_early(transport: Transport, tensor: torch.Tensor) -> None:
        if transport.rank == 1:
            tensor.untyped_storage().resize_(0)

    reader, sender = failures(give_back_too_early)
    assert "rank 0: reading 1 messages from rank 1 (process " in reader
    assert reader.endswith("failed: [Errno 14] Bad address")
    assert sender == "rank 0 could not read from rank 1"


def test_a_dead_process_fails_at_once() -> None:
    def take_a_dead_one(transport: same_host.SameHostTransport, tensor: torch.Tensor) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if transport.rank == 0:
            transport.neighbours.processes[1] = pid

    reader, sender = failures(take_a_dead_one)
    assert reader.endswith("failed: [Errno 3] No such process")
    assert sender == "rank 0 could not read from rank 1"
