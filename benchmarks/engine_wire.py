"""How near the engine comes to what this machine can move at all.

Forked ranks hold random state of mixed dtypes (float32 main parameters and first moments, bf16
second moments) and go from one tensor or pipeline parallel layout to the other and back; everyone
sends and everyone receives. Beside each transition, in the same run and with all ranks at it, are
measured: the transport's own bandwidth for contiguous messages, a copy of rows of a matrix, and a
plain copy. From these follows the bound::

    bound = max over ranks of  bytes / p2p  +  strided bytes / strided copy
    ratio = max over ranks of (pack + wire + unpack + copying what is kept) / bound

Bytes are the larger of those a rank sends and those it receives; strided bytes are those that do
not lie contiguous where they are read or written, and those that a rank keeps. On a shared machine
only ratios say something.

    python benchmarks/engine_wire.py --quick
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from machine import keep

from dynatrain_megatron import platform
from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import (
    Fragments,
    FragmentsBuilder,
    Transport,
    connect,
    execute,
)
from dynatrain_megatron.engine.fingerprint import check_received
from dynatrain_megatron.planner import Plan, PlanOptions, Topology, make_plan
from dynatrain_megatron.vps import LogicalTensor, Region, RosterSet, State, StateKind

STATES = (
    State(StateKind.MAIN_PARAM, "float32"),
    State(StateKind.EXP_AVG, "float32"),
    State(StateKind.EXP_AVG_SQ, "bfloat16"),
)
MESSAGE_BYTES = 16 << 20
MEASURED_BYTES = 192 << 20  # each way, for the bandwidths beside
TIMEOUT_S = 120.0


class Model(NamedTuple):
    """Layers of four matrices; tensor parallelism cuts two by rows and two by columns."""

    layers: int
    hidden: int

    def tensors(self) -> list[tuple[LogicalTensor, int, int]]:
        """(tensor, its layer, the dim that tensor parallelism cuts)."""
        h = self.hidden
        shapes = [("qkv", (3 * h, h), 0), ("proj", (h, h), 1), ("fc1", (4 * h, h), 0)]
        shapes.append(("fc2", (h, 4 * h), 1))
        return [
            (LogicalTensor(f"layers.{layer}.{name}", shape, STATES), layer, dim)
            for layer in range(self.layers)
            for name, shape, dim in shapes
        ]

    def regions(self, layout: str, rank: int, world: int) -> Iterator[tuple[LogicalTensor, Region]]:
        """What a rank holds in layout ``tp`` (a part of everything) or ``pp`` (whole layers)."""
        for tensor, layer, dim in self.tensors():
            whole = Region.whole(tensor.shape)
            if layout == "pp":
                if layer * world // self.layers == rank:
                    yield tensor, whole
                continue
            start, stop = list(whole.start), list(whole.stop)
            start[dim], stop[dim] = (stop[dim] * r // world for r in (rank, rank + 1))
            yield tensor, Region(tuple(start), tuple(stop))


def bind(model: Model, layout: str, rank: int, world: int) -> Fragments:
    """Random state of one rank; all of its memory is touched."""
    builder = FragmentsBuilder()
    for tensor, region in model.regions(layout, rank, world):
        views = [
            torch.empty(region.shape, dtype=getattr(torch, state.dtype)).random_(0, 1 << 8)
            for state in tensor.states
        ]
        builder.add(tensor, region, views)
    return builder.build()


def strided_bytes(plan: Plan, rank: int, source: Fragments, target: Fragments) -> int:
    """Bytes this rank reads or writes in rows, and those it keeps."""
    pieces, total = plan.passes[0].schedule.pieces, int(plan.bytes_matrix[rank, rank])
    for ends, slots, fragments in (
        (pieces.src, pieces.src_slot, source),
        (pieces.dst, pieces.dst_slot, target),
    ):
        for i in (ends == rank).nonzero()[0]:
            views = fragments.piece(int(slots[i]), pieces.start[i], pieces.stop[i])
            total += sum(v.nbytes for v in views if not v.is_contiguous())
    return total


def seconds(work: Callable[[], Any]) -> float:
    """Time of ``work`` with all ranks starting together."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Beside:
    """Bandwidths of this machine, bytes a second of one rank while all ranks do the same."""

    def __init__(self, transport: Transport, hidden: int) -> None:
        self._transport = transport
        peers = [r for r in range(transport.size) if r != transport.rank]
        count = MEASURED_BYTES // MESSAGE_BYTES // len(peers)
        self._bytes = count * len(peers) * MESSAGE_BYTES
        self._out, self._in = (torch.ones(self._bytes, dtype=torch.uint8) for _ in range(2))
        pieces = [
            [(peers[i % len(peers)], piece) for i, piece in enumerate(flat.split(MESSAGE_BYTES))]
            for flat in (self._out, self._in)
        ]
        self._sends, self._receives = pieces
        rows = MEASURED_BYTES // 4 // 4 // hidden
        self._matrix = torch.ones(rows, 4 * hidden)
        self._columns = torch.ones(rows, hidden)

    def p2p(self) -> float:
        """Contiguous messages to and from all other ranks at once."""

        def work() -> None:
            self._transport.exchange(self._sends, self._receives, timeout_s=TIMEOUT_S)

        return self._bytes / seconds(work)

    def strided(self) -> float:
        """A quarter of a matrix's columns out of it, and back into it."""
        part = self._matrix[:, : self._columns.shape[1]]

        def work() -> None:
            for _ in range(2):
                self._columns.copy_(part)
                part.copy_(self._columns)

        return 4 * self._columns.nbytes / seconds(work)

    def memcpy(self) -> float:
        """A plain copy."""
        return self._bytes / seconds(lambda: self._in.copy_(self._out))


