"""What is wanted by several: from its holders, relayed, or by a collective; predicted and measured.

Four forked ranks on gloo move the same bytes in each of these ways:

``direct``      the plan without relays (``engine.promote=off``), carried out by the engine
``relayed``     the plan in which everything that can be is relayed, whatever it costs
``auto``        the plan of a switch (``engine.promote=auto``): on one host nothing is relayed
``collective``  dist.broadcast, dist.scatter, dist.gather or dist.all_gather_into_tensor on a group
                that exists already, straight from one contiguous tensor into another

The patterns: ``broadcast`` from rank 0 to k others, ``scatter`` from rank 0 and ``gather`` to it,
and ``all-gather``. Predictions come from the bandwidth and the cost of an operation measured in the
same run; a pass takes as long as its busiest rank, a broadcast ⌈log2(k + 1)⌉ times the bytes, and
each of the others as its busiest rank. Times are medians of the slowest rank's, in milliseconds.
On a shared machine only ratios say something.

    python benchmarks/promotion.py            # up to 64 MiB
    python benchmarks/promotion.py --quick    # up to 8 MiB, under a minute
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dynatrain_megatron import platform
from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import Fragments, FragmentsBuilder, Transport, connect, execute
from dynatrain_megatron.engine.fingerprint import check_received
from dynatrain_megatron.planner import Plan, PlanOptions, Speeds, Topology, make_plan
from dynatrain_megatron.vps import LogicalTensor, Region, RosterSet, State, StateKind

RANKS = 4
TIMEOUT_S = 120.0
COLUMNS = 1024
PROBE_BYTES = 8 << 20
PROBE_OPERATIONS = 200
RESULTS = Path(__file__).parent / "results" / "promotion.json"


class Pattern(NamedTuple):
    """Which rows of one tensor (in parts of a quarter) each rank holds before and after."""

    name: str
    wanters: int
    before: tuple[range, ...]
    after: tuple[range, ...]

    @classmethod
    def all_of(cls) -> list[Pattern]:
        """Every pattern; a part that a rank holds before, it holds after."""
        nothing, whole = range(0), range(RANKS)
        parts = tuple(range(rank, rank + 1) for rank in range(RANKS))
        root = (whole,) + (nothing,) * (RANKS - 1)
        return [
            *(
                cls("broadcast", k, root, (whole,) * (k + 1) + (nothing,) * (RANKS - 1 - k))
                for k in range(2, RANKS)
            ),
            cls("scatter", 1, root, parts),
            cls("gather", 1, parts, root),
            cls("all-gather", RANKS - 1, parts, (whole,) * RANKS),
        ]


def bind(held: range, tensor: LogicalTensor, rows: int) -> Fragments:
    """Memory for the parts of one rank, all of it touched; one contiguous fragment."""
    builder = FragmentsBuilder()
    if len(held):
        region = Region((held[0] * rows, 0), ((held[-1] + 1) * rows, COLUMNS))
        builder.add(tensor, region, [torch.rand(region.shape)])
    return builder.build()


def collective(pattern: Pattern, nbytes: int, rank: int, group: Any) -> Callable[[], None]:
    """The same by torch.distributed; does nothing on ranks outside of ``group``."""
    whole = torch.rand(nbytes // 4)
    parts = list(whole.chunk(RANKS))
    own = torch.rand_like(parts[0])
    at_root = parts if rank == 0 else None

    def work() -> None:
        if pattern.name == "broadcast" and rank <= pattern.wanters:
            dist.broadcast(whole, 0, group=group)
        elif pattern.name == "scatter":
            dist.scatter(own, at_root, 0, group=group)
        elif pattern.name == "gather":
            dist.gather(own, at_root, 0, group=group)
        elif pattern.name == "all-gather":
            dist.all_gather_into_tensor(whole, own, group=group)

    return work


# ---------------------------------------------------------------------- predicted


def measured_speeds(transport: Transport) -> Speeds:
    """Bandwidth of a rank with contiguous messages to and from all others, and an operation."""
    peers = [rank for rank in range(RANKS) if rank != transport.rank]

    def exchange(nbytes: int, times: int) -> float:
        out, into = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        sends, receives = ([(p, x) for p in peers] * times for x in (out, into))
        return median(3, lambda: transport.exchange(sends, receives, timeout_s=TIMEOUT_S))

    seconds = torch.tensor([exchange(PROBE_BYTES, 1), exchange(8, PROBE_OPERATIONS)])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    gb_s = len(peers) * PROBE_BYTES / float(seconds[0]) / 1e9
    return Speeds(float(seconds[1]) / (2 * len(peers) * PROBE_OPERATIONS), gb_s, gb_s)


def predicted_plan_s(plan: Plan, speeds: Speeds) -> float:
    """Pass by pass, the busiest rank's bytes one way and its operations."""
    total = 0.0
    for links in (each.links for each in plan.passes):
        ends = (links.src, links.dst)
        sent, received = (torch.zeros(RANKS).numpy() for _ in ends)
        operations = torch.zeros(RANKS).numpy()
        for load, end in zip((sent, received), ends, strict=True):
            for rank, nbytes in zip(end.tolist(), links.nbytes.tolist(), strict=True):
                load[rank] += nbytes
                operations[rank] += 1
        busiest = max(float(sent.max()), float(received.max())) / speeds.near_gb_s / 1e9
        total += busiest + float(operations.max()) * speeds.operation_s
    return total


