"""Where the copies of a transfer run, and what waits for what.

In host memory a copy is done when the call that made it returns. On a GPU copies are queued::

    current     pack 0 > wire 0     pack 1 > wire 1     pack 2 > wire 2
                              v                         ^
    unpacking                 unpack 0 -----------------'  it lies where window 0 did
    keeping             what this rank keeps

A window is packed on the current stream, which transports follow of themselves. It has to wait for
all that has been unpacked if it uses staging memory, and so nothing is lost by one stream for
packing and wire. State in host memory goes by pinned memory, where the host has to wait::

    pack    state, in host memory  > pinned memory > staging memory > wire
    unpack  wire > staging memory  > pinned memory > state, in host memory
            |------- device -------|--- device ---|------ host ------|
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import cuda

from dynatrain_megatron.engine.transport import failures_of
from dynatrain_megatron.errors import TransitionError

_POLL_S = 5e-5


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of tensors of the same shape and dtype, the second to be copied to the first."""

    to: list[torch.Tensor] = field(default_factory=list)
    of: list[torch.Tensor] = field(default_factory=list)

    def append(self, to: torch.Tensor, of: torch.Tensor) -> None:
        self.to.append(to)
        self.of.append(of)

    def join(
        self, inner: Sequence[torch.Tensor], outer: Sequence[torch.Tensor], *, packing: bool
    ) -> None:
        """From ``inner`` to ``outer``, or back where it is not for packing."""
        self.to.extend(outer if packing else inner)
        self.of.extend(inner if packing else outer)

    def run(self, *, non_blocking: bool = False) -> None:
        if self.to:
            torch._foreach_copy_(self.to, self.of, non_blocking)


@dataclass(frozen=True, slots=True)
class Copies:
    """What is packed or unpacked in one window, or kept in one pass.

    ``near`` are copies within the memory that the transport reaches. ``host`` are those of state
    elsewhere to or from pinned memory, and ``bus`` those between pinned and staging memory.
    """

    near: Pairs = field(default_factory=Pairs)
    host: Pairs = field(default_factory=Pairs)
    bus: Pairs = field(default_factory=Pairs)


class Streams:
    """Runs the copies of one execution, in host memory; called by one thread.

    Left as a context it has nothing under way that writes to memory which others may get.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        pass

    def pack(self, copies: Copies, *, is_staged: bool) -> None:
        """Copy before any transfer that is started later.

        ``is_staged``: the window uses staging memory, which another one may have used.
        """
        copies.host.run()
        copies.bus.run()
        copies.near.run()

    def unpack(self, copies: Copies) -> None:
        """Copy what the transfers that have been waited for brought."""
        copies.bus.run()
        copies.near.run()
        copies.host.run()

    def keep(self, copies: Copies) -> None:
        """Copy beside all else."""
        copies.near.run()
        copies.host.run()

    def finish(self) -> Mapping[str, float]:
        """Return when all copies and transfers are done; the seconds they took beside the host."""
        return {}


class CudaStreams(Streams):
    """The same on a GPU; copies of state in host memory are done by the host.

    Raises :class:`TransitionError` where the GPU needs more than ``timeout_s`` for what the host
    waits for.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._current = cuda.current_stream(device)
        self._unpacking, self._keeping = (cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._lifted: cuda.Event | None = None
        self._laps: list[tuple[str, cuda.Event, cuda.Event]] = []

    def __exit__(self, kind: object, *_: object) -> None:
        # What they write to may be freed now. The current stream gets memory in its own order, and
        # may wait for a transfer that has failed.
        if kind is not None:
            self._wait_for_own_streams()

    def pack(self, copies: Copies, *, is_staged: bool) -> None:
        if copies.host.to:
            if self._lifted is not None:  # it may still be read
                self._wait_for(self._lifted)
            copies.host.run()
        if is_staged:
            self._current.wait_stream(self._unpacking)
        with self._timed("pack", self._current):
            copies.bus.run(non_blocking=True)
            copies.near.run()
        if copies.bus.to:
            self._lifted = self._current.record_event()

    def unpack(self, copies: Copies) -> None:
        # Also where nothing is to be unpacked: what waits for this stream waits for transfers too.
        self._unpacking.wait_stream(self._current)
        with cuda.stream(self._unpacking):
            copies.bus.run(non_blocking=True)
        lowered = self._unpacking.record_event()
        with self._timed("unpack", self._unpacking):
            copies.near.run()
        if copies.host.to:
            self._wait_for(lowered)
            copies.host.run()

    def keep(self, copies: Copies) -> None:
        self._keeping.wait_stream(self._current)
        with self._timed("retain", self._keeping):
            copies.near.run()
        copies.host.run()

    def finish(self) -> Mapping[str, float]:
        self._wait_for_own_streams()
        seconds: dict[str, float] = defaultdict(float)
        for name, begin, end in self._laps:
            seconds[name] += begin.elapsed_time(end) / 1e3
        self._laps.clear()
        return seconds

    @contextlib.contextmanager
    def _timed(self, name: str, stream: cuda.Stream) -> Iterator[None]:
        """Queue what is done inside on ``stream``, and take the time that it takes there."""
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with cuda.stream(stream):
            begin.record(stream)
            yield
            end.record(stream)
        self._laps.append((name, begin, end))

    def _wait_for_own_streams(self) -> None:
        self._wait_for(self._unpacking.record_event(), self._keeping.record_event())

    def _wait_for(self, *events: cuda.Event) -> None:
        """Let the host wait."""
        deadline = time.monotonic() + self._timeout_s
        with failures_of(f"copying on {self._device}"):
            while not all(event.query() for event in events):  # type: ignore[no-untyped-call]
                if time.monotonic() > deadline:
                    raise TransitionError(
                        f"copies on {self._device} were not done within {self._timeout_s:g} s"
                    )
                time.sleep(_POLL_S)


def streams_for(device: torch.device, timeout_s: float) -> Streams:
    """What runs copies to and from memory of ``device``."""
    return CudaStreams(device, timeout_s) if device.type == "cuda" else Streams()
