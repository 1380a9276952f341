"""Switches against what a user would do instead, on real Megatron jobs of 4 CPU ranks.

    python benchmarks/switch_time.py                    # all parts; an idle machine with 24 GiB
    python benchmarks/switch_time.py --quick            # small models, under two minutes
    python benchmarks/switch_time.py --parts peers restart --dense 110M --moe 80M

Parts, each of which can be run by itself; results of parts that are left out stay in the file:

``peers``    every transition of :data:`CASES`, both ways, in several rounds; beside it, in the same
             processes, a checkpoint of the same state saved and loaded by Megatron on memory-backed
             and on real disk, weights moved by ``megatron.core.resharding``, and our own engine
             set as other tools work: each piece a message, the first holder sends, one window
``restart``  the job stopped with a save, and started in the other layout by torchrun
``sizes``    our switch alone over sizes of models: stall against bytes moved

A *first* switch is the first between its two layouts, a *repeated* one goes the same way once
more, and is given as a median. Times are those until the slowest rank is done. ``bound`` is the
bytes of the busiest rank over the bandwidth of the transport, measured in the same run, all ranks
sending and receiving. Writes ``switch_time.json``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import peers
import torch
import torch.distributed as dist
from jobs import (
    DENSE,
    MOE,
    TIMEOUT_S,
    Model,
    Pair,
    Switched,
    bandwidth,
    beside,
    bridge,
    fill,
    layout_flags,
    placing_of,
    plan_between,
    run_on_ranks,
    switch_to,
    timed,
    use,
)
from machine import RESULTS, environment, filesystem
from switch_report import PHASES, draw, line_of, rounded, table

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.config import EngineTransport, Verify
from dynatrain_megatron.engine import Fragments, Transport, execute
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions, Sources
from dynatrain_megatron.transition.switch import SwitchOptions

MOVING = ("pack", "wire", "unpack")


class Case(NamedTuple):
    """A transition, by the axes that it changes; on as many ranks, one axis makes room for another.

    ``restart`` says that a stopped and started job is measured, too. Not ``saves``: each rank of it
    gathers the whole optimizer to save it, for which there is not enough memory.
    """

    name: str
    family: str
    source: str
    target: str
    restart: bool = False
    saves: bool = True

    @property
    def layouts(self) -> tuple[ParallelLayout, ParallelLayout]:
        return ParallelLayout.parse(self.source), ParallelLayout.parse(self.target)


CASES = [
    Case("TP for DP", "dense", "tp2-dp2", "tp4", restart=True),
    Case("PP for DP", "dense", "pp2-dp2", "pp4"),
    Case("TP for PP", "dense", "tp4", "pp4"),
    Case("DP only: optimizer instances", "dense", "dp4", "dp4-instances2", saves=False),
    Case("VPP only", "dense", "pp2-dp2", "pp2-vpp2-dp2"),
    Case("hybrid: TP, PP, VPP, DP", "dense", "tp4", "pp2-vpp2-dp2", restart=True),
    Case("EP only", "MoE", "dp4-ep2", "dp4-ep4"),
    Case("VPP only", "MoE", "pp2-dp2-ep2", "pp2-vpp2-dp2-ep2"),
    Case("TP for PP", "MoE", "tp2-dp2-ep2-etp1-sp", "pp2-dp2-ep2"),
    Case("hybrid: TP, PP, EP", "MoE", "tp2-dp2-ep4-etp1-sp", "pp2-dp2-ep2", restart=True),
]
QUICK = {("TP for DP", "dense"), ("hybrid: TP, PP, VPP, DP", "dense"), ("EP only", "MoE")}
QUICK_RESTART = "hybrid: TP, PP, VPP, DP"
SIZES_CASE = Case("hybrid: TP, PP, VPP, DP", "dense", "tp4", "pp2-vpp2-dp2")

OURS = SwitchOptions(PlanOptions(), verify=Verify.auto.on("cpu"), timeout_s=TIMEOUT_S)
AS_PEERS = dataclasses.replace(
    OURS, plan=PlanOptions(staging_bytes=1 << 40, window_ops=1 << 20, sources=Sources.first)
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line says."""

    rounds: int
    dtype: str
    memory: Path
    disk: Path
    checkpoints: bool

    def flags(self, model: Model, layout: ParallelLayout) -> list[str]:
        return [*model.flags(), *layout_flags(layout), *([f"--{self.dtype}"] * self.is_half)]

    @property
    def is_half(self) -> bool:
        return self.dtype != "fp32"