def predicted_collective_s(pattern: Pattern, nbytes: int, speeds: Speeds) -> float:
    """As the module says."""
    steps = math.ceil(math.log2(pattern.wanters + 1))
    copies = steps if pattern.name == "broadcast" else (RANKS - 1) / RANKS
    operations = steps if pattern.name == "broadcast" else RANKS - 1
    return copies * nbytes / speeds.near_gb_s / 1e9 + operations * speeds.operation_s


# ---------------------------------------------------------------------- measured


def median(repeats: int, work: Callable[[], Any]) -> float:
    """Seconds of ``work`` with all ranks starting together; a first run warms up."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def measure(rank: int, args: argparse.Namespace, transport: Transport) -> Iterator[dict[str, Any]]:
    """Every pattern and size; the same rows on all ranks."""
    speeds = measured_speeds(transport)
    groups = {k: dist.new_group(list(range(k + 1))) for k in range(2, RANKS)}
    for pattern in Pattern.all_of():
        group = groups[pattern.wanters if pattern.name == "broadcast" else RANKS - 1]
        for nbytes in args.bytes:
            rows = nbytes // 4 // COLUMNS // RANKS
            state = (State(StateKind.MAIN_PARAM, "float32"),)
            tensor = LogicalTensor("state", (rows * RANKS, COLUMNS), state)
            before, after = (
                RosterSet.merge([bind(held, tensor, rows).roster for held in side], (tensor,))
                for side in (pattern.before, pattern.after)
            )
            source = bind(pattern.before[rank], tensor, rows)
            target = bind(pattern.after[rank], tensor, rows)
            row: dict[str, Any] = {"pattern": pattern.name, "k": pattern.wanters, "bytes": nbytes}
            for name, plan in plans(before, after, speeds).items():
                move = partial(execute, plan, source, target, transport, timeout_s=TIMEOUT_S)
                seconds = median(args.repeats, move)
                check_received(plan, source, target, transport, timeout_s=TIMEOUT_S)
                row[name] = {"predicted": predicted_plan_s(plan, speeds), "measured": seconds}
                row[name]["passes"] = len(plan.passes)
            seconds = median(args.repeats, collective(pattern, nbytes, rank, group))
            predicted = predicted_collective_s(pattern, nbytes, speeds)
            row["collective"] = {"predicted": predicted, "measured": seconds}
            row["speeds"] = {"gb_s": speeds.near_gb_s, "operation_s": speeds.operation_s}
            yield row


def plans(before: RosterSet, after: RosterSet, speeds: Speeds) -> dict[str, Plan]:
    """The three plans."""

    def plan(name: str, own: Speeds) -> Plan:
        options = PlanOptions(relay=name != "direct", relay_within_nodes=name == "relayed")
        return make_plan(before, after, Topology((0,) * RANKS, None, own), options)

    free = Speeds(0.0, speeds.near_gb_s, speeds.far_gb_s)
    return {
        name: plan(name, own)
        for name, own in (("direct", speeds), ("relayed", free), ("auto", speeds))
    }


def run_rank(rank: int, args: argparse.Namespace, folder: str, results: Any) -> None:
    """One rank's life."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    transport = connect(
        group, torch.device("cpu"), EngineTransport(args.transport), timeout_s=TIMEOUT_S
    )
    results.put((rank, list(measure(rank, args, transport))))
    dist.barrier()


def slowest(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One row of all ranks' rows, with the slowest rank's times."""
    found = dict(rows[0])
    for name in ("direct", "relayed", "auto", "collective"):
        found[name] = dict(found[name], measured=max(row[name]["measured"] for row in rows))
    return found


def main() -> int:
    """Run it, print one table, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 8 MiB, under a minute")
    parser.add_argument("--transport", choices=["torch", "vm"], default="torch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    args = parser.parse_args()
    platform.install("cpu")  # huge pages, one thread: before torch makes its first tensor
    args.bytes = [64 << 10, 1 << 20, 8 << 20] + ([] if args.quick else [64 << 20])
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=run_rank, args=(rank, args, folder, results), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=600) for _ in ranks)
        for process in ranks:
            process.join()
    table = [slowest(rows) for rows in zip(*(found[r] for r in range(RANKS)), strict=True)]
    print(f"{'predicted / measured, ms':28s}", *(f"{n:>19s}" for n in table[0] if n in NAMES))
    for row in table:
        cells = (
            f"{row[n]['predicted'] * 1e3:8.2f} / {row[n]['measured'] * 1e3:8.2f}" for n in NAMES
        )
        relays = "relays" if row["auto"]["passes"] > 1 else ""
        print(
            f"{row['pattern']:10s} k={row['k']} {row['bytes'] / 2**20:8.2f} MiB  ", *cells, relays
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"torch": torch.__version__, "transport": args.transport, "results": table}
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


NAMES = ("direct", "relayed", "auto", "collective")

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
