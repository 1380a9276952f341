"""Time and memory of planning, against the number of ranks and the size of the model.

    python benchmarks/plan_scale.py            # all sizes, up to 16,384 ranks
    python benchmarks/plan_scale.py --quick    # up to 1,024 ranks, under two minutes

One process, one core, no ranks: rosters are synthetic (:mod:`dynatrain_megatron.shapes`), and a
rank plans as it does in a switch. Writes ``plan_scale.json``, and ``plan_scale.png`` where
matplotlib is installed. Times are the least of several runs, in seconds of the process's own time;
``load`` is how busy the machine was with other work meanwhile.

What is measured:

``own``       a rank's own plan from the roster sets of all: what each rank does in a switch
``cached``    the same again
``whole``     the plan of all ranks at once, as tests and tools make it (not for the largest)
``peak_mib``  the most memory that the own plan took
``rosters``   the rosters of all ranks made from sizes
``encode``    one rank's rosters of both layouts made into bytes
``decode``    all ranks' bytes of both layouts read and merged, with digests: what each rank does
              with what it has received, before it plans
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import RESULTS, environment

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Plan, PlanCache, PlanOptions, Topology, make_plan
from dynatrain_megatron.shapes import MODELS, make_rosters
from dynatrain_megatron.vps import Roster, RosterSet
from dynatrain_megatron.vps.roster import union_of_tensors

RANKS_PER_NODE = 8


class Case(NamedTuple):
    """A transition; ``ranks`` of both layouts must be equal."""

    model: str
    source: str
    target: str
    weights_only: bool = False
    overlap: bool = False

    @property
    def ranks(self) -> int:
        return ParallelLayout.parse(self.source).world


CASES = [
    Case("1B", "dp8", "tp2-dp4"),
    Case("1B", "tp2-dp32", "dp64"),
    Case("7B", "tp2-dp4", "tp4-pp2"),
    Case("7B", "tp2-pp2-dp16", "tp4-dp16"),
    Case("7B", "tp2-dp128", "pp2-dp128"),
    Case("13B", "tp4-pp2", "tp2-pp2-dp2"),
    Case("13B", "tp4-pp2-dp8", "tp2-pp4-dp8"),
    Case("70B", "tp8-pp4-dp2", "tp4-pp4-dp4"),
    Case("70B", "tp8-pp4-dp8", "tp4-pp8-dp8"),
    Case("70B", "tp8-pp4-dp32", "tp4-pp8-dp32"),
    Case("70B", "tp8-pp4-dp32", "tp4-pp8-dp32", overlap=True),
    Case("70B", "tp8-pp4-dp32-noopt", "tp4-pp8-dp32-noopt"),
    Case("70B", "tp8-pp4-dp32", "tp8-pp1-dp128", weights_only=True),
    Case("70B", "tp8-pp4-dp128", "tp4-pp8-dp128"),
    Case("235B", "tp4-pp4-dp8-ep32-etp1-sp", "tp2-pp8-dp8-ep16-etp1-sp"),
    Case("235B", "tp4-pp4-dp64-ep32-etp1-sp", "tp2-pp8-dp64-ep16-etp1-sp"),
    Case("671B", "pp16-dp64-ep64", "tp8-pp16-dp8-ep8-etp1-sp"),
    Case("671B", "pp16-dp256-ep64", "tp8-pp16-dp32-ep8-etp1-sp"),
    Case("671B", "pp16-dp256-ep64", "tp2-pp8-dp256-ep32-etp1-sp"),
    Case("671B", "pp16-dp256-ep64", "tp2-pp8-dp256-ep32-etp1-sp", overlap=True),
    Case("671B", "pp16-dp256-ep64", "tp4-pp4-dp256-ep256-etp1-sp", weights_only=True),
    Case("70B", "tp8-pp4-dp512", "tp4-pp8-dp512"),
    Case("671B", "pp16-dp1024-ep64", "tp2-pp8-dp1024-ep32-etp1-sp"),
    Case("671B", "pp16-dp1024-ep64", "tp8-pp16-dp128-ep8-etp1-sp"),
]

LIMITS_S = {("70B", 1024): 0.25, ("671B", 4096): 2.0, ("671B", 16_384): 10.0}


class Rosters(NamedTuple):
    """Both layouts of a case."""

    source: RosterSet
    target: RosterSet

    @classmethod
    def of(cls, case: Case) -> Rosters:
        return cls(
            *(
                make_rosters(
                    MODELS[case.model],
                    ParallelLayout.parse(text),
                    weights_only=case.weights_only,
                    overlap=case.overlap,
                )
                for text in (case.source, case.target)
            )
        )


def measure(case: Case, *, repeats: int, whole_up_to: int) -> dict[str, Any]:
    """All figures of one case."""
    load = os.getloadavg()[0]
    seconds: dict[str, float] = {}
    seconds["rosters"], rosters = least(1, lambda: Rosters.of(case))
    topology, options = Topology.of_nodes(case.ranks, RANKS_PER_NODE), PlanOptions()
    rank = case.ranks // 3
    ranks, data = zip(*(on_the_wire(side) for side in rosters), strict=True)
    seconds["encode"], _ = least(3, lambda: [side[rank].to_bytes() for side in ranks])
    seconds["decode"], read = least(2, lambda: received(data))
    assert (read.source.digest(), read.target.digest()) == tuple(side.digest() for side in rosters)

    def own() -> Plan:
        return make_plan(*rosters, topology, options, rank=rank)

    seconds["own"], plan = least(repeats, own)
    cache = PlanCache()
    cache.plan(*rosters, topology, options, rank=rank)
    seconds["cached"], _ = least(20, lambda: cache.plan(*rosters, topology, options, rank=rank))
    if case.ranks <= whole_up_to:
        seconds["whole"], whole = least(1, lambda: make_plan(*rosters, topology, options))
        assert whole.digest == plan.digest
    loads = plan.sent_bytes + plan.received_bytes
    schedules = [each.schedule for each in plan.passes]
    return {
        "model": case.model,
        "ranks": case.ranks,
        "source": case.source,
        "target": case.target,
        "states": "weights" if case.weights_only else "optimizer",
        "overlap": case.overlap,
        "seconds": {name: round(value, 6) for name, value in seconds.items()},
        "limit_s": LIMITS_S.get((case.model, case.ranks)),
        "peak_mib": round(peak_mib(own), 1),
        "load": [load, os.getloadavg()[0]],
        "rows": [len(side.rows) for side in rosters],
        "kinds": [side.num_kinds for side in rosters],
        "roster_bytes": sum(len(one) for side in data for one in side),
        "links": sum(len(each.links) for each in plan.passes),
        "operations": plan.num_operations,
        "windows": plan.num_windows,
        "least_windows": int(-(-loads.max() // options.staging_bytes)),
        "own_messages": sum(len(each) for each in schedules),
        "own_pieces": sum(len(each.pieces) for each in schedules),
        "moved_bytes": plan.moved_bytes,
        "retained_bytes": plan.retained_bytes,
        "max_send_bytes": plan.max_send_bytes,
        "max_recv_bytes": plan.max_recv_bytes,
    }


def least(repeats: int, run: Callable[[], Any]) -> tuple[float, Any]:
    """The least process time of so many runs, and what the last of them returned."""
    best, found = float("inf"), None
    for _ in range(repeats):
        del found
        with _no_collections():
            begin = time.process_time()
            found = run()
            best = min(best, time.process_time() - begin)
    return best, found


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def peak_mib(run: Callable[[], Any]) -> float:
    """The most memory that a run allocates, in MiB."""
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def on_the_wire(rosters: RosterSet) -> tuple[list[Roster], list[bytes]]:
    """Each rank's own roster, and its bytes."""
    kinds = []
    for first, last in zip(rosters.rows_of_kind[:-1], rosters.rows_of_kind[1:], strict=True):
        rows = rosters.rows
        used, tensor = np.unique(rows.tensor[first:last], return_inverse=True)
        tensors = tuple(rosters.tensors[i] for i in used)
        dims = max(len(one.shape) for one in tensors)
        start, stop = rows.start[first:last, :dims], rows.stop[first:last, :dims]
        kinds.append(Roster(tensors, tensor.reshape(-1), start, stop))
    ranks = [kinds[kind] for kind in rosters.kind_of_rank]
    return ranks, [one.to_bytes() for one in ranks]


