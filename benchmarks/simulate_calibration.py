"""How far `dynatrain simulate` is from measured switches: known plans on forked ranks over gloo.

Three figures of this machine are measured first, in the same run: what one rank sends to another
while nobody else does anything, what all ranks together move while all of them do, and what a
message costs whatever its size. A network of these three is what the simulator gets. Then known
plans are carried out by the engine over torch.distributed, and simulated:

``tp-pp``       every rank has a part of every matrix before, whole layers after; and back
``scatter``     one rank has all before, each a quarter after; ``gather`` the other way
``all-gather``  each has a quarter before, all of it after
``broadcast``   one rank has all before, everybody after

Measured is the slowest rank's time in messages (``wire``) and that from the begin of a transfer to
its end (``whole``), medians of several. The second has packing and unpacking in it, which cost a
CPU as much as messages do and a GPU next to nothing; the simulator knows of messages only. A ratio
of 1.2 says that the simulated time is 1.2 times the measured one. On a shared machine only such
ratios say something, and only ratios are kept.

    python benchmarks/simulate_calibration.py            # a minute
    python benchmarks/simulate_calibration.py --quick    # fewer and smaller
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from engine_wire import Model, bind, bind_nothing
from machine import RESULTS, environment
from promotion import COLUMNS, Pattern
from promotion import bind as bind_rows
from ranks import run_ranks

from dynatrain_megatron.ahead.estimate import traffic_of
from dynatrain_megatron.ahead.network import Network, run
from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import Fragments, Transport, connect, execute
from dynatrain_megatron.planner import Plan, PlanOptions, Speeds, Topology, make_plan
from dynatrain_megatron.vps import LogicalTensor, RosterSet, State, StateKind

RANKS = 4
TIMEOUT_S = 120.0
PROBE_BYTES = 16 << 20
PROBE_OPERATIONS = 200
OPTIONS = PlanOptions(relay_within_nodes=False)


class Transfer(NamedTuple):
    """A plan, and this rank's memory on both sides of it."""

    name: str
    plan: Plan
    source: Fragments
    target: Fragments


def transfers(rank: int, args: argparse.Namespace) -> Iterator[Transfer]:
    """Every known plan in turn; memory is freed between them."""
    model, topology = Model(4, args.hidden), Topology.single_node(RANKS)
    tensors = tuple(tensor for tensor, _, _ in model.tensors())
    rosters = {
        name: RosterSet.merge(
            [bind_nothing(model, name, r, RANKS).roster for r in range(RANKS)], tensors
        )
        for name in ("tp", "pp")
    }
    for a, b in (("tp", "pp"), ("pp", "tp")):
        plan = make_plan(rosters[a], rosters[b], topology, OPTIONS)
        yield Transfer(f"{a}-{b}", plan, bind(model, a, rank, RANKS), bind(model, b, rank, RANKS))
    for pattern in Pattern.all_of():
        if pattern.name == "broadcast" and pattern.wanters < RANKS - 1:
            continue
        for nbytes in args.bytes:
            rows = nbytes // 4 // COLUMNS // RANKS
            state = (State(StateKind.MAIN_PARAM, "float32"),)
            tensor = LogicalTensor("state", (rows * RANKS, COLUMNS), state)
            before, after = (
                RosterSet.merge([bind_rows(held, tensor, rows).roster for held in side], (tensor,))
                for side in (pattern.before, pattern.after)
            )
            yield Transfer(
                f"{pattern.name} {nbytes >> 20} MiB",
                make_plan(before, after, topology, OPTIONS),
                bind_rows(pattern.before[rank], tensor, rows),
                bind_rows(pattern.after[rank], tensor, rows),
            )


def measured_network(transport: Transport, repeats: int) -> Network:
    """What the simulator is told of this machine; the same on all ranks."""
    rank = transport.rank
    peers = [r for r in range(RANKS) if r != rank]
    out, into = (torch.ones(PROBE_BYTES, dtype=torch.uint8) for _ in range(2))
    small = torch.ones(8, dtype=torch.uint8)

    def exchange(sends: list[Any], receives: list[Any]) -> float:
        move = partial(transport.exchange, sends, receives, timeout_s=TIMEOUT_S)
        return slowest(repeats, move)

    lone = exchange([(1, out)] if rank == 0 else [], [(0, into)] if rank == 1 else [])
    every = exchange([(p, out) for p in peers], [(p, into) for p in peers])
    tiny = [(p, small) for p in peers] * PROBE_OPERATIONS
    operations = exchange(tiny, [(p, small.clone()) for p in peers] * PROBE_OPERATIONS)
    speeds = Speeds(operations / (2 * len(peers) * PROBE_OPERATIONS), PROBE_BYTES / lone / 1e9, 1.0)
    together = RANKS * len(peers) * PROBE_BYTES / every / 1e9
    return Network(Topology((0,) * RANKS, None, speeds), node_gb_s=together)


def slowest(repeats: int, work: Callable[[], Any]) -> float:
    """Median over repeats of the slowest rank's seconds; a first run warms up."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        seconds = torch.tensor([time.perf_counter() - begin])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(float(seconds[0]))
    return statistics.median(found[1:])


def moved(one: Transfer, transport: Transport, repeats: int) -> tuple[float, float]:
    """(seconds in messages, seconds in all) of the slowest rank, medians."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        report = execute(one.plan, one.source, one.target, transport, timeout_s=TIMEOUT_S)
        seconds = torch.tensor([report.wire_s, time.perf_counter() - begin])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(seconds.tolist())
    wire, whole = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return wire, whole


def simulated(plan: Plan, network: Network) -> float:
    """All passes, one after the other."""
    return sum(run(traffic_of(each, True), network).seconds for each in plan.passes)


def measure(rank: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank's life; all ranks find the same rows."""
    torch.manual_seed(rank)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    transport = connect(group, torch.device("cpu"), EngineTransport.torch, timeout_s=TIMEOUT_S)
    rows = []
    for one in transfers(rank, args):
        # The machine drifts, so its figures are taken before and after each plan.
        before = measured_network(transport, args.repeats)
        wire_s, whole_s = moved(one, transport, args.repeats)
        after = measured_network(transport, args.repeats)
        seconds = statistics.mean(simulated(one.plan, network) for network in (before, after))
        rows.append({"plan": one.name, "wire": seconds / wire_s, "whole": seconds / whole_s})
    return rows


def spread(ratios: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def main() -> int:
    """Run it, print the ratios and their spread, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    args.hidden, args.bytes = (512, [8 << 20]) if args.quick else (1024, [8 << 20, 64 << 20])
    load = os.getloadavg()[0]
    rows, *_ = run_ranks(RANKS, lambda rank: measure(rank, args), timeout_s=600)
    print(f"{'simulated / measured':20s} {'wire':>6s} {'whole':>6s}")
    for row in rows:
        print(f"{row['plan']:20s} {row['wire']:6.2f} {row['whole']:6.2f}")
    summary = {kind: spread([row[kind] for row in rows]) for kind in ("wire", "whole")}
    for kind, figures in summary.items():
        print(kind, "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    args.out.mkdir(parents=True, exist_ok=True)
    stem = "simulate_calibration_quick" if args.quick else "simulate_calibration"
    content = {
        "environment": environment("torch"),
        "load": [load, os.getloadavg()[0]],
        "summary": summary,
        "results": rows,
    }
    (args.out / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
