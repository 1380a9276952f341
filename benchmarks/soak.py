"""Many random transitions, one in ten with a fault: is a bit wrong, a fault missed, a job lost?

engine      1,000 transitions of made-up jobs of up to 16 processes (tests/soak/engine.py), each
            element of each target compared with bits that were drawn for it, by a transport that
            delivers late and in parts, with freed and reused memory overwritten
megatron    100 switches of real Megatron jobs on 4 CPU ranks (tests/soak/megatron.py), each held
            against Megatron's own checkpoint, or, where it was called off, against the job before

Either ends with one line, and exit code 1 where anything is not as it must be. With ``--out`` it is
added to a file of results, and a page of the same name shows what is there.

    python benchmarks/soak.py --quick
    python benchmarks/soak.py --part engine --out benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import machine  # noqa: E402
from dynatrain_megatron import platform  # noqa: E402

COUNTS = {"engine": 1000, "megatron": 100}
QUICK = {"engine": 40, "megatron": 8}


def engine(count: int, seed: int) -> dict[str, Any]:
    """Made-up jobs."""
    from tests.soak.engine import PROCESSES, Outcome, soak

    torch.set_num_threads(1)

    def tell(outcome: Outcome, seconds: float) -> None:
        wanted = outcome.transition
        if outcome.wrong or wanted.number % 50 == 49:
            where = f"{wanted.family}: {wanted.source} -> {wanted.target}"
            said = "; ".join(outcome.wrong[:5]) or outcome.result
            print(f"{wanted.number:5d}  {seconds:5.1f} s  {where}: {said}", flush=True)

    outcomes = soak(count, seed, tell=tell)
    wanted = [outcome.transition for outcome in outcomes]
    settings = {
        name: _counts(str(getattr(each, name)) for each in wanted)
        for name in ("family", "schedule", "verify", "frees", "relay", "staging_bytes", "own_plans")
    }
    return {
        "transitions": len(outcomes),
        "wrong": [outcome.as_json() for outcome in outcomes if outcome.wrong],
        "layouts": sorted({each.source for each in wanted} | {each.target for each in wanted}),
        "pairs": len({(each.family, each.source, each.target) for each in wanted}),
        "processes": PROCESSES,
        "settings": settings,
        "results": _counts(outcome.result for outcome in outcomes),
        "faults": _faults(
            (f"{each.fault[1]} in phase {each.fault[0]}", outcome.fired, outcome.result)
            for each, outcome in zip(wanted, outcomes, strict=True)
            if each.fault is not None
        ),
        "messages": sum(outcome.messages for outcome in outcomes),
        "moved_bytes": sum(outcome.moved_bytes for outcome in outcomes),
        "checked_bytes": sum(outcome.checked_bytes for outcome in outcomes),
    }


def megatron(count: int, seed: int) -> dict[str, Any]:
    """Real jobs."""
    from tests.soak.megatron import RANKS, soak

    with tempfile.TemporaryDirectory() as folder:
        lines = soak(count, seed, Path(folder))
    for line in lines:
        if line["wrong"]:
            print(f"{line['family']}: {line['source']} -> {line['target']}: {line['wrong'][:5]}")
    return {
        "transitions": len(lines),
        "wrong": [line for line in lines if line["wrong"]],
        "layouts": sorted({line[end] for line in lines for end in ("source", "target")}),
        "pairs": len({(line["family"], line["source"], line["target"]) for line in lines}),
        "processes": RANKS,
        "settings": {"family": _counts(line["family"] for line in lines)},
        "results": _counts("done" if line["result"] == "done" else "aborted" for line in lines),
        "faults": _faults(
            (line["fault"], line["fired"], line["result"]) for line in lines if line["fault"]
        ),
        "checked_tensors": sum(line["compared"] for line in lines),
    }


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def _faults(found: Iterable[tuple[str, bool, str]]) -> dict[str, dict[str, int]]:
    """By what was injected: how often it was to be, was, and what became of the transition."""
    rows: dict[str, Counter[str]] = {}
    for name, fired, result in found:
        row = rows.setdefault(name, Counter())
        row["wanted"] += 1
        if fired:
            row.update(["happened", "aborted" if result == "SwitchAborted" else result])
    return {name: dict(rows[name]) for name in sorted(rows)}


def page(content: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Random transitions, one in ten with a fault", ""]
    lines += [
        "Written by `benchmarks/soak.py`; what each part does is said there. *Wrong* is anything "
        "that must not be: an element that differs, a fault that nobody noticed, state lost by "
        "one, more memory or bytes than planned, a rank that hangs.",
        "",
    ]
    for part, both in content.items():
        found, where = both["results"], both["environment"]
        lines += [
            f"## {part}",
            "",
            f"**{found['transitions']} transitions, {len(found['wrong'])} wrong.** Seed "
            f"{where['seed']}, {where['seconds']:.0f} s, commit {where['commit']}, torch "
            f"{where['torch']}, megatron-core {where['megatron-core']}, Python {where['python']}.",
            "",
            "| what | how many |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in _figures(found)),
            "",
            "| fault | wanted | happened | called off, source whole | parts of the source gone, "
            "taken back | else |",
            "|---|---|---|---|---|---|",
            *_fault_rows(found),
            "",
            f"Layouts: {', '.join(f'`{name}`' for name in found['layouts'])}.",
            "",
        ]
    return "\n".join(lines)


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("layouts; different transitions", f"{len(found['layouts'])}; {found['pairs']}"),
        ("results", _listed(found["results"])),
        ("processes at most", f"{found['processes']}"),
    ]
    rows += [(name, _listed(counts)) for name, counts in found["settings"].items()]
    for name, unit, scale in (
        ("messages", "", 1),
        ("moved_bytes", " GB", 1e9),
        ("checked_bytes", " GB", 1e9),
        ("checked_tensors", "", 1),
    ):
        if name in found:
            rows.append((name.replace("_", " "), f"{found[name] / scale:,.0f}{unit}"))
    return rows


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _fault_rows(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, row in found["faults"].items():
        aborted, back = row.get("aborted", 0), row.get("taken back", 0) + row.get("split", 0)
        happened = row.get("happened", 0)
        counts = (row["wanted"], happened, aborted, back, happened - aborted - back)
        rows.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return rows


def run(part: str, count: int, seed: int, out: Path | None) -> bool:
    """One part; whether all was well."""
    begin = time.monotonic()
    found = {"engine": engine, "megatron": megatron}[part](count, seed)
    seconds = time.monotonic() - begin
    print(
        f"{part}: {found['transitions']} transitions over {len(found['layouts'])} layouts in "
        f"{seconds:.0f} s, {len(found['wrong'])} wrong; seed {seed}",
        flush=True,
    )
    if out is not None:
        machine.keep(out, part, found, seed=seed, seconds=round(seconds, 1))
        out.with_suffix(".md").write_text(page(json.loads(out.read_text())))
    return not found["wrong"]


def main(argv: Sequence[str] | None = None) -> int:
    """Both parts, or one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=list(COUNTS), help="one of both only")
    parser.add_argument("--quick", action="store_true", help="few of each, about two minutes")
    parser.add_argument("--count", type=int, help="so many transitions of each part")
    parser.add_argument("--seed", type=int, default=0, help="what all choices are drawn from")
    parser.add_argument("--out", type=Path, help="file of results to put these into")
    args = parser.parse_args(argv)
    faulthandler.enable()
    platform.install("cpu")
    counts = QUICK if args.quick else COUNTS
    parts = [args.part] if args.part else list(COUNTS)
    good = [run(part, args.count or counts[part], args.seed, args.out) for part in parts]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
