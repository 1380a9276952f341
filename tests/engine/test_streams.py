"""Copies on streams that run as late, or as early, as their order allows.

A stream here is a list of calls that nobody makes before something waits for them, or that are
made at once whatever other streams have still to do. So a wait that is missing shows as state that
is wrong.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dynatrain_megatron.engine import (
    ExecutionReport,
    Fragments,
    bind_plan,
    execute,
    streams,
)
from dynatrain_megatron.engine.streams import CudaStreams, Streams, streams_for
from dynatrain_megatron.engine.transport import Message, Terms, Transfer, Transport
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner import PlanOptions
from dynatrain_megatron.vps import LogicalTensor, Region, RosterBuilder, State, StateKind
from tests.engine.local import LocalTransport
from tests.engine.test_execute import TENSORS, assert_holds_its_values, bind, topology_of
from tests.engine.test_transport import on_threads
from tests.planner.worlds import Case, irregular_cases, mixed_cases, shared_cases

CPU = torch.device("cpu")


class QueuedEvent:
    """All that was on a stream at some time; ``query`` is the host's only way to wait for it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: QueuedStream | None = None

    def record(self, stream: QueuedStream) -> None:
        self.stream, self.length = stream, len(stream.calls)

    def query(self) -> bool:
        if self.stream is not None:
            self.stream.run(self.length)
        return True

    def elapsed_time(self, end: QueuedEvent) -> float:
        assert self.stream is end.stream
        return 1e3  # ms


class QueuedStream:
    """Calls in order, each made when something waits for it, or at once if ``is_eager``."""

    def __init__(self, is_eager: bool) -> None:
        self.calls: list[Callable[[], object]] = []
        self.num_done = 0
        self._is_eager = is_eager

    def add(self, call: Callable[[], object]) -> None:
        self.calls.append(call)
        if self._is_eager:
            self.run(len(self.calls))

    def run(self, length: int) -> None:
        while self.num_done < length:
            self.num_done += 1
            self.calls[self.num_done - 1]()

    def wait_event(self, event: QueuedEvent) -> None:
        self.calls.append(event.query)

    def wait_stream(self, stream: QueuedStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> QueuedEvent:
        event = QueuedEvent()
        event.record(self)
        return event


class QueuedCuda(threading.local):
    """Stands for ``torch.cuda`` in one thread, and for the copies it would queue.

    ``eager`` streams are those for the wire, the current one, and those that are made.
    """

    Event = QueuedEvent

    def __init__(self, eager: Sequence[bool] = (False,) * 4) -> None:
        self.restart(eager)

    def restart(self, eager: Sequence[bool]) -> None:
        """Nothing is queued: the thread may have been another rank's before."""
        self.wire, *self._spare = map(QueuedStream, eager)
        self.made = [self._spare.pop(0)]
        self.inside: list[QueuedStream] = []
        self.num_host_copies = 0

    def Stream(self, device: torch.device) -> QueuedStream:
        self.made.append(self._spare.pop(0))
        return self.made[-1]

    def current_stream(self, device: torch.device) -> QueuedStream:
        return self.made[0]

    @contextlib.contextmanager
    def stream(self, stream: QueuedStream) -> Iterator[None]:
        self.inside.append(stream)
        yield
        self.inside.pop()

    def copy(self, to: Sequence[torch.Tensor], of: Sequence[torch.Tensor], _: bool) -> None:
        def call() -> None:
            for a, b in zip(to, of, strict=True):
                a.copy_(b)

        if self.inside:
            self.inside[-1].add(call)
        else:
            self.num_host_copies += 1
            call()


class Queued(Transport):
    """A transport whose transfers are queued, and do not reach bf16."""

    def __init__(self, ends: LocalTransport, cuda: QueuedCuda) -> None:
        self.rank, self.size, self.device = ends.rank, ends.size, ends.device
        self._ends, self._cuda = ends, cuda

    def terms(self, peer: int, *, sending: bool) -> Terms:
        return self._ends.terms(peer, sending=sending)

    def reaches(self, view: torch.Tensor) -> bool:
        return view.dtype != torch.bfloat16

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        self._cuda.wire.wait_stream(self._cuda.made[0])
        self._cuda.wire.add(lambda: self._ends.exchange(sends, receives, timeout_s=3))
        return _Queued(self._cuda.made[0], self._cuda.wire.record_event())

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        return self._ends.all_gather(data, timeout_s=timeout_s)


class _Queued(Transfer):
    def __init__(self, current: QueuedStream, done: QueuedEvent) -> None:
        self._current, self._done = current, done

    def wait(self, *, timeout_s: float) -> None:
        self._current.wait_event(self._done)


class Ran(NamedTuple):
    """What a rank's execution did, and how often the host copied."""

    report: ExecutionReport
    num_host_copies: int


def run_queued(case: Case, staging: int, eager: Sequence[bool], window_ops: int = 256) -> list[Ran]:
    """A transition on queued streams, its source written on one of them too."""
    plan = case.plan(topology_of([0] * 5, len(case.before)), PlanOptions(staging, window_ops))
    source = [bind(roster, filled=False) for roster in case.before]
    values = [bind(roster, filled=True) for roster in case.before]
    target = [bind(roster, filled=False) for roster in case.after]
    cuda = QueuedCuda()

    def body(ends: Transport) -> Ran:
        assert isinstance(ends, LocalTransport)
        rank = ends.rank
        cuda.restart(eager)
        transport = Queued(ends, cuda)
        bound = bind_plan(plan, source[rank], target[rank], transport, timeout_s=3)
        for to, of in zip(source[rank].views, values[rank].views, strict=True):
            for a, b in zip(to, of, strict=True):
                if transport.reaches(a):
                    with cuda.stream(cuda.made[0]):
                        cuda.copy([a], [b], True)
                else:
                    a.copy_(b)
        report = execute(plan, source[rank], target[rank], transport, timeout_s=3, bound=bound)
        assert_holds_its_values(target[rank])
        assert_holds_its_values(source[rank])
        assert report.peak_staging_bytes <= plan.peak_staging_bytes(rank)
        assert report.pinned_bytes <= report.peak_staging_bytes
        return Ran(report, cuda.num_host_copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "cuda", cuda)
        patch.setattr(torch, "_foreach_copy_", cuda.copy)
        patch.setattr(sys.modules[execute.__module__], "streams_for", CudaStreams)
        return on_threads(plan.num_ranks, body)


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(mixed_cases(TENSORS), irregular_cases(), shared_cases(5)),
    st.sampled_from([100, 400, 1 << 20]),
    st.tuples(*[st.booleans()] * 4),
    st.sampled_from([3, 256]),
)
def test_every_element_arrives_whenever_copies_are_done(
    case: Case, staging: int, eager: Sequence[bool], window_ops: int
) -> None:
    run_queued(case, staging, eager, window_ops)


