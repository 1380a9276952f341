"""What one GPU can show in a few minutes; on a machine without one it says so and ends well.

    benchmarks/gpu_smoke.sh

bandwidth   copies of the forms that a transfer makes, beside a plain copy of the same bytes
streams     4 ranks as threads, their state on the GPU, messages on streams of their own that run
            late or early at random: every element of the target is compared
staged      4 ranks as processes, their state on the same GPU, messages through host memory over
            gloo (NCCL refuses two ranks on one GPU): every element is compared
megatron    a Megatron job of one rank over NCCL that changes its layout in what one rank can
            change (micro-batch size, distributed optimizer), beside one that never does

A part that fails is shown as such, and the exit code is 1. ``--rehearse`` runs all parts on the
CPU with tiny sizes, to see that the script itself works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks import machine  # noqa: E402
from dynatrain_megatron.config import EngineTransport  # noqa: E402
from dynatrain_megatron.engine import (  # noqa: E402
    Fragments,
    FragmentsBuilder,
    Transport,
    connect,
    execute,
)
from dynatrain_megatron.engine.fingerprint import check_received  # noqa: E402
from dynatrain_megatron.engine.transport import (  # noqa: E402
    Message,
    Terms,
    Transfer,
    as_bytes,
)
from dynatrain_megatron.planner import Plan, PlanOptions, Topology, make_plan  # noqa: E402
from dynatrain_megatron.vps import (  # noqa: E402
    LogicalTensor,
    Region,
    RosterBuilder,
    RosterSet,
    State,
    StateKind,
)
from tests.engine.local import LocalTransport  # noqa: E402

RANKS = 4
TIMEOUT_S = 60.0
STATES = (
    State(StateKind.MAIN_PARAM, "float32"),
    State(StateKind.EXP_AVG, "float32"),
    State(StateKind.EXP_AVG_SQ, "bfloat16"),
)
# Numbers below this are exact in each dtype.
MODULUS = {"float32": 1 << 24, "bfloat16": 1 << 8}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is moved and measured."""

    layers: int
    hidden: int
    staging_bytes: int
    copied_bytes: int
    repeats: int


ON_GPU = Sizes(layers=4, hidden=2048, staging_bytes=64 << 20, copied_bytes=1 << 30, repeats=5)
REHEARSAL = Sizes(layers=4, hidden=32, staging_bytes=1 << 14, copied_bytes=1 << 20, repeats=2)

Line = tuple[str, str]
"""What was looked at, and what was found."""


class Mismatch(AssertionError):
    """State that is not what it should be."""


# -- a model's state in two layouts --------------------------------------------------------------


def tensors(sizes: Sizes) -> list[tuple[LogicalTensor, int, int]]:
    """(tensor, its layer, the dim that tensor parallelism cuts)."""
    h = sizes.hidden
    shapes = [("qkv", (3 * h, h), 0), ("proj", (h, h), 1), ("fc1", (4 * h, h), 0)]
    shapes.append(("fc2", (h, 4 * h), 1))
    return [
        (LogicalTensor(f"layers.{layer}.{name}", shape, STATES), layer, dim)
        for layer in range(sizes.layers)
        for name, shape, dim in shapes
    ]


def regions(sizes: Sizes, layout: str, rank: int) -> Iterator[tuple[LogicalTensor, Region]]:
    """What a rank holds: a part of everything (``tp``), or whole layers (``pp``)."""
    for tensor, layer, dim in tensors(sizes):
        whole = Region.whole(tensor.shape)
        if layout == "pp":
            if layer * RANKS // sizes.layers == rank:
                yield tensor, whole
            continue
        start, stop = list(whole.start), list(whole.stop)
        start[dim], stop[dim] = (stop[dim] * r // RANKS for r in (rank, rank + 1))
        yield tensor, Region(tuple(start), tuple(stop))


def values(tensor: LogicalTensor, k: int, region: Region, device: torch.device) -> torch.Tensor:
    """What a region of the k-th state has to hold: made from where an element lies, and k."""
    dtype = tensor.states[k].dtype
    total = torch.full((), 7 * k + len(tensor.name), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(tensor.shape))):
        index = torch.arange(region.start[dim], region.stop[dim], device=device) * stride
        total = total + index.view(-1, *[1] * (len(tensor.shape) - 1 - dim))
        stride *= tensor.shape[dim]
    return (total % MODULUS[dtype]).to(getattr(torch, dtype))


def bind(sizes: Sizes, layout: str, rank: int, device: torch.device, *, filled: bool) -> Fragments:
    """One rank's memory in a layout: with its values, or with others."""
    builder = FragmentsBuilder()
    for tensor, region in regions(sizes, layout, rank):
        views = []
        for k, state in enumerate(tensor.states):
            view = torch.full(region.shape, -1, dtype=getattr(torch, state.dtype), device=device)
            views.append(view.copy_(values(tensor, k, region, device)) if filled else view)
        builder.add(tensor, region, views)
    return builder.build()


