"""The harness itself: results, failures, deadlines, and that nothing is left behind."""

import os
import time
from pathlib import Path

import pytest

from tests.ranks import RankFailure, alive, run_ranks


def test_results_come_back_in_rank_order_and_may_be_large() -> None:
    def worker(rank: int, factor: int) -> tuple[int, str, bytes]:
        return rank * factor, os.environ["RANK"], bytes([rank]) * (1 << 20)

    results = run_ranks(3, worker, 10)
    assert [result[:2] for result in results] == [(0, "0"), (10, "1"), (20, "2")]
    assert results[2][2] == b"\x02" * (1 << 20)


def test_a_failure_names_the_rank_with_traceback_and_output() -> None:
    def worker(rank: int) -> None:
        print(f"rank {rank} was here", flush=True)
        if rank == 1:
            raise ValueError("on purpose")

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, worker)
    text = str(caught.value)
    assert "rank 1 of 2 failed: Traceback" in text and "ValueError: on purpose" in text
    assert "rank 1 was here" in text and "rank 0 was here" not in text


def test_a_rank_that_dies_or_exits_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 failed: died without a result"):
        run_ranks(2, lambda rank: os._exit(0) if rank == 0 else None)
    with pytest.raises(RankFailure, match="rank 1 of 2 failed: exited with code 2"):
        run_ranks(2, lambda rank: rank and exit_with(2))
    assert run_ranks(2, lambda rank: exit_with(0)) == [None, None]


def exit_with(code: int) -> None:
    raise SystemExit(code)


def test_a_failed_rank_frees_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    def worker(rank: int) -> None:
        import torch

        torch.distributed.init_process_group("gloo")
        if rank == 1:
            raise ValueError("first")
        torch.distributed.barrier()

    started = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 of 3 failed: Traceback"):
        run_ranks(3, worker, log_dir=tmp_path)
    assert time.monotonic() - started < 60


def test_the_deadline_kills_ranks_and_what_they_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def worker(rank: int) -> None:
        child = os.fork()
        if child and rank == 1:
            pids.write_text(f"{os.getpid()} {child}")
        elif child:
            os.kill(child, 9)
            return
        wait_for_ever()

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, worker, timeout_s=2)
    text = str(caught.value)
    assert "after 2 s these ranks were still running: 1" in text
    assert "in wait_for_ever" in text
    until = time.monotonic() + 10
    while any(alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_for_ever() -> None:
    while True:
        time.sleep(60)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_leaves_no_rank_behind(tmp_path: Path) -> None:
    def worker(rank: int) -> None:
        (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
        if rank == 0:
            while not (tmp_path / "pid1").exists():
                time.sleep(0.01)
            os.kill(os.getppid(), 2)
        wait_for_ever()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, worker, timeout_s=60)
    for rank in range(2):
        assert not alive(int((tmp_path / f"pid{rank}").read_text()))