def test_state_in_host_memory_takes_pinned_memory_and_the_host_copies_it() -> None:
    reports = [
        run_queued(case, 400, (False,) * 4) for case in (moved("float32"), moved("bfloat16"))
    ]
    (near, _), (far, _) = reports
    assert near.report.pinned_bytes == 0 < near.report.pack_s
    assert near.num_host_copies == 0 < far.num_host_copies
    assert 0 < far.report.pinned_bytes == far.report.peak_staging_bytes


def moved(dtype: str) -> Case:
    """All of a tensor, in many windows, from rank 0 to rank 1."""
    before, after = RosterBuilder(), RosterBuilder()
    tensor = LogicalTensor("bias", (600,), (State(StateKind.MAIN_PARAM, dtype),))
    before.add(tensor, Region.whole(tensor.shape))
    after.add(tensor, Region.whole(tensor.shape))
    nothing = RosterBuilder().build()
    return Case((before.build(), nothing), (nothing, after.build()))


def test_nothing_is_under_way_on_streams_of_our_own_when_a_transfer_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = QueuedCuda()
    done: list[int] = []
    monkeypatch.setattr(streams, "cuda", cuda)
    with pytest.raises(TransitionError, match="lost"), CudaStreams(CPU, 3) as running:
        for number, stream in enumerate(cuda.made):
            stream.add(partial(done.append, number))
        raise TransitionError("lost")
    assert sorted(done) == [1, 2]  # not the current stream, which may wait for what was lost
    cuda.made[0].run(1)
    running.finish()


def test_the_host_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cuda", QueuedCuda())
    monkeypatch.setattr(QueuedEvent, "query", lambda _: False)
    with pytest.raises(TransitionError, match=r"not done within 0.01 s"):
        CudaStreams(CPU, 0.01).finish()


def test_transports_reach_memory_of_their_own_kind_and_only_gpus_need_streams() -> None:
    (transport,) = LocalTransport.mesh(1)
    assert transport.reaches(torch.empty(1))
    assert not transport.reaches(torch.empty(1, device="meta"))
    assert type(streams_for(CPU, 1)) is Streams


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA device")
@settings(max_examples=40, deadline=None)
@given(mixed_cases(TENSORS), st.sampled_from([100, 1 << 20]))
def test_every_element_arrives_on_a_gpu_and_beside_it(case: Case, staging: int) -> None:
    plan = case.plan(options=PlanOptions(staging))
    source = [on_gpu(bind(roster, filled=True)) for roster in case.before]
    target = [on_gpu(bind(roster, filled=False)) for roster in case.after]

    def body(transport: Transport) -> None:
        execute(plan, source[transport.rank], target[transport.rank], transport, timeout_s=20)
        assert_holds_its_values(on_cpu(target[transport.rank]))

    ends = LocalTransport.mesh(plan.num_ranks)
    for end in ends:
        end.device = torch.device("cuda", 0)
    with ThreadPoolExecutor(plan.num_ranks) as pool:
        list(pool.map(body, ends))


def on_gpu(fragments: Fragments) -> Fragments:
    """The same with all but bf16 on a GPU."""
    return moved_to("cuda", fragments, lambda view: view.dtype != torch.bfloat16)


def on_cpu(fragments: Fragments) -> Fragments:
    return moved_to("cpu", fragments, lambda _: True)


def moved_to(
    device: str, fragments: Fragments, chosen: Callable[[torch.Tensor], bool]
) -> Fragments:
    views = [[view.to(device) if chosen(view) else view for view in v] for v in fragments.views]
    return Fragments(fragments.roster, tuple(map(tuple, views)))