# ------------------------------------------------------------------------------ on a rank


class Engines(NamedTuple):
    """Transports that switches are made with, by what they are called in the results."""

    ours: Transport
    torch: Transport
    as_peers: Transport

    @classmethod
    def connect(cls) -> Engines:
        ours, gloo = bridge(EngineTransport.auto), bridge(EngineTransport.torch)
        assert isinstance(gloo, peers.TorchTransport)
        return cls(ours, gloo, peers.Uncoalesced(gloo.group, gloo.device))

    def options(self, name: str) -> SwitchOptions:
        return AS_PEERS if name == "as_peers" else OURS

    def bandwidths(self) -> dict[str, list[float]]:
        """Measured now, in bytes a second; collective."""
        ours, gloo = bandwidth(self.ours), bandwidth(self.torch)
        return {"ours": [ours], "torch": [gloo], "as_peers": [gloo]}


def measure(job: Job, case: Case, settings: Settings) -> dict[str, Any]:
    """One case in a job of its own, launched in the source layout; on every rank."""
    fill(job)
    engines = Engines.connect()
    found: dict[str, Any] = {"ranks_bandwidth": engines.bandwidths()}
    with _without(ValueError, RuntimeError, KeyError, AssertionError) as problem:
        found["weights"] = _weights(job, case, engines)
    found.setdefault("weights", {"refused": problem})
    found["placement"] = placing_of(job).order(job.processes, case.layouts[1]).told
    found["switches"] = {
        name: _rounds(job, case, settings.rounds if name == "ours" else 2, engines, name)
        for name in engines._fields
    }
    for name, value in engines.bandwidths().items():
        found["ranks_bandwidth"][name] += value
    use(job, engines.ours)
    if settings.checkpoints and case.saves:
        found["checkpoint"] = {
            name: _checkpoint(job, case, directory)
            for name, directory in (("memory", settings.memory), ("disk", settings.disk))
        }
    return found


@contextlib.contextmanager
def _without(*errors: type[Exception]) -> Iterator[list[str]]:
    """Go on after these errors, and keep what they say."""
    said: list[str] = []
    try:
        yield said
    except errors as error:
        said.append(f"{type(error).__name__}: {str(error)[:300]}")


def _rounds(
    job: Job, case: Case, rounds: int, engines: Engines, name: str
) -> dict[str, list[dict[str, Any]]]:
    """There and back again, so often."""
    use(job, getattr(engines, name))
    found: dict[str, list[dict[str, Any]]] = {"there": [], "back": []}
    for _ in range(rounds):
        for way, layout in (("there", case.target), ("back", case.source)):
            found[way].append(_figures(switch_to(job, layout, engines.options(name))))
    return found


def _figures(switched: Switched) -> dict[str, Any]:
    report = switched.report
    return {
        "stall_s": switched.stall_s,
        "seconds": report.seconds,
        "bytes": report.bytes,
        "ops": report.ops,
        "rounds": report.rounds,
        "peak_extra_bytes": report.peak_extra_bytes,
        "planned_peak_extra_bytes": report.planned_peak_extra_bytes,
        "resident_extra_bytes": switched.resident,
    }


def _checkpoint(job: Job, case: Case, directory: Path) -> dict[str, Any]:
    """Save in the source layout, load in the target's, go back."""
    with contextlib.ExitStack() as stack:
        folder = [None]
        if dist.get_rank() == 0:
            folder = [stack.enter_context(tempfile.TemporaryDirectory(dir=directory))]
        dist.broadcast_object_list(folder, 0)
        checkpoint = peers.Checkpoint(Path(str(folder[0])), peers.format_flags(*case.layouts))
        save_s = checkpoint.save(job)
        switch_to(job, case.target, OURS)
        load_s, nbytes = checkpoint.load(job), checkpoint.nbytes()
        dist.barrier()
    switch_to(job, case.source, OURS)
    return {"save_s": save_s, "load_s": load_s, "bytes": nbytes}


