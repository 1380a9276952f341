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
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
    plan_between,
    run_on_ranks,
    switch_to,
    timed,
    use,
)
from machine import RESULTS, environment, filesystem

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.engine import Fragments, Transport, execute
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions, Sources
from dynatrain_megatron.transition.switch import SwitchOptions

PHASES = ("prepare", "quiesce", "groups", "build", "plan", "pack", "wire", "unpack", "rebuild")
PHASES = (*PHASES, "verify", "commit", "other")
MOVING = ("pack", "wire", "unpack")


class Case(NamedTuple):
    """A transition, by the axes that it changes; on as many ranks, one axis makes room for another.

    ``restart`` says that a stopped and started job is measured, too.
    """

    name: str
    family: str
    source: str
    target: str
    restart: bool = False

    @property
    def layouts(self) -> tuple[ParallelLayout, ParallelLayout]:
        return ParallelLayout.parse(self.source), ParallelLayout.parse(self.target)


CASES = [
    Case("TP for DP", "dense", "tp2-dp2", "tp4", restart=True),
    Case("PP for DP", "dense", "pp2-dp2", "pp4"),
    Case("TP for PP", "dense", "tp4", "pp4"),
    Case("DP only: optimizer instances", "dense", "dp4", "dp4-instances2"),
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

OURS = SwitchOptions(PlanOptions(), timeout_s=TIMEOUT_S)
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


def measure_cases(job: Job, cases: Sequence[Case], settings: Settings) -> list[dict[str, Any]]:
    """Every case of one family of models; on every rank."""
    fill(job)
    engines = Engines.connect()
    found = []
    for case in cases:
        use(job, engines.ours)
        if str(job.layout) != case.source:
            switch_to(job, case.source, OURS)
        found.append(_measure(job, case, settings, engines))
    return found


def _measure(job: Job, case: Case, settings: Settings, engines: Engines) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks_bandwidth": engines.bandwidths()}
    with _without(ValueError, RuntimeError, KeyError, AssertionError) as problem:
        found["weights"] = _weights(job, case, engines)
    found.setdefault("weights", {"refused": problem})
    found["switches"] = {
        name: _rounds(job, case, settings.rounds if name == "ours" else 2, engines, name)
        for name in engines._fields
    }
    for name, value in engines.bandwidths().items():
        found["ranks_bandwidth"][name] += value
    use(job, engines.ours)
    if settings.checkpoints:
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


def run_peers(args: argparse.Namespace, settings: Settings) -> list[dict[str, Any]]:
    """The part ``peers``: a job for each family, through all of its cases."""
    results = []
    for family, name, models in (("dense", args.dense, DENSE), ("MoE", args.moe, MOE)):
        cases = [case for case in chosen(args) if case.family == family]
        if not cases:
            continue
        flags = settings.flags(models[name], cases[0].layouts[0])
        ranks = run_on_ranks(
            flags, lambda job, own=cases: measure_cases(job, own, settings), timeout_s=7200
        )
        for number, case in enumerate(cases):
            results.append(summary(case, name, [rank[number] for rank in ranks]))
            print(line_of(results[-1]), flush=True)
    return results


def run_restarts(args: argparse.Namespace, settings: Settings) -> list[dict[str, Any]]:
    """The part ``restart``: two jobs for each case, one after the other."""
    results = []
    for case in chosen(args):
        if not case.restart or (args.quick and case.name != QUICK_RESTART):
            continue
        models, name = (DENSE, args.dense) if case.family == "dense" else (MOE, args.moe)
        source, target = (settings.flags(models[name], layout) for layout in case.layouts)
        seconds = peers.restart(settings.memory, source, target, peers.format_flags(*case.layouts))
        key = {name: getattr(case, name) for name in ("name", "family", "source", "target")}
        results.append({**key, "model": name, "seconds": seconds})
        print(f"{case.family:6s} {case.name:30s} stop, save, restart, load {seconds}", flush=True)
    return results


def run_sizes(args: argparse.Namespace, settings: Settings) -> list[dict[str, Any]]:
    """The part ``sizes``: a job for each size."""
    alone = dataclasses.replace(settings, checkpoints=False)
    results = []
    for name in args.sizes:
        flags = settings.flags(DENSE[name], SIZES_CASE.layouts[0])
        ranks = run_on_ranks(flags, lambda job: _size(job, alone), timeout_s=1800)
        result = summary(SIZES_CASE, name, ranks)
        results.append({**result, "parameters": DENSE[name].numel})
        print(line_of(results[-1]), flush=True)
    return results


def _size(job: Job, settings: Settings) -> dict[str, Any]:
    fill(job)
    engines = Engines.connect()
    names = ("ours", "torch")
    return {
        "switches": {n: _rounds(job, SIZES_CASE, settings.rounds, engines, n) for n in names},
        "ranks_bandwidth": engines.bandwidths(),
        "weights": None,
    }


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases asked for."""
    cases = [case for case in CASES if not args.quick or (case.name, case.family) in QUICK]
    if args.only:
        cases = [case for case in cases if any(word in str(case) for word in args.only)]
    return cases


# ------------------------------------------------------------------------ what is written


def line_of(result: dict[str, Any]) -> str:
    """One line about one case."""
    there = result["switches"]["ours"]["there"]
    text = (
        f"{result['family']:6s} {result['name']:30s} {result['model']:>5s}"
        f"  {there['bytes']['moved'] / 1e6:8.1f} MB  first {there['first_s']:7.3f} s"
        f"  repeated {there['repeated_s']:7.3f} s  moving {there['moving_s']:6.3f} s"
        f" = {there['moving_of_bound']:.2f} x bound"
    )
    if "checkpoint" in result:
        text += f"  checkpoint {_save_and_load(result, 'memory'):7.2f} s"
    return text


def _save_and_load(result: dict[str, Any], where: str) -> float:
    seconds: float = sum(result["checkpoint"][where][name] for name in ("save_s", "load_s"))
    return seconds


def table(content: dict[str, Any]) -> str:
    """All parts as Markdown."""
    lines = ["# Switches against what a user would do instead", ""]
    for part in ("peers", "restart", "sizes"):
        if part in content:
            made_by = content[part]["environment"]
            lines += [f"`{part}`: " + ", ".join(f"{k} {v}" for k, v in made_by.items()), ""]
    lines += _goals_table(content)
    if "peers" in content:
        lines += _peers_tables(content["peers"]["results"])
    if "restart" in content:
        lines += _restart_table(content)
    if "sizes" in content:
        lines += _sizes_table(content["sizes"]["results"])
    return "\n".join(lines) + "\n"


def _rows(head: str, rows: Iterator[list[str]]) -> list[str]:
    columns = head.split("|")
    lines = ["| " + " | ".join(c.strip() for c in columns) + " |", "|---" * len(columns) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _name(result: dict[str, Any]) -> list[str]:
    return [
        f"{result['name']}, {result['family']} {result['model']}",
        f"{result['source']} → {result['target']}",
    ]


def goals(content: dict[str, Any]) -> Iterator[tuple[str, float, float, str]]:
    """(what, what is wanted, the least found, of which case); ratios of the other to ours."""
    cases = content.get("peers", {"results": []})["results"]
    ours = {_key(one): one["switches"]["ours"]["there"] for one in cases}
    found: dict[tuple[str, float], list[tuple[float, str]]] = {}
    for one in cases:
        if "checkpoint" in one:
            ratio = _save_and_load(one, "memory") / ours[_key(one)]["repeated_s"]
            goal = "save to memory-backed disk + load ÷ repeated switch", 30.0
            found.setdefault(goal, []).append((ratio, " ".join(_name(one))))
        if "seconds" in one["weights"] and not one["weights"]["wrong"]:
            seconds = {n: statistics.median(s) for n, s in one["weights"]["seconds"].items()}
            nbytes = one["weights"]["bytes"]
            for name, ratio in (
                ("megatron.core.resharding ÷ our weights", seconds["megatron"] / seconds["ours"]),
                ("its bytes ÷ ours", nbytes["megatron"] / max(1, nbytes["ours"])),
            ):
                found.setdefault((name, 1.0), []).append((ratio, " ".join(_name(one))))
    for one in content.get("restart", {"results": []})["results"]:
        for name, wanted in (("first", 30.0), ("repeated", 50.0)):
            if _key(one) in ours:
                ratio = one["seconds"]["total"] / ours[_key(one)][f"{name}_s"]
                goal = f"stop, save, restart, load ÷ {name} switch", wanted
                found.setdefault(goal, []).append((ratio, " ".join(_name(one))))
    for (what, wanted), ratios in found.items():
        yield what, wanted, *min(ratios)


def _key(result: dict[str, Any]) -> tuple[str, ...]:
    return tuple(result[name] for name in ("name", "family", "model"))


def _goals_table(content: dict[str, Any]) -> list[str]:
    rows = (
        [what, f"{wanted:g}", f"{least:.2f}", where]
        for what, wanted, least, where in goals(content)
    )
    return ["## Goals", "", *_rows("times slower | wanted | least found | where", rows)]


def _peers_tables(results: list[dict[str, Any]]) -> list[str]:
    def switches() -> Iterator[list[str]]:
        for one in results:
            there = one["switches"]["ours"]["there"]
            yield [
                *_name(one),
                f"{there['bytes']['moved'] / 1e6:.0f} MB",
                f"{there['of_lower_bound']:.3f}",
                f"{there['first_s']:.3f}",
                f"{there['repeated_s']:.3f}",
                *(f"{there['seconds'][phase]:.3f}" for phase in PHASES),
                f"{there['moving_of_bound']:.2f}",
                f"{there['peak_extra_bytes'] / 2**20:.0f}",
                f"{there['planned_peak_extra_bytes'] / 2**20:.0f}",
            ]

    def checkpoints() -> Iterator[list[str]]:
        for one in results:
            if "checkpoint" not in one:
                continue
            there = one["switches"]["ours"]["there"]
            memory, disk = (_save_and_load(one, where) for where in ("memory", "disk"))
            found = one["checkpoint"]["memory"]
            yield [
                *_name(one),
                f"{found['bytes'] / 1e6:.0f} MB",
                f"{found['save_s']:.2f} + {found['load_s']:.2f}",
                f"{disk:.2f}",
                f"{memory / there['first_s']:.1f}",
                f"{memory / there['repeated_s']:.1f}",
                f"{disk / there['repeated_s']:.1f}",
            ]

    def weights() -> Iterator[list[str]]:
        for one in results:
            found = one["weights"]
            if "refused" in found:
                yield [*_name(one), " ".join(found["refused"]), *[""] * 5]
                continue
            seconds = {name: statistics.median(s) for name, s in found["seconds"].items()}
            right = not found["wrong"]
            yield [
                *_name(one),
                f"{seconds['megatron']:.4f}" if right else f"wrong in {found['wrong']} tensors",
                f"{seconds['torch']:.4f}",
                f"{seconds['ours']:.4f}",
                f"{seconds['megatron'] / seconds['torch']:.2f}" if right else "",
                f"{seconds['megatron'] / seconds['ours']:.2f}" if right else "",
                f"{found['bytes']['ours'] / 1e6:.1f} / {found['bytes']['megatron'] / 1e6:.1f}",
            ]

    def engines() -> Iterator[list[str]]:
        for one in results:
            ways = {name: found["there"] for name, found in one["switches"].items()}
            yield [
                *_name(one),
                *(f"{way['moving_s']:.3f}" for way in ways.values()),
                *(f"{way['moving_of_bound']:.2f}" for way in ways.values()),
                *(f"{way['repeated_s']:.3f}" for way in ways.values()),
            ]

    return [
        "## Our switch",
        "",
        "Seconds; phases are medians of repeated switches. *of bound* is pack + wire + unpack over",
        "the busiest rank's bytes at the measured bandwidth; peaks are MiB beyond the old state.",
        "",
        *_rows(
            f"transition | layouts | moved | of least bytes | first | repeated | "
            f"{' | '.join(PHASES)} | of bound | peak | planned",
            switches(),
        ),
        "## Against save and load in the same processes",
        "",
        *_rows(
            "transition | layouts | checkpoint | memory: save + load, s | real disk, s | "
            "÷ first | ÷ repeated | real disk ÷ repeated",
            checkpoints(),
        ),
        "## Weights alone, against megatron.core.resharding",
        "",
        "Seconds of a repeated transfer, plan made. *gloo* is our engine over the same group.",
        "",
        *_rows(
            "transition | layouts | Megatron | gloo | ours | Megatron ÷ gloo | Megatron ÷ ours | "
            "MB moved, ours / Megatron",
            weights(),
        ),
        "## Our engine set as other tools work",
        "",
        "*as peers*: over gloo, each piece a message, the first holder sends, one window.",
        "",
        *_rows(
            "transition | layouts | moving s: ours | gloo | as peers | of bound: ours | gloo | "
            "as peers | repeated s: ours | gloo | as peers",
            engines(),
        ),
    ]


def _restart_table(content: dict[str, Any]) -> list[str]:
    switches = {
        _key(one): one["switches"]["ours"]["there"]
        for one in content.get("peers", {"results": []})["results"]
    }

    def rows() -> Iterator[list[str]]:
        for one in content["restart"]["results"]:
            seconds = one["seconds"]
            ours = switches.get(_key(one))
            yield [
                *_name(one),
                *(f"{seconds[name]:.2f}" for name in ("save", "end", "start", "total")),
                *(
                    f"{seconds['total'] / ours[name]:.1f}" if ours else ""
                    for name in ("first_s", "repeated_s")
                ),
            ]

    head = "transition | layouts | save | end | start | total, s | ÷ first | ÷ repeated"
    return ["## Against stop, save, restart, load", "", *_rows(head, rows())]


def _sizes_table(results: list[dict[str, Any]]) -> list[str]:
    def rows() -> Iterator[list[str]]:
        for one in results:
            ours, gloo = (one["switches"][name]["there"] for name in ("ours", "torch"))
            yield [
                f"{one['parameters'] / 1e6:.0f} M",
                f"{ours['bytes']['moved'] / 1e6:.0f} MB",
                *(f"{ours[name]:.3f}" for name in ("first_s", "repeated_s", "moving_s")),
                f"{ours['moving_of_bound']:.2f}",
                f"{gloo['repeated_s']:.3f}",
                f"{gloo['moving_of_bound']:.2f}",
                f"{ours['resident_extra_bytes'] / 2**20:.0f}",
            ]

    head = (
        "parameters | moved | first s | repeated s | moving s | of bound | gloo: repeated s | "
        "of bound | resident MiB more"
    )
    case = f"{SIZES_CASE.source} → {SIZES_CASE.target}"
    return ["## Stall against bytes moved", "", case, "", *_rows(head, rows())]


def draw(content: dict[str, Any], path: Path) -> None:
    """Seconds by transition, and stall against bytes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    if "peers" in content:
        _draw_peers(left, content)
    if "sizes" in content:
        _draw_sizes(right, content["sizes"]["results"])
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_peers(axis: Any, content: dict[str, Any]) -> None:
    results = content["peers"]["results"]
    restarts = {
        (one["name"], one["family"]): one["seconds"]["total"]
        for one in content.get("restart", {"results": []})["results"]
    }
    marks: list[tuple[str, str, Callable[[dict[str, Any]], float | None]]] = [
        ("repeated switch", "o", lambda r: r["switches"]["ours"]["there"]["repeated_s"]),
        ("first switch", "D", lambda r: r["switches"]["ours"]["there"]["first_s"]),
        ("save + load, memory", "s", lambda r: _save_and_load(r, "memory")),
        ("save + load, disk", "^", lambda r: _save_and_load(r, "disk")),
        ("restart", "*", lambda r: restarts.get((r["name"], r["family"]))),
    ]
    for number, (label, mark, value) in enumerate(marks):
        points = [
            (seconds, place)
            for place, one in enumerate(results)
            if ("checkpoint" in one or number < 2) and (seconds := value(one)) is not None
        ]
        if points:
            axis.plot(*zip(*points, strict=True), mark, color=f"C{number}", label=label)
    names = [f"{r['name']}\n{r['family']} {r['source']} → {r['target']}" for r in results]
    axis.set_yticks(range(len(results)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("seconds without a training step")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _draw_sizes(axis: Any, results: list[dict[str, Any]]) -> None:
    ways = [one["switches"]["ours"]["there"] for one in results]
    moved = [way["bytes"]["moved"] / 1e9 for way in ways]
    for number, (name, label) in enumerate(
        (
            ("first_s", "first switch"),
            ("repeated_s", "repeated switch"),
            ("moving_s", "pack + wire + unpack"),
            ("bound_s", "bound: busiest rank's bytes ÷ bandwidth"),
        )
    ):
        axis.plot(moved, [way[name] for way in ways], "o-", color=f"C{number}", label=label)
    for x, one, way in zip(moved, results, ways, strict=True):
        axis.annotate(one["model"], (x, way["first_s"]), fontsize=7, xytext=(3, 3),
                      textcoords="offset points")  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("GB moved")
    axis.set_ylabel("seconds")
    axis.set_title(f"{SIZES_CASE.source} → {SIZES_CASE.target}", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def rounded(value: Any) -> Any:
    """Floats to the microsecond, in all of a tree."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


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
        results = rounded(PARTS[part](args, settings))
        content[part] = {"environment": where, "results": results}
        file.write_text(json.dumps(content, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(content))
    with contextlib.suppress(ImportError):
        draw(content, stem.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
