"""What each part of a switch is worth: each is switched off alone, on real Megatron jobs.

    python benchmarks/ablation.py             # 200M parameters, an idle machine with 24 GiB
    python benchmarks/ablation.py --quick     # 10M, under two minutes

Every row of :data:`ROWS` is a way to make a switch. In each round all rows take their turn there
and back twice, of which the second counts, so that what else the machine does meets all alike. A
row is compared with the row that it differs from in one thing. Transitions are :data:`CASES`; rows
that only matter where several ranks hold the same are measured on a job whose optimizer is not
distributed.

To add a part: a line in :data:`ROWS`. Writes ``ablation.json``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from jobs import (
    DENSE,
    TIMEOUT_S,
    bandwidth,
    bridge,
    fill,
    keep_layouts,
    layout_flags,
    placing_of,
    run_on_ranks,
    switch_to,
    use,
)
from machine import RESULTS, environment
from peers import Uncoalesced
from switch_report import PHASES as ALL_PHASES

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.config import EngineSchedule, EngineTransport, KeepSource, Verify
from dynatrain_megatron.engine import TorchTransport, Transport
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions, Sources
from dynatrain_megatron.transition.switch import SwitchOptions

PHASES = (*ALL_PHASES, "replicas")
MOVING = ("pack", "wire", "unpack")
BASE = SwitchOptions(PlanOptions(), timeout_s=TIMEOUT_S)
_MIB = 1 << 20


class Case(NamedTuple):
    """A transition and its way back."""

    source: str
    target: str

    @property
    def launch(self) -> ParallelLayout:
        return ParallelLayout.parse(self.source)


CASES = [Case("tp4", "pp2-dp2"), Case("tp2-dp2-noopt", "pp4-noopt")]


def planned(**values: Any) -> SwitchOptions:
    """The usual options, but for these of the plan."""
    return replace(BASE, plan=replace(BASE.plan, **values))


@dataclass(frozen=True, slots=True)
class Row:
    """A way to switch: how it differs from the row ``against``, and what it takes.

    ``transport`` is one of :func:`transports`; ``kept`` is how many layouts left are kept; with
    ``placed`` processes take the ranks with which the fewest bytes move.
    """

    name: str
    against: str | None
    options: SwitchOptions = BASE
    transport: str = "read"
    kept: int = 4
    placed: bool = False


ALL_ON, GLOO = "all on, memory read", "all on, gloo"
UNVERIFIED, GLOO_UNVERIFIED = "no verification", "gloo, no verification"
OFF, MESSAGES = (replace(BASE, verify=verify) for verify in (Verify.off, Verify.messages))
ROWS = [
    Row(ALL_ON, None),
    Row(UNVERIFIED, ALL_ON, OFF),
    Row("checksums of messages only", UNVERIFIED, MESSAGES),
    Row("replicas compared first", ALL_ON, replace(BASE, check_replicas=True)),
    Row("no layouts kept", ALL_ON, kept=0),
    Row("processes take other ranks", ALL_ON, placed=True),
    Row("not promoted", ALL_ON, planned(relay=False)),
    Row("memory freed stage by stage", ALL_ON, replace(BASE, keep_source=KeepSource.never)),
    Row("first holder sends all", ALL_ON, planned(sources=Sources.first)),
    Row("staging 16 MiB", ALL_ON, planned(staging_bytes=16 * _MIB)),
    Row("rings of shared memory", ALL_ON, transport="rings"),
    Row(GLOO, ALL_ON, transport="gloo"),
    Row(GLOO_UNVERIFIED, GLOO, OFF, "gloo"),
    Row("gloo, checksums of messages only", GLOO_UNVERIFIED, MESSAGES, "gloo"),
    Row("gloo, not coalesced", GLOO, transport="gloo, piece by piece"),
    Row("gloo, first holder sends all", GLOO, planned(sources=Sources.first), "gloo"),
    Row("gloo, staging 16 MiB", GLOO, planned(staging_bytes=16 * _MIB), "gloo"),
    Row("gloo, one window", GLOO, planned(staging_bytes=1 << 40, window_ops=1 << 20), "gloo"),
    Row("gloo, windows of 8 messages", GLOO, planned(window_ops=8), "gloo"),
    *(
        Row(f"gloo, schedule {name}", GLOO, planned(schedule=name), "gloo")
        for name in EngineSchedule
        if name is not BASE.plan.schedule
    ),
]


def transports() -> dict[str, Transport]:
    """By name; collective."""
    gloo = bridge(EngineTransport.torch)
    assert isinstance(gloo, TorchTransport)
    return {
        "read": bridge(EngineTransport.auto),
        "rings": bridge(EngineTransport.memfd),
        "gloo": gloo,
        "gloo, piece by piece": Uncoalesced(gloo.group, gloo.device),
    }


def measure(job: Job, case: Case, rounds: int) -> dict[str, Any]:
    """Every row right after the one it is held against, in every round; on every rank.

    What a machine is slower at in one minute than in another then disturbs both alike.
    """
    fill(job)
    ways, placing = transports(), placing_of(job)
    rows = {row.name: row for row in ROWS}
    lines: dict[str, list[dict[str, Any]]] = {row.name: [] for row in ROWS}
    against: dict[str, list[dict[str, Any]]] = {row.name: [] for row in ROWS}

    def there_and_back(row: Row, found: list[dict[str, Any]]) -> None:
        use(job, ways[row.transport])
        keep_layouts(job, row.kept)
        for turn, layout in enumerate((case.target, case.source) * 2):
            switched = switch_to(job, layout, row.options, placing if row.placed else None)
            if turn > 1:  # before, nothing is known of the other layout
                line = {"stall_s": switched.stall_s, **switched.report.seconds}
                line["staging"] = switched.report.planned_peak_extra_bytes
                line["max_send"] = switched.report.bytes["max_send"]
                found.append(line)

    there_and_back(ROWS[0], [])  # the first switches of a process are slower
    for _ in range(rounds):
        for row in ROWS:
            if row.against is not None:
                there_and_back(rows[row.against], against[row.name])
            there_and_back(row, lines[row.name])
    dist.barrier()
    return {
        "lines": lines,
        "against": against,
        "gb_s": {name: bandwidth(way) / 1e9 for name, way in ways.items() if "piece" not in name},
    }


def summary(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of every row, and what it costs more than the one it is held against."""
    found: dict[str, dict[str, Any]] = {}
    for row in ROWS:
        rounds, others = (
            list(zip(*(rank[which][row.name] for rank in ranks), strict=True))
            for which in ("lines", "against")
        )
        stalls, moving = _stalls(rounds), _moving(rounds)
        figures: dict[str, Any] = {
            "stall_s": statistics.median(stalls),
            "moving_s": statistics.median(moving),
            "seconds": {
                phase: statistics.median(one[0].get(phase, 0.0) for one in rounds)
                for phase in PHASES
            },
            "max_send_bytes": max(one[0]["max_send"] for one in rounds),
            "planned_peak_extra_bytes": max(line["staging"] for one in rounds for line in one),
            "against": row.against,
        }
        if row.against is not None:
            figures["stall_ratio"], figures["moving_ratio"] = (
                statistics.median(a / b for a, b in zip(own, other, strict=True))
                for own, other in ((stalls, _stalls(others)), (moving, _moving(others)))
            )
        found[row.name] = figures
    return {**case._asdict(), "gb_s": ranks[0]["gb_s"], "rows": found}


