"""Which transport a group gets: for each pair of ranks, and each way by itself, the fastest.

::

    ranks of one host, and it is allowed     they read each other's memory        same_host
    … it is not                              rings of shared memory               rings
    all others                               messages of torch.distributed        transport

Whether ranks are on one host is asked of the running kernel, and what works is tried, not guessed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.distributed as dist

from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import process_memory, same_host
from dynatrain_megatron.engine.meeting import meet
from dynatrain_megatron.engine.rings import RingTransport
from dynatrain_megatron.engine.same_host import Neighbours, SameHostTransport
from dynatrain_megatron.engine.transport import TorchTransport, Transport
from dynatrain_megatron.errors import SwitchRefused

logger = logging.getLogger(__name__)

RING_BYTES = 64 << 20
"""Limit of a rank's rings together, where nothing else is said."""

_NO_NEIGHBOURS = Neighbours({}, frozenset(), frozenset(), ())
_ALLOW = {
    EngineTransport.vm: "allow ranks to trace each other",
    EngineTransport.memfd: "let ranks of one host share a network namespace and memory files",
}


def connect(
    group: dist.ProcessGroup,
    device: torch.device,
    choice: EngineTransport,
    *,
    timeout_s: float,
    ring_bytes: int = RING_BYTES,
    host: str | None = None,
) -> Transport:
    """The transport over ``group`` that ``choice`` means; collective, arguments the same on all.

    The rings of a rank take ``ring_bytes`` at most (see :func:`.meeting.meet`). ``host``, which may
    differ, names this rank's host, by default after the running kernel. Raises
    :class:`SwitchRefused` on all ranks alike where ``vm`` or ``memfd`` was asked for and cannot be
    had.
    """
    transport: Transport = TorchTransport(group, device)
    if choice is EngineTransport.torch:
        return transport
    if device.type != "cpu":
        if choice is not EngineTransport.auto:
            raise SwitchRefused(
                f"engine.transport={choice} is for host memory, and the state is on {device}",
                "use engine.transport=auto",
            )
        return transport
    host = process_memory.host_id() if host is None else host
    neighbours = _NO_NEIGHBOURS
    if choice is not EngineTransport.memfd:
        neighbours = same_host.probe(transport, host, timeout_s)
        _report(choice, EngineTransport.vm, neighbours.problems)
        if neighbours.processes or neighbours.readers:
            transport = SameHostTransport(group, device, neighbours)
    if choice is not EngineTransport.vm:
        ways = _ways_within_hosts(transport, host, timeout_s) - neighbours.ways
        if ways:
            links = meet(transport, ways, ring_bytes=ring_bytes, timeout_s=timeout_s)
            if links.ring_bytes:
                transport = RingTransport(transport, links.by_peer, links.ring_bytes)
            try:
                _report(choice, EngineTransport.memfd, links.problems)
            except SwitchRefused:
                transport.close()
                raise
    return transport


def _ways_within_hosts(transport: Transport, host: str, timeout_s: float) -> set[tuple[int, int]]:
    """All ordered pairs of ranks of one host; collective."""
    rows = transport.all_gather(json.dumps(host).encode(), timeout_s=timeout_s)
    hosts = [json.loads(row) for row in rows]
    return {
        (a, b) for a, b in permutations(range(len(hosts)), 2) if hosts[a] and hosts[a] == hosts[b]
    }


def _report(choice: EngineTransport, tried: EngineTransport, problems: Sequence[str]) -> None:
    """Refuse what was asked for and does not work; note what ``auto`` goes around."""
    if problems and choice is tried:
        raise SwitchRefused(
            f"engine.transport={choice}: {problems[0]}",
            f"{_ALLOW[tried]}, or use engine.transport=auto",
        )
    for problem in problems:
        logger.info("not by engine.transport=%s: %s", tried, problem)