def check(sizes: Sizes, layout: str, rank: int, fragments: Fragments) -> None:
    """Compare every element; raises :class:`Mismatch` for the first tensor that differs."""
    for (tensor, region), views in zip(regions(sizes, layout, rank), fragments.views, strict=True):
        for k, view in enumerate(views):
            wrong = int((view != values(tensor, k, region, view.device)).sum())
            if wrong:
                raise Mismatch(
                    f"rank {rank}: {wrong} of {view.numel()} elements of {tensor.name}, state "
                    f"{tensor.states[k].kind}, are wrong in {layout}"
                )


def plan_between(sizes: Sizes, a: str, b: str) -> Plan:
    """The plan from one layout to the other, the same on all ranks."""
    table = tuple(tensor for tensor, _, _ in tensors(sizes))

    def rosters(layout: str) -> RosterSet:
        found = []
        for rank in range(RANKS):
            builder = RosterBuilder()
            for tensor, region in regions(sizes, layout, rank):
                builder.add(tensor, region)
            found.append(builder.build())
        return RosterSet.merge(found, table)

    options = PlanOptions(staging_bytes=sizes.staging_bytes)
    return make_plan(rosters(a), rosters(b), Topology.single_node(RANKS), options)


# -- bandwidth -----------------------------------------------------------------------------------


