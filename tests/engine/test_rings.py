"""Rings between processes: links end to end, how ranks meet, and what becomes of failures."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import RingTransport, TorchTransport, Transport, connect, meeting
from dynatrain_megatron.engine.link import Link, Stream
from dynatrain_megatron.engine.ring import NUM_SLOTS, Ring, slot_bytes
from dynatrain_megatron.errors import SwitchRefused, TransitionError
from tests.engine.test_process_memory import content, views
from tests.engine.test_transport import on_rings
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SLOT = 16


def linked(slot: int = SLOT) -> tuple[Link, Link]:
    """Both ends of a link, in this process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rings = [Ring.create(slot) for _ in ends]
    copies = [Ring(os.dup(ring.fd), slot) for ring in rings]
    return Link(1, ends[0], rings[0], copies[1]), Link(0, ends[1], rings[1], copies[0])


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for as many bytes, of another shape and with gaps."""
    return torch.zeros(max(1, tensor.nbytes), 3, dtype=torch.uint8)[: tensor.nbytes, 1]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.lists(views(), min_size=1, max_size=3)), max_size=5),
    st.randoms(use_true_random=False),
)
def test_streams_arrive_whatever_their_forms_and_whoever_is_quicker(
    sent: list[tuple[bool, list[torch.Tensor]]], random: Random
) -> None:
    ends = linked()
    streams, received = [], []
    for forth, tensors in sent:
        sender, receiver = ends if forth else ends[::-1]
        received.append([like(tensor) for tensor in tensors])
        streams += [Stream(tensors), Stream(received[-1])]
        sender.write(streams[-2])
        receiver.read(streams[-1])
    for _ in range(10_000):
        if all(stream.is_done for stream in streams):
            break
        end = random.choice(ends)
        end.hear()
        end.step()
    for (_, tensors), got in zip(sent, received, strict=True):
        assert [content(t) for t in got] == [content(t) for t in tensors]
    assert not any(end.is_wanted for end in ends)
    for end in ends:
        end.close()


def test_a_writer_is_no_more_slots_ahead_than_there_are() -> None:
    here, there = linked()
    data = torch.arange(10 * SLOT, dtype=torch.uint8)
    stream = Stream([data])
    here.write(stream)
    while here.step():
        pass
    assert stream.at == NUM_SLOTS * SLOT
    got = torch.zeros_like(data)
    there.read(Stream([got]))
    while there.is_wanted:
        for end in (there, here):
            end.hear()
            end.step()
    assert torch.equal(got, data)


def test_what_was_written_before_the_end_is_still_read() -> None:
    here, there = linked()
    data, got = torch.arange(SLOT, dtype=torch.uint8), torch.zeros(SLOT, dtype=torch.uint8)
    here.write(Stream([data]))
    here.step()
    here.close()
    there.hear()
    there.read(Stream([got]))
    there.step()
    assert torch.equal(got, data)
    there.read(Stream([got]))
    with pytest.raises(TransitionError, match="rank 0 has ended or given up"):
        there.step()


def test_streams_of_different_lengths_are_noticed() -> None:
    here, there = linked()
    here.write(Stream([torch.zeros(7, dtype=torch.uint8)]))
    here.step()
    there.hear()
    there.read(Stream([torch.zeros(8, dtype=torch.uint8)]))
    with pytest.raises(TransitionError, match="expected 8 bytes from rank 0, got 7"):
        there.step()


@pytest.mark.parametrize("forth", [True, False], ids=["writing", "reading"])
def test_a_killed_process_is_noticed(forth: bool) -> None:
    here, there = linked()
    pid = os.fork()
    if pid == 0:
        here.socket.close()
        time.sleep(60)
        os._exit(0)
    there.socket.close()  # the other process has it now
    stream = Stream([torch.zeros(100 * SLOT, dtype=torch.uint8)])
    (here.write if forth else here.read)(stream)
    while here.step():
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    here.hear()
    with pytest.raises(TransitionError, match="rank 1 has ended"):
        here.step()


@given(st.integers(1, 1 << 30), st.integers(1, 200))
def test_rings_share_what_memory_there_may_be(ring_bytes: int, num_rings: int) -> None:
    size = slot_bytes(ring_bytes, num_rings)
    taken = NUM_SLOTS * num_rings * size
    assert size % 4096 == 0 and size <= 1 << 20
    assert taken <= max(ring_bytes, NUM_SLOTS * num_rings * 4096)


def joined(choice: EngineTransport, **kwargs: Any) -> Transport:
    dist.init_process_group("gloo")
    return connect(dist.new_group(), CPU, choice, timeout_s=20, **kwargs)


def swap(transport: Transport, numel: int = 1 << 18) -> bool:
    """Whether what this rank and its neighbour send each other arrives."""
    peer = transport.rank ^ 1
    sent, got = (torch.full((numel,), rank) for rank in (transport.rank, -1))
    transport.exchange([(peer, sent)], [(peer, got)], timeout_s=20)
    return bool((got == peer).all())


def test_nothing_is_left_after_close() -> None:
    def run(rank: int) -> tuple[int, int, int]:
        dist.init_process_group("gloo")
        group = dist.new_group()
        counts = []
        for _ in range(3):
            transport = connect(group, CPU, EngineTransport.memfd, timeout_s=20, ring_bytes=1 << 16)
            assert swap(transport)
            assert transport.held_bytes == (1 << 16) // 3 // 2 // 4096 * 4096 * 2 * 3
            transport.close()
            transport.close()
            counts.append(len(os.listdir("/proc/self/fd")))
        return tuple(counts)

    for counts in run_ranks(4, run):
        assert len(set(counts)) == 1


def test_one_that_gives_up_wakes_the_others_and_stays_so() -> None:
    def body(transport: Transport) -> tuple[float, list[str]]:
        if transport.rank == 1:
            transport.close()
        begin, told = time.monotonic(), []
        for _ in range(2):
            try:
                swap(transport)
            except TransitionError as error:
                told.append(str(error))
        return time.monotonic() - begin, told

    found = on_rings(2, body)
    for seconds, told in found:
        assert seconds < 10 and len(told) == 2
    assert found[0][1][0] == "rank 0: rank 1 has ended or given up"
    assert "rank 0: an earlier transfer failed: rank 1 has ended" in found[0][1][1]
    assert "the transport is closed" in found[1][1][0]


def test_strangers_are_not_let_in() -> None:
    def run(rank: int) -> bool:
        real = meeting._call

        def with_strangers(name: str, timeout_s: float) -> socket.socket:
            for hello in (b"", b"hello", meeting._HELLO.pack(1, SLOT, bytes(16))):
                with real(name, timeout_s) as stranger:
                    stranger.send(hello)
            return real(name, timeout_s)

        meeting._call = with_strangers
        transport = joined(EngineTransport.memfd)
        assert isinstance(transport, RingTransport)
        done = swap(transport)
        transport.close()
        return done

    assert run_ranks(2, run) == [True, True]


def refuse(*args: Any) -> Any:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (
            (Ring, "create"),
            "rank 0 cannot make a ring for rank 1: [Errno 1] Operation not permitted",
        ),
        ((meeting, "_call"), "rank 1 cannot connect to rank 0: [Errno 1]"),
        ((meeting._Meeting, "_hear"), "rank 0 cannot let in who has connected: [Errno 1]"),
    ],
    ids=["no memory file", "no socket", "no passing"],
)
def test_where_rings_are_impossible_messages_go_through_torch_and_memfd_is_refused(
    where: tuple[Any, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*where, refuse)
    monkeypatch.setattr("dynatrain_megatron.engine.process_memory._readv", refuse)

    def run(rank: int) -> str:
        dist.init_process_group("gloo")
        group = dist.new_group()
        transport = connect(group, CPU, EngineTransport.auto, timeout_s=8)
        assert type(transport) is TorchTransport
        assert swap(transport)
        with pytest.raises(SwitchRefused) as refusal:
            connect(group, CPU, EngineTransport.memfd, timeout_s=8)
        return str(refusal.value)

    told = set(run_ranks(2, run))
    assert len(told) == 1
    assert "engine.transport=memfd: rank 0 shares no ring with rank 1" in told.copy().pop()
    assert reason in told.pop()
