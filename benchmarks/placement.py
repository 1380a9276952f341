"""What the best placement saves over every process keeping its rank, on plan_scale's transitions.

    python benchmarks/placement.py            # up to 16,384 ranks
    python benchmarks/placement.py --quick    # up to 1,024 ranks, under a minute

One process, one core, no ranks, nothing moved: bytes are exact, seconds on the wire are predicted
from the speeds below, which are assumed and not measured. ``place_s`` is the least process time of
three runs of :func:`dynatrain_megatron.planner.place`, predictions included. Writes
``placement.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from plan_scale import CASES, RANKS_PER_NODE, RESULTS, Case, Rosters, environment, least

from dynatrain_megatron.planner import Speeds, Topology, place

SPEEDS = Speeds(operation_s=20e-6, near_gb_s=180, far_gb_s=22)
"""About nine tenths of NVLink with 200 GB/s each way, and of an adapter with 200 Gb/s a rank."""


def measure(case: Case) -> dict[str, Any]:
    """All figures of one transition."""
    rosters = Rosters.of(case)
    topology = dataclasses.replace(Topology.of_nodes(case.ranks, RANKS_PER_NODE), speeds=SPEEDS)
    load = os.getloadavg()[0]
    place_s, found = least(3, lambda: place(*rosters, topology))
    return {
        "model": case.model,
        "ranks": case.ranks,
        "source": case.source,
        "target": case.target,
        "states": "weights" if case.weights_only else "optimizer",
        "overlap": case.overlap,
        "place_s": round(place_s, 4),
        "load": load,
        "bytes": {"best": found.moved_bytes, "identity": found.identity_bytes},
        "best_over_identity": round(found.moved_bytes / found.identity_bytes, 4),
        "seconds": {
            "best": round(found.seconds, 6),
            "identity": round(found.identity_seconds, 6),
        },
    }


def row(result: dict[str, Any]) -> str:
    """One line about one transition."""
    what = result["states"] + (", overlap" if result["overlap"] else "")
    sizes, seconds = result["bytes"], result["seconds"]
    return (
        f"{result['model']:>5s} {result['ranks']:>6d} {result['source']:>24s} -> "
        f"{result['target']:28s} {what:18s} {sizes['identity'] / 1e9:9.1f} GB"
        f" x {result['best_over_identity']:.3f} = {sizes['best'] / 1e9:9.1f} GB"
        f"  wire {seconds['identity'] * 1e3:7.1f} -> {seconds['best'] * 1e3:7.1f} ms"
        f"  found in {result['place_s']:6.3f} s"
    )


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 1,024 ranks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    results = []
    for case in CASES:
        if case.ranks <= 1024 or not args.quick:
            results.append(measure(case))
            print(row(results[-1]), flush=True)
    content = {
        "environment": environment(),
        "assumed": {"ranks_per_node": RANKS_PER_NODE, **dataclasses.asdict(SPEEDS)},
        "results": results,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / ("placement_quick.json" if args.quick else "placement.json")
    path.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
