"""Copies on streams that run as late, or as early, as their order allows.

A stream here is a list of calls that nobody makes before something waits for them, but by chance.
So a wait that is missing shows as state that is wrong.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dynatrain_megatron.engine import ExecutionReport, LocalTransport, bind_plan, execute, streams
from dynatrain_megatron.engine.streams import Copies, CudaStreams, Streams, streams_for
from dynatrain_megatron.engine.transport import Message, Terms, Transfer, Transport
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner import PlanOptions
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
    """Calls in order, each made when something waits for it, or at once with ``eagerness``."""

    def __init__(self, eagerness: float = 0.0, seed: int = 0) -> None:
        self.calls: list[Callable[[], object]] = []
        self.num_done = 0
        self._eagerness = eagerness
        self._random = Random(seed)

    def add(self, call: Callable[[], object]) -> None:
        self.calls.append(call)
        if self._random.random() < self._eagerness:
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
    """Stands for ``torch.cuda`` in one thread, and for the copies it would queue."""

    Event = QueuedEvent

    def __init__(self, eagerness: float) -> None:
        self.eagerness = eagerness
        self.made = [QueuedStream(eagerness)]
        self.inside: list[QueuedStream] = []
        self.num_host_copies = 0

    def Stream(self, device: torch.device) -> QueuedStream:  # noqa: N802
        self.made.append(QueuedStream(self.eagerness, len(self.made)))
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

    def __init__(self, ends: LocalTransport, cuda: QueuedCuda, lost: int | None = None) -> None:
        self.rank, self.size, self.device = ends.rank, ends.size, ends.device
        self._ends, self._cuda, self._lost = ends, cuda, lost
        self._wire = QueuedStream(cuda.eagerness, ends.rank)
        self._num_started = 0

    def terms(self, peer: int, *, sending: bool) -> Terms:
        return self._ends.terms(peer, sending=sending)

    def reaches(self, view: torch.Tensor) -> bool:
        return view.dtype != torch.bfloat16

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        self._wire.wait_stream(self._cuda.made[0])
        self._wire.add(lambda: self._ends.exchange(sends, receives, timeout_s=3))
        self._num_started += 1
        is_lost = self._num_started - 1 == self._lost
        return _Queued(self._cuda.made[0], self._wire.record_event(), is_lost)

    def all_gather(self, data: bytes, *, timeout_s: float) -> list[bytes]:
        return self._ends.all_gather(data, timeout_s=timeout_s)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, timeout_s: float
    ) -> None:
        self._ends.exchange(sends, receives, timeout_s=timeout_s)


class _Queued(Transfer):
    def __init__(self, current: QueuedStream, done: QueuedEvent, is_lost: bool) -> None:
        self._current, self._done, self._is_lost = current, done, is_lost

    def wait(self, *, timeout_s: float) -> None:
        if self._is_lost:
            raise TransitionError("lost")
        self._current.wait_event(self._done)


class Ran(NamedTuple):
    """What a rank's execution did, and how often the host copied."""

    report: ExecutionReport
    num_host_copies: int


def run_queued(case: Case, staging: int, eagerness: float, window_ops: int = 256) -> list[Ran]:
    """A transition on queued streams, its source written on one of them too."""
    plan = case.plan(topology_of([0] * 5, len(case.before)), PlanOptions(staging, window_ops))
    source = [bind(roster, filled=False) for roster in case.before]
    values = [bind(roster, filled=True) for roster in case.before]
    target = [bind(roster, filled=False) for roster in case.after]
    cuda = QueuedCuda(eagerness)

    def body(ends: Transport) -> Ran:
        assert isinstance(ends, LocalTransport)
        rank = ends.rank
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
        patch.setattr("dynatrain_megatron.engine.execute.streams_for", CudaStreams)
        return on_threads(plan.num_ranks, body)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(mixed_cases(TENSORS), irregular_cases(), shared_cases(5)),
    st.sampled_from([100, 400, 1 << 20]),
    st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    st.sampled_from([3, 256]),
)
def test_every_element_arrives_whenever_copies_are_done(
    case: Case, staging: int, eagerness: float, window_ops: int
) -> None:
    run_queued(case, staging, eagerness, window_ops)