def _weights(job: Job, case: Case, engines: Engines) -> dict[str, Any]:
    """Weights alone, from one model to the other: Megatron's resharding, and our engine."""
    if job.layout.vpp or case.layouts[1].vpp:
        raise ValueError("megatron.core.resharding moves the first model chunk only")

    def measure(pair: Pair, old: Fragments) -> dict[str, Any]:
        new = pair.target.weights()
        views = [view for slot in new.views for view in slot]
        resharding = peers.Resharding(pair.source, pair.target, engines.torch.group)
        found: dict[str, Any] = {"plan_s": {"megatron": resharding.plan_s}}
        plan_s, plan = timed(lambda: plan_between(old, new, engines.torch, OURS.plan))
        found["plan_s"]["ours"] = plan_s
        found["bytes"] = {"ours": plan.moved_bytes}
        found["seconds"] = {"megatron": [], "torch": [], "ours": []}
        for _ in range(3):
            seconds, sent = resharding.run()
            found["seconds"]["megatron"].append(seconds)
            theirs = [view.clone() for view in views]
            for name in ("torch", "ours"):
                for view in views:
                    view.zero_()
                transport = getattr(engines, name)
                seconds, _ = timed(lambda t=transport: execute(plan, old, new, t, timeout_s=60))
                found["seconds"][name].append(seconds)
        # Ours are right: switches between the same layouts are compared with Megatron's own
        # checkpoints, bit for bit, in the tests.
        wrong = sum(not torch.equal(a, b) for a, b in zip(theirs, views, strict=True))
        total = torch.tensor([sent, wrong, len(views)])
        dist.all_reduce(total)
        found["bytes"]["megatron"], found["wrong"], found["tensors"] = total.tolist()
        return found

    source = HostState(job.model, job.optimizer, job.args)
    old = source.weights()  # described while its own groups are in force
    return beside(job, case.target, lambda pair: measure(pair, old))


# ------------------------------------------------------------------------------ all ranks