def measure(rank: int, args: argparse.Namespace, transport: Transport) -> list[dict[str, float]]:
    """Every transition of every repeat, as this rank saw it."""
    model = Model(args.layers, args.hidden)
    world = args.ranks
    state = {layout: bind(model, layout, rank, world) for layout in ("tp", "pp")}
    rosters = {
        layout: RosterSet.merge(
            [bind_nothing(model, layout, r, world).roster for r in range(world)],
            tuple(tensor for tensor, _, _ in model.tensors()),
        )
        for layout in ("tp", "pp")
    }
    beside = Beside(transport, args.hidden)
    options = PlanOptions(staging_bytes=args.staging_mib << 20)
    pairs = [("tp", "pp"), ("pp", "tp")]
    plans = {
        (a, b): make_plan(rosters[a], rosters[b], Topology.single_node(world), options)
        for a, b in pairs
    }
    rows: list[dict[str, float]] = []
    for repeat in range(args.repeats + 1):  # the first warms memory and connections
        for a, b in pairs:
            plan, source, target = plans[a, b], state[a], state[b]
            row = {"p2p": beside.p2p(), "strided": beside.strided(), "memcpy": beside.memcpy()}
            dist.barrier()
            report = execute(plan, source, target, transport, timeout_s=TIMEOUT_S)
            if not repeat:
                check_received(plan, source, target, transport, timeout_s=TIMEOUT_S)
                continue
            row |= {"pack": report.pack_s, "wire": report.wire_s, "unpack": report.unpack_s}
            row |= {"retain": report.retain_s}
            row |= {"total": sum(row[name] for name in ("pack", "wire", "unpack", "retain"))}
            row |= {"bytes": max(report.sent_bytes, report.received_bytes)}
            row |= {"strided_bytes": strided_bytes(plan, rank, source, target)}
            row |= {"windows": plan.num_windows, "ops": report.num_operations}
            rows.append(row)
    return rows


def bind_nothing(model: Model, layout: str, rank: int, world: int) -> Fragments:
    """Another rank's roster; its memory is not here."""
    builder = FragmentsBuilder()
    for tensor, region in model.regions(layout, rank, world):
        views = [
            torch.empty(1, dtype=getattr(torch, s.dtype)).expand(region.shape)
            for s in tensor.states
        ]
        builder.add(tensor, region, views)
    return builder.build()


def run_rank(rank: int, args: argparse.Namespace, folder: str, results: Any) -> None:
    """One rank's life."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks
    )
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for name in args.transport:
        found[name] = measure(
            rank,
            args,
            connect(group, torch.device("cpu"), EngineTransport(name), timeout_s=TIMEOUT_S),
        )
    results.put((rank, found))
    dist.barrier()


def summary(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """Medians over the transitions; each is as slow as its slowest rank."""
    lines = []
    for rows in zip(*ranks, strict=True):
        bound = max(r["bytes"] / r["p2p"] + r["strided_bytes"] / r["strided"] for r in rows)
        slowest = max(rows, key=lambda r: r["total"])
        moved = sum(r["bytes"] for r in rows)
        line = {name: slowest[name] for name in ("pack", "wire", "unpack", "retain", "total")}
        line |= {
            f"{name}_gb_s": min(r[name] for r in rows) / 1e9
            for name in ("p2p", "strided", "memcpy")
        }
        line |= {"bound": bound, "ratio": slowest["total"] / bound, "moved_gb": moved / 1e9}
        line["of_memcpy"] = (
            max(r["bytes"] for r in rows) / slowest["total"] / (1e9 * line["memcpy_gb_s"])
        )
        line["p2p_of_memcpy"] = line["p2p_gb_s"] / line["memcpy_gb_s"]
        line["windows"], line["ops"] = slowest["windows"], slowest["ops"]
        lines.append(line)
    return {name: statistics.median(line[name] for line in lines) for name in lines[0]}


def main() -> int:
    """Run it and print one table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="0.5 GB of state, under a minute")
    parser.add_argument("--transport", nargs="+", default=["torch", "memfd", "vm"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--staging-mib", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file of results to put these into")
    args = parser.parse_args()
    platform.install("cpu")  # huge pages, one thread: before torch makes its first tensor
    if args.quick:
        args.hidden, args.repeats = 1024, 3
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=run_rank, args=(r, args, folder, results), daemon=True)
            for r in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=600) for _ in ranks)
        for process in ranks:
            process.join()
    table = {t: summary([found[r][t] for r in range(args.ranks)]) for t in args.transport}
    if args.out is not None:
        keep(args.out, f"{args.ranks} ranks", table)
    if args.json:
        print(json.dumps(table))
        return 0
    for name, line in table.items():
        print(name)
        for key, value in line.items():
            print(f"  {key:16s} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
