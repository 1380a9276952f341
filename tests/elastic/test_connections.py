"""A wait for a process that hangs ends when its connection is cut, and no other one does."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dynatrain_megatron.elastic import connections
from dynatrain_megatron.elastic.connections import Connections
from tests.ranks import run_ranks


def test_a_wait_for_a_process_that_hangs_ends_when_it_is_cut() -> None:
    def worker(rank: int) -> int:
        dist.init_process_group("gloo")
        port = int(os.environ["MASTER_PORT"])
        before = connections.open_now(but_at=port)
        group = dist.new_group([0, 1])
        assert isinstance(group, dist.ProcessGroup)
        dist.barrier(group)
        now = connections.open_now(but_at=port)
        made = {i: ends for i, ends in now.items() if i not in before}
        rows: list[list[str]] = [[], []]
        dist.all_gather_object(rows, [own for own, _ in made.values()])
        found = Connections.among(made, [*rows[0], *rows[1]])
        assert len(found) >= 1
        if rank == 0:
            threading.Timer(0.5, found.cut).start()
            begin = time.monotonic()
            with pytest.raises(RuntimeError):
                group.recv([torch.zeros(4)], 1, 0).wait(timedelta(seconds=60))
            assert time.monotonic() - begin < 20
        dist.barrier()  # the other group is as it was
        return len(found)

    assert run_ranks(2, worker, timeout_s=90)


def test_what_nobody_else_has_made_is_left_alone() -> None:
    made = {1: ("a:1", "b:2"), 2: ("a:3", "c:4")}
    assert len(Connections.among(made, ["b:2", "a:1", "a:3"])) == 1
    assert len(Connections.among(made, [])) == 0