def summary(case: Case, model: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One case out of what all ranks found; bytes and phases are the same on all or rank 0's."""
    first = ranks[0]
    result: dict[str, Any] = {
        **{name: getattr(case, name) for name in ("name", "family", "source", "target")},
        "model": model,
        "gb_s": {
            name: round(statistics.median(values) / 1e9, 3)
            for name, values in first["ranks_bandwidth"].items()
        },
    }
    result["switches"] = {}
    for name, ways in first["switches"].items():
        result["switches"][name] = {
            way: _of_rounds(
                [
                    [one["switches"][name][way][number] for one in ranks]
                    for number in range(len(rounds))
                ],
                result["gb_s"][name],
            )
            for way, rounds in ways.items()
        }
    result["weights"] = first["weights"]
    result["placement"] = first.get("placement")
    if "checkpoint" in first:
        result["checkpoint"] = first["checkpoint"]
    return result


def _of_rounds(rounds: list[list[dict[str, Any]]], gb_s: float) -> dict[str, Any]:
    """First and repeated of one way, each round as all ranks saw it."""
    lines = []
    for ranks in rounds:
        line = {name: ranks[0][name] for name in ("seconds", "bytes", "ops", "rounds")}
        line["stall_s"] = max(one["stall_s"] for one in ranks)
        for name in ("peak_extra_bytes", "planned_peak_extra_bytes", "resident_extra_bytes"):
            line[name] = max(one[name] for one in ranks)
        lines.append(line)
    later = lines[1:] or lines
    first, bytes_ = lines[0], lines[0]["bytes"]
    moving = statistics.median(sum(r["seconds"][p] for p in MOVING) for r in later)
    bound = max(bytes_["max_send"], bytes_["max_recv"]) / (gb_s * 1e9)
    return {
        "first_s": first["stall_s"],
        "repeated_s": statistics.median(r["stall_s"] for r in later),
        "first_seconds": first["seconds"],
        "seconds": {p: statistics.median(r["seconds"].get(p, 0.0) for r in later) for p in PHASES},
        "bytes": bytes_,
        "of_lower_bound": bytes_["moved"] / max(1, bytes_["lower_bound"]),
        "ops": first["ops"],
        "rounds": first["rounds"],
        "moving_s": moving,
        "bound_s": bound,
        "moving_of_bound": moving / bound if bound else None,
        **{
            name: max(r[name] for r in lines)
            for name in ("peak_extra_bytes", "planned_peak_extra_bytes", "resident_extra_bytes")
        },
    }


def run_peers(args: argparse.Namespace, settings: Settings) -> Iterator[dict[str, Any]]:
    """The part ``peers``: a job for each case."""
    for case in chosen(args):
        models, name = family_of(case, args)
        flags = settings.flags(models[name], case.layouts[0])
        with failures_told(case):
            ranks = run_on_ranks(
                flags, lambda job, own=case: measure(job, own, settings), timeout_s=3600
            )
            yield summary(case, name, ranks)


def run_restarts(args: argparse.Namespace, settings: Settings) -> Iterator[dict[str, Any]]:
    """The part ``restart``: two jobs for each case, one after the other."""
    for case in chosen(args):
        if not case.restart or (args.quick and case.name != QUICK_RESTART):
            continue
        models, model = family_of(case, args)
        source, target = (settings.flags(models[model], layout) for layout in case.layouts)
        form = peers.format_flags(*case.layouts)
        with failures_told(case):
            seconds = peers.restart(settings.memory, source, target, form)
            names = {name: getattr(case, name) for name in ("name", "family", "source", "target")}
            yield {**names, "model": model, "seconds": seconds}


def run_sizes(args: argparse.Namespace, settings: Settings) -> Iterator[dict[str, Any]]:
    """The part ``sizes``: a job for each size."""
    for name in args.sizes:
        flags = settings.flags(DENSE[name], SIZES_CASE.layouts[0])
        with failures_told(SIZES_CASE):
            ranks = run_on_ranks(flags, lambda job: _size(job, settings), timeout_s=1800)
            yield {**summary(SIZES_CASE, name, ranks), "parameters": DENSE[name].numel}


def _size(job: Job, settings: Settings) -> dict[str, Any]:
    fill(job)
    engines = Engines.connect()
    names = ("ours", "torch")
    return {
        "switches": {n: _rounds(job, SIZES_CASE, settings.rounds, engines, n) for n in names},
        "ranks_bandwidth": engines.bandwidths(),
        "weights": None,
    }


def family_of(case: Case, args: argparse.Namespace) -> tuple[dict[str, Model], str]:
    """The models of a case's family, and which of them to take."""
    return (DENSE, args.dense) if case.family == "dense" else (MOE, args.moe)


failed: list[Case] = []


@contextlib.contextmanager
def failures_told(case: Case) -> Iterator[None]:
    """Say what went wrong with a case, and go on to the next."""
    try:
        yield
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        failed.append(case)
        print(f"{case.family} {case.name}: {error}", file=sys.stderr, flush=True)


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases asked for."""
    cases = [case for case in CASES if not args.quick or (case.name, case.family) in QUICK]
    if args.only:
        cases = [case for case in cases if any(word in str(case) for word in args.only)]
    return cases


PARTS = {"peers": run_peers, "restart": run_restarts, "sizes": run_sizes}


def main() -> int:
    """Measure the parts asked for and write them beside those of earlier runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small models, under two minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", help="cases with one of these words")
    parser.add_argument("--dense", choices=DENSE, help="size of the dense model (200M)")
    parser.add_argument("--moe", choices=MOE, help="size of the MoE model (180M)")
    parser.add_argument("--sizes", nargs="+", choices=DENSE, help="sizes of the part sizes (all)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, help="of our switch, there and back (4)")
    parser.add_argument("--no-checkpoints", action="store_true", help="leave out save and load")
    parser.add_argument("--memory-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    args.dense = args.dense or ("10M" if args.quick else "200M")
    args.moe = args.moe or ("10M" if args.quick else "180M")
    args.sizes = args.sizes or (["10M", "30M"] if args.quick else list(DENSE))
    settings = Settings(
        args.rounds or (2 if args.quick else 4),
        args.dtype,
        args.memory_dir,
        args.disk_dir,
        not args.no_checkpoints,
    )
    where = environment("torch", "megatron-core", "numpy")
    where |= {"memory disk": filesystem(args.memory_dir), "real disk": filesystem(args.disk_dir)}
    where["state"] = f"{args.dtype} parameters, Adam, random values"
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / ("switch_time_quick" if args.quick else "switch_time")
    file = stem.with_suffix(".json")
    content = json.loads(file.read_text()) if file.exists() else {}
    for part in args.parts:
        results: list[dict[str, Any]] = []
        content[part] = {"environment": where, "results": results}
        for result in PARTS[part](args, settings):
            results.append(rounded(result))
            print(line_of(result), flush=True)
            file.write_text(json.dumps(content, indent=1) + "\n")
            stem.with_suffix(".md").write_text(table(content))
    with contextlib.suppress(ImportError):
        draw(content, stem.with_suffix(".png"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