def _stalls(rounds: list[tuple[dict[str, Any], ...]]) -> list[float]:
    return [max(line["stall_s"] for line in one) for one in rounds]


def _moving(rounds: list[tuple[dict[str, Any], ...]]) -> list[float]:
    return [sum(one[0][phase] for phase in MOVING) for one in rounds]


# ------------------------------------------------------------------------ what is written


def table(content: dict[str, Any]) -> str:
    """All cases as Markdown."""
    made_by = ", ".join(f"{key} {value}" for key, value in content["environment"].items())
    text = "# What each part of a switch is worth\n\nSeconds, medians of repeated switches both "
    text += (
        "ways; ratios to the row held against, measured right before, medians over rounds.\n\n"
        + made_by
        + "\n"
    )
    for case in content["results"]:
        text += f"\n## {case['source']} ↔ {case['target']}\n\n"
        head = ["", "stall", "÷", "moving", "÷", *PHASES, "busiest sends, MB", "peak, MiB"]
        text += "| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|\n"
        for name, row in case["rows"].items():
            ratios = [f"{row[r]:.2f}" if r in row else "" for r in ("stall_ratio", "moving_ratio")]
            cells = [name, f"{row['stall_s']:.3f}", ratios[0], f"{row['moving_s']:.3f}", ratios[1]]
            cells += [f"{row['seconds'][phase]:.3f}" for phase in PHASES]
            cells += [f"{row['max_send_bytes'] / 1e6:.0f}"]
            cells += [f"{row['planned_peak_extra_bytes'] / _MIB:.0f}"]
            text += "| " + " | ".join(cells) + " |\n"
    return text


def draw(content: dict[str, Any], path: Path) -> None:
    """The stall of every row by phases."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cases = content["results"]
    figure, axes = pyplot.subplots(
        1, len(cases), figsize=(6 * len(cases), 4.6), layout="constrained", squeeze=False
    )
    for axis, case in zip(axes[0], cases, strict=True):
        names = list(case["rows"])
        left = [0.0] * len(names)
        for number, phase in enumerate(PHASES):
            seconds = [case["rows"][name]["seconds"][phase] for name in names]
            axis.barh(names, seconds, left=left, label=phase, color=f"C{number}")
            left = [a + b for a, b in zip(left, seconds, strict=True)]
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        axis.set_xlabel("seconds")
        axis.set_title(f"{case['source']} ↔ {case['target']}", fontsize=10)
    axes[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10M, one case, under two minutes")
    parser.add_argument("--model", choices=DENSE, help="size of the model (200M)")
    parser.add_argument("--cases", type=int, help="how many of the transitions (all)")
    parser.add_argument("--rounds", type=int, help="of all rows, there and back (3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    model = DENSE[args.model or ("10M" if args.quick else "200M")]
    rounds = args.rounds or (1 if args.quick else 3)
    results = []
    for case in CASES[: 1 if args.quick else args.cases]:
        flags = [*model.flags(), *layout_flags(case.launch), "--bf16"]
        if not case.launch.dist_opt:
            flags.remove("--use-distributed-optimizer")
        ranks = run_on_ranks(flags, lambda job, own=case: measure(job, own, rounds), timeout_s=3600)
        results.append(summary(case, ranks))
        for name, row in results[-1]["rows"].items():
            print(f"{case.source} <-> {case.target}  {name:30s} {row['stall_s']:.3f} s", flush=True)
        write(args, {"parameters": model.numel, "rounds": rounds}, results)
    return 0


def write(args: argparse.Namespace, made_by: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """What is measured by now."""
    content = {
        "environment": environment("torch", "megatron-core", "numpy") | made_by,
        "results": results,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / ("ablation_quick" if args.quick else "ablation")
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(content))
    with contextlib.suppress(ImportError):
        draw(content, stem.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