def bandwidth(sizes: Sizes, device: torch.device) -> list[Line]:
    """Bytes read and written a second, and how much of a plain copy's that is."""
    cuda = device.type == "cuda"
    flat = torch.ones(sizes.copied_bytes // 4, device=device)
    other = torch.empty_like(flat)
    side = 4096 if cuda else 256
    matrix = flat[: flat.numel() // (4 * side) * 4 * side].view(-1, 4 * side)
    part, columns = matrix[:, :side], other[: matrix.shape[0] * side].view(-1, side)
    many = list(zip(other.split(1 << 16), flat.split(1 << 16), strict=True))
    host = torch.empty(flat.numel(), pin_memory=cuda)

    def foreach() -> None:
        torch._foreach_copy_([a for a, _ in many], [b for _, b in many])

    forms: list[tuple[str, Callable[[], object], int]] = [
        ("plain copy", lambda: other.copy_(flat), 2 * flat.nbytes),
        ("a quarter of the columns out", lambda: columns.copy_(part), 2 * columns.nbytes),
        ("… and back", lambda: part.copy_(columns), 2 * columns.nbytes),
        ("many parts of 256 KiB at once", foreach, 2 * flat.nbytes),
        ("to pinned host memory", lambda: host.copy_(flat, non_blocking=True), flat.nbytes),
        ("from pinned host memory", lambda: flat.copy_(host, non_blocking=True), flat.nbytes),
    ]
    lines: list[Line] = []
    plain = 0.0
    for name, work, nbytes in forms:
        rate = nbytes / statistics.median(_seconds(work, device, sizes.repeats))
        plain = plain or rate
        lines.append((name, f"{rate / 1e9:9.1f} GB/s  {rate / plain:5.2f} of a plain copy"))
    if cuda and (limit := _memory_limit(device)):
        lines.append(("memory limit by clock and width", f"{limit / 1e9:9.1f} GB/s"))
    return lines


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> Iterator[float]:
    work()  # the first call sets things up
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        yield time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_limit(device: torch.device) -> float:
    """Bytes a second that the memory could move; 0 where torch does not tell."""
    properties = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    width_bits = getattr(properties, "memory_bus_width", 0)
    return 2.0 * clock_khz * 1e3 * width_bits / 8  # two transfers a clock


# -- streams -------------------------------------------------------------------------------------


class StreamTransport(LocalTransport):
    """Ranks that are threads, messages copied on a stream of each rank's own, as NCCL does.

    ``wait`` lets the current stream wait and not the host. At random a message starts late.
    """

    def __init__(self, ends: LocalTransport, device: torch.device, seed: int) -> None:
        super().__init__(ends.rank, ends._mailboxes, ends._hosts)
        self.device = device
        self.random = random.Random(seed + ends.rank)
        self.wire = torch.cuda.Stream(device) if device.type == "cuda" else None

    def terms(self, peer: int, *, sending: bool) -> Terms:
        return Terms(part_bytes=1 << 19)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        if self.wire is None:
            return super().start(sends, receives)
        self.wire.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.wire):
            self.loiter()
            # The receiver copies from a copy, so that it need not tell when it has read.
            copies = [(peer, as_bytes(tensor).clone()) for peer, tensor in sends]
        ready = self.wire.record_event()
        for _, copy in copies:
            copy.ready = ready  # type: ignore[attr-defined]
        return _StreamTransfer(self, [self.put(*message) for message in copies], receives)

    def loiter(self) -> None:
        """Keep the current stream busy for a while, or not."""
        if self.random.random() < 0.5:
            torch.cuda._sleep(self.random.randrange(1, 4_000_000))


class _StreamTransfer(Transfer):
    def __init__(
        self,
        transport: StreamTransport,
        sent: Sequence[threading.Event],
        receives: Sequence[Message],
    ) -> None:
        self._transport, self._sent, self._receives = transport, sent, receives

    def wait(self, *, timeout_s: float) -> None:
        transport = self._transport
        wire = transport.wire
        assert wire is not None
        with torch.cuda.stream(wire):
            for peer, tensor in self._receives:
                parcel = transport.take(peer, timeout_s)
                wire.wait_event(parcel.tensor.ready)  # type: ignore[attr-defined]
                transport.loiter()
                as_bytes(tensor).copy_(parcel.tensor)
                parcel.tensor.record_stream(wire)
                parcel.taken.set()
        for taken in self._sent:
            taken.wait(timeout_s)
        torch.cuda.current_stream(transport.device).wait_stream(wire)


def streams(sizes: Sizes, device: torch.device) -> list[Line]:
    """Threads go from layout to layout and back, and begin before their state is there."""
    plans = [(a, b, plan_between(sizes, a, b)) for a, b in (("tp", "pp"), ("pp", "tp"))]
    lines: list[Line] = []
    for seed in range(sizes.repeats):
        ends = [StreamTransport(end, device, 100 * seed) for end in LocalTransport.mesh(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:
            seconds = list(pool.map(lambda end: _switch_on_streams(sizes, end, plans), ends))
        _wait(device)
        lines.append((f"run {seed}: every element equal", f"{max(seconds):6.3f} s"))
    return lines


def _switch_on_streams(
    sizes: Sizes, end: StreamTransport, plans: Sequence[tuple[str, str, Plan]]
) -> float:
    own = torch.cuda.Stream(end.device) if end.device.type == "cuda" else None
    begin = time.perf_counter()
    with torch.cuda.stream(own) if own else contextlib.nullcontext():
        for a, b, plan in plans:
            target = bind(sizes, b, end.rank, end.device, filled=False)
            if own:
                torch.cuda._sleep(end.random.randrange(1, 40_000_000))  # the state comes late
            source = bind(sizes, a, end.rank, end.device, filled=True)
            execute(plan, source, target, end, timeout_s=TIMEOUT_S)
            for views in source.views:  # whoever still reads it would see this
                for view in views:
                    view.fill_(-2)
            check(sizes, b, end.rank, target)
    return time.perf_counter() - begin


# -- host-staged ---------------------------------------------------------------------------------


def staged(sizes: Sizes, device: torch.device) -> list[Line]:
    """Processes whose state is on one GPU, over gloo."""
    # A process that has used CUDA cannot fork.
    context = multiprocessing.get_context("spawn" if device.type == "cuda" else "fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_staged_rank, args=(r, sizes, str(device), folder, results), daemon=True
            )
            for r in range(RANKS)
        ]
        for process in ranks:
            process.start()
        try:
            found = [_result(results, ranks) for _ in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()
    lines: list[Line] = []
    for number, (a, b) in enumerate((("tp", "pp"), ("pp", "tp"))):
        rows = [rows[number] for rows in found]
        slowest = max(rows, key=lambda row: row["total"])
        moved = sum(row["bytes"] for row in rows)
        split = ", ".join(f"{name} {slowest[name]:.3f}" for name in ("pack", "wire", "unpack"))
        lines.append((f"{a} to {b}: every element equal", f"{slowest['total']:6.3f} s ({split})"))
        lines.append(("  moved", f"{moved / 1e9:6.3f} GB"))
    return lines


def _result(results: Any, ranks: Sequence[Any]) -> list[dict[str, float]]:
    deadline = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            rank, rows, failure = results.get(timeout=1.0)
            if failure is not None:
                raise Mismatch(f"rank {rank}: {failure}")
            return list(rows)
        if dead := [r for r, process in enumerate(ranks) if process.exitcode not in (None, 0)]:
            raise Mismatch(f"rank {dead[0]} died")
    raise Mismatch(f"ranks have not ended within {2 * TIMEOUT_S:g} s")


def _staged_rank(rank: int, sizes: Sizes, device: str, folder: str, results: Any) -> None:
    try:
        results.put((rank, _switch_staged(rank, sizes, torch.device(device), folder), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    time.sleep(3600)  # the parent ends all: until then others may need this rank's sockets


def _switch_staged(
    rank: int, sizes: Sizes, device: torch.device, folder: str
) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    transport: Transport = connect(
        group, torch.device("cpu"), EngineTransport.torch, timeout_s=TIMEOUT_S
    )
    rows = []
    for a, b in (("tp", "pp"), ("pp", "tp")):
        plan = plan_between(sizes, a, b)
        source = bind(sizes, a, rank, device, filled=True)
        target = bind(sizes, b, rank, device, filled=False)
        dist.barrier()
        begin = time.perf_counter()
        report = execute(plan, source, target, transport, timeout_s=TIMEOUT_S)
        _wait(device)
        total = time.perf_counter() - begin
        check(sizes, b, rank, target)
        check_received(plan, source, target, transport, timeout_s=TIMEOUT_S)
        rows.append(
            {
                "total": total,
                "pack": report.pack_s,
                "wire": report.wire_s,
                "unpack": report.unpack_s,
                "bytes": float(report.received_bytes),
            }
        )
    return rows


# -- Megatron ------------------------------------------------------------------------------------


def megatron(sizes: Sizes, device: torch.device) -> list[Line]:
    """One rank, twice: never switched, and switched twice; float32 losses are compared."""
    from dynatrain_megatron.platform.flags import CPU_DEFAULTS

    rehearsal = device.type == "cpu"
    flags = [
        *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1"),
        *("--global-batch-size", "8", "--train-iters", "8", "--lr", "1e-3"),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"),
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--use-distributed-optimizer"),
        *("--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000"),
        *("--num-workers", "0"),
    ]
    if not rehearsal:  # neither Transformer Engine nor Apex is there
        for default in CPU_DEFAULTS:
            flags += default.words() if default.flag != "--distributed-backend" else []
    schedule = (
        "schedule=[{iteration: 3, layout: {mbs: 2}}, {iteration: 5, layout: {dist_opt: false}}]"
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name, overrides in (("static", []), ("switched", [schedule])):
            run_dir = Path(folder) / name
            cache = ["--data-cache-path", f"{folder}/cache"]
            asked = [f"run_dir={run_dir}", f"platform={device.type}", *overrides]
            _train([*flags, *cache, "--dynatrain", *asked])
            runs[name] = run_dir
        losses = {name: _losses(run_dir) for name, run_dir in runs.items()}
        events = (runs["switched"] / "events.jsonl").read_text().splitlines()
    switches = [json.loads(line) for line in events]
    if [switch.get("ok") for switch in switches] != [True, True]:
        raise Mismatch(f"not both switches were made: {switches}")
    pairs = list(zip(losses["static"], losses["switched"], strict=True))
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    if difference > 1e-6:
        raise Mismatch(f"losses differ by {difference:.1e} relative: {pairs}")
    lines: list[Line] = [
        (f"to {switch['target']}", f"{switch['stall_s']:6.3f} s without a step")
        for switch in switches
    ]
    return [*lines, ("largest difference of losses, relative", f"{difference:.1e}")]


def _train(argv: Sequence[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "dynatrain_megatron.plugin.pretrain_gpt", *argv]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    if done.returncode:
        raise Mismatch(f"the job failed:\n{(done.stdout + done.stderr)[-3000:]}")


def _losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "steps.jsonl").open()]


# -- all of it -----------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Sizes, torch.device], list[Line]]] = {
    "bandwidth": bandwidth,
    "streams": streams,
    "staged": staged,
    "megatron": megatron,
}


def main() -> int:
    """Run the parts, print a table, and write it where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the findings as JSON too")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("No CUDA device: nothing to show here. --rehearse runs the parts on the CPU.")
        return 0
    device = torch.device("cpu" if args.rehearse else "cuda:0")
    sizes = REHEARSAL if args.rehearse else ON_GPU
    name = "CPU (rehearsal)" if args.rehearse else torch.cuda.get_device_name(device)
    print(f"{name}, torch {torch.__version__}")
    found: dict[str, Any] = {}
    for part in args.parts:
        begin = time.perf_counter()
        try:
            lines, failure = PARTS[part](sizes, device), None
        except Exception as error:  # the other parts may still tell something
            traceback.print_exc()
            lines, failure = [], f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - begin
        print(f"\n{part} ({'FAILED' if failure else 'passed'} in {seconds:.1f} s)", flush=True)
        for what, value in [*lines, *([("failure", failure)] if failure else [])]:
            print(f"  {what:40s} {value}", flush=True)
        found[part] = {"seconds": seconds, "failure": failure, "lines": dict(lines)}
    if args.out is not None:
        where = machine.environment("torch", "numpy")
        args.out.write_text(json.dumps({"device": name, **where, "parts": found}, indent=2) + "\n")
    return 1 if any(part["failure"] for part in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