def received(sides: Sequence[list[bytes]]) -> Rosters:
    """What a rank makes of the bytes of all, as in a switch."""
    rosters = []
    for data in sides:
        read = {one: Roster.from_bytes(one) for one in set(data)}
        rosters.append([read[one] for one in data])
    tensors = union_of_tensors([*rosters[0], *rosters[1]])
    merged = Rosters(*(RosterSet.merge(side, tensors) for side in rosters))
    for side in merged:
        side.digest()
    return merged


# ---------------------------------------------------------------------- what is written


def row(result: dict[str, Any]) -> str:
    """One line about one case."""
    seconds = result["seconds"]
    what = result["states"] + (", overlap" if result["overlap"] else "")
    return (
        f"{result['model']:>5s} {result['ranks']:>6d} {result['source']:>24s} -> "
        f"{result['target']:28s} {what:18s} own {seconds['own'] * 1e3:8.1f} ms"
        f"  cached {seconds['cached'] * 1e3:6.3f} ms  decode {seconds['decode']:6.3f} s"
        f"  {result['peak_mib']:7.1f} MiB"
    )


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Time of a rank's own plan over ranks, a line for each model."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for number, model in enumerate(MODELS):
        of_model = [r for r in results if r["model"] == model]
        worst: dict[int, float] = {}
        for one in of_model:
            worst[one["ranks"]] = max(worst.get(one["ranks"], 0), one["seconds"]["own"])
        if not worst:
            continue
        color = f"C{number}"
        axis.plot(*zip(*sorted(worst.items()), strict=True), "o-", color=color, label=model)
    for (_, ranks), limit in LIMITS_S.items():
        if any(r["ranks"] == ranks for r in results):
            axis.plot([ranks / 1.25, ranks * 1.25], [limit] * 2, color="black", lw=1)
            axis.annotate(f"{limit:g} s", (ranks, limit), xytext=(0, 3), ha="center",
                          textcoords="offset points", fontsize=8)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("ranks")
    axis.set_ylabel("seconds (one core)")
    axis.set_title("A rank's own plan; bars: limits", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(title="parameters")
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure, write, and say whether a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 1,024 ranks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    cases = [case for case in CASES if case.ranks <= 1024 or not args.quick]
    results = []
    for case in cases:
        result = measure(
            case,
            repeats=5 if case.ranks <= 4096 else 3,
            whole_up_to=256 if args.quick else 1024,
        )
        print(row(result), flush=True)
        results.append(result)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / ("plan_scale_quick" if args.quick else "plan_scale")
    content = {"environment": environment("numpy"), "results": results}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    with contextlib.suppress(ImportError):
        draw(results, stem.with_suffix(".png"))
    late = [r for r in results if r["limit_s"] and r["seconds"]["own"] > r["limit_s"]]
    slow = [r for r in results if r["seconds"]["cached"] > 1e-3]
    for one in late + slow:
        print(f"over its limit: {row(one)}")
    return 1 if late or slow else 0


if __name__ == "__main__":
    sys.exit(main())
