"""Worlds whose groups move nothing: to ask Megatron what it would do as some rank of some world.

Every collective answers with what it was given. A process that joins a job runs the job's start in
one, waiting for nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from dynatrain_megatron.elastic import records
from dynatrain_megatron.elastic.records import Record

_FIRST_NAME = 10**15  # beyond all names of worlds that move something


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """This thread is ``rank`` of ``size`` inside; groups made there are gone afterwards."""
    record = Record(_FIRST_NAME)
    with records.entered(record):
        try:
            _initialize(rank, size)
            yield
        finally:
            leave(record)


def enter(rank: int, size: int) -> Record:
    """Put such a world in force, for all threads; ended by :func:`leave`, or with the process."""
    record = Record(2 * _FIRST_NAME)
    records.install(record)
    _initialize(rank, size)
    return record


def leave(record: Record) -> None:
    """Let go of its groups."""
    for group in records.groups_of(record):
        records.unregister(group)
    records.clear(record)


def _initialize(rank: int, size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # makes the backend known

    with records.excepthook_kept():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
