"""Tables and the picture of ``elastic.py``, out of its results as they are in its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]
PHASES = ("prepare", "groups", "quiesce", "build", "plan", "memory", "pack", "wire", "unpack")
PHASES = (*PHASES, "rebuild", "verify", "vote", "commit")
HIDDEN, HOOKS, LOSSES = 0.95, 0.005, 1e-6


def line_of(part: str, result: Result) -> str:
    """One line about one result."""
    if part == "worlds":
        return (
            f"{result['start']} -> {result['world']} {result['target']:12s} "
            f"{result['num_groups']} groups: cold {result['cold_s']:.2f} s, overlapped "
            f"{result['worlds_stall_s']:.3f} s of stall: {100 * result['hidden']:.2f} % hidden; "
            f"{result['overlapped']['lost_s']:.2f} s of step time lost "
            f"(noise {result['overlapped']['noise_s']:.2f} s)"
        )
    if part == "periodic":
        stalls = [switch["stall_s"] for switch in result["switches"]]
        return (
            f"{len(stalls)} switches, stall {statistics.median(stalls):.3f} s in the median, "
            f"{max(stalls):.3f} s at most; losses at most {result['most_apart']:.1e} apart"
        )
    if part == "kinds":
        return (
            f"{result['kind']:18s} round {result['round']}  {result['moved_bytes'] / 1e6:8.1f} MB  "
            f"stall {result['stall_s']:.3f} s  gap {result['gap_s']:.3f} s"
        )
    return (
        f"{result['model']}: hooks {1e6 * result['hooks_s']:.0f} us in a step of "
        f"{1e3 * result['step_s']:.1f} ms = {100 * result['share']:.3f} %"
    )


def table(content: dict[str, Any]) -> str:
    """All parts as Markdown."""
    lines = ["# What it costs that processes come and go", ""]
    for part, found in content.items():
        told = ", ".join(f"{name} {value}" for name, value in found["environment"].items())
        lines += [f"`{part}`: {told}", ""]
    makers = {"worlds": _worlds, "periodic": _periodic, "kinds": _kinds, "hooks": _hooks}
    lines += _goals(content)
    for part, make in makers.items():
        if part in content:
            lines += make(content[part]["results"])
    return "\n".join(lines) + "\n"


def _rows(head: str, rows: Iterator[list[str]]) -> list[str]:
    columns = head.split("|")
    lines = ["| " + " | ".join(c.strip() for c in columns) + " |", "|---" * len(columns) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _goals(content: dict[str, Any]) -> list[str]:
    def rows() -> Iterator[list[str]]:
        results = {part: found["results"] for part, found in content.items()}
        if results.get("worlds"):
            least = min(one["hidden"] for one in results["worlds"])
            yield [
                "start-up and worlds hidden, least",
                f"≥ {100 * HIDDEN:g} %",
                f"{100 * least:.2f} %; step time lost beside it {_lost(results['worlds'])}",
            ]
        for one in results.get("periodic", []):
            found = f"{one['most_apart_in_20']:.1e} ({one['most_apart']:.1e} over all)"
            yield ["losses apart in 20 steps from the first switch", f"≤ {LOSSES:g}", found]
        if results.get("hooks"):
            most = max(one["share"] for one in results["hooks"])
            yield ["hook time ÷ step time, most", f"≤ {100 * HOOKS:g} %", f"{100 * most:.3f} %"]

    return ["## Goals", "", *_rows("what | wanted | found", rows())]


def _lost(results: list[Result]) -> str:
    seen = [one["overlapped"] for one in results]
    trained = sum(one["steps"] * one["step_s"] for one in seen)
    lost, noise = (sum(one[name] for one in seen) for name in ("lost_s", "noise_s"))
    return f"{lost:.1f} s of {trained:.0f} s (noise ± {noise:.1f} s)"


def _worlds(results: list[Result]) -> list[str]:
    def rows() -> Iterator[list[str]]:
        for one in results:
            cold, seen = one["cold"], one["overlapped"]
            yield [
                f"{one['start']} → {one['world']} ranks, {one['target']}",
                f"{one['num_groups']}",
                *(f"{cold[name]:.2f}" for name in ("import_s", "prologue_s")),
                f"{cold['groups_s']:.3f}",
                f"{one['cold_s']:.2f}",
                f"{seen['start']['total_s']:.2f}",
                f"{one['worlds_stall_s']:.3f}",
                f"{seen['lost_s']:.2f} in {seen['steps']}",
                f"± {seen['noise_s']:.2f}",
                f"{1e3 * seen['step_s']:.0f}",
                f"{100 * one['hidden']:.2f} %",
                f"{one['cold_switch']['stall_s']:.3f}",
                f"{seen['switch']['stall_s']:.3f}",
            ]

    head = (
        "growth | groups a rank | cold: import | prologue | groups | all | overlapped: start | "
        "stall due to worlds | step time lost, in steps | noise | step, ms | hidden | "
        "whole stall cold | overlapped"
    )
    text = [
        "Seconds. *cold* is with the job stopped and `elastic.overlap=off`; *overlapped* while it",
        "trains. Groups are those of rank 0 in the new world, the bridge not among them. *lost* is",
        "against the median step before, *noise* the most that as many steps gave before.",
    ]
    return ["## Worlds", "", *text, "", *_rows(head, rows())]


def _periodic(results: list[Result]) -> list[str]:
    lines = ["## Growing and shrinking again and again", ""]
    for one in results:
        lines += [
            f"Every {one['period']} steps for {one['iterations']}; losses are at most "
            f"{one['most_apart']:.1e} (relative) from those of the run that never switched, in the "
            f"first 20 steps after the first switch {one['most_apart_in_20']:.1e}.",
            "",
            *_switches(one["switches"]),
        ]
    return lines


def _switches(switches: list[Result]) -> list[str]:
    rows = (
        [
            f"{one['iteration']}",
            f"{one['source']} → {one['target']}",
            *_figures(one),
            "/".join(str(one["groups"][name]) for name in ("reused", "created", "destroyed")),
        ]
        for one in switches
    )
    head = f"after step | layouts | MB moved | stall | gap | {' | '.join(PHASES)} | groups"
    return ["Seconds; groups are reused/created/destroyed on rank 0.", "", *_rows(head, rows)]


def _figures(one: Result) -> list[str]:
    return [
        f"{one['moved_bytes'] / 1e6:.1f}",
        f"{one['stall_s']:.3f}",
        f"{one['gap_s']:.3f}",
        *(f"{one['seconds'].get(phase, 0.0):.3f}" for phase in PHASES),
    ]


def _median(results: list[Result]) -> Result:
    seconds = {p: statistics.median(r["seconds"].get(p, 0.0) for r in results) for p in PHASES}
    names = ("moved_bytes", "stall_s", "gap_s")
    return {n: statistics.median(r[n] for r in results) for n in names} | {"seconds": seconds}


def medians(results: list[Result]) -> dict[str, Result]:
    """By kind: the first switch, and the median of the later ones."""
    found: dict[str, Result] = {}
    for kind in dict.fromkeys(one["kind"] for one in results):
        same = [one for one in results if one["kind"] == kind]
        found[f"{kind}, first"] = _median(same[:1])
        if same[1:]:
            found[f"{kind}, later"] = _median(same[1:])
    return found


def _kinds(results: list[Result]) -> list[str]:
    by_kind = medians(results)
    in_place = [one for kind, one in by_kind.items() if kind.startswith("in place")]

    def rows() -> Iterator[list[str]]:
        for kind, one in by_kind.items():
            peer = min(in_place, key=lambda p: abs(p["moved_bytes"] - one["moved_bytes"]))
            beside = f"{one['stall_s'] / peer['stall_s']:.2f}"
            yield [kind, *_figures(one), "" if one in in_place else beside]

    head = f"switch | MB moved | stall | gap | {' | '.join(PHASES)} | ÷ in place"
    text = "Seconds, medians; *÷ in place* is over the switch in place of the nearest bytes."
    return ["## Growing, shrinking and migrating beside switches in place", "", text, "",
            *_rows(head, rows())]  # fmt: skip


def _hooks(results: list[Result]) -> list[str]:
    rows = (
        [
            one["model"],
            f"{1e3 * one['step_s']:.1f}",
            f"{1e6 * one['hooks_s']:.0f}",
            f"{100 * one['share']:.3f} %",
            f"{1e6 * one['thread_s']:.0f}",
        ]
        for one in results
    )
    head = "model | step, ms | hooks in a step, µs | share | plugin's thread beside it, µs"
    return ["## Steps without a switch", "", *_rows(head, rows)]


def draw(content: dict[str, Any], path: Path) -> None:
    """Cold cost beside what is seen of it, both losses, and stall against bytes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    drawers = {"worlds": _draw_worlds, "periodic": _draw_losses, "kinds": _draw_kinds}
    for axis, (part, draw_part) in zip(axes, drawers.items(), strict=True):
        axis.set_visible(part in content)
        if part in content:
            draw_part(axis, content[part]["results"])
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_worlds(axis: Any, results: list[Result]) -> None:
    at = range(len(results))
    left = [0.0] * len(results)
    for name in ("import_s", "prologue_s", "groups_s"):
        widths = [one["cold"][name] for one in results]
        axis.barh([y - 0.2 for y in at], widths, 0.35, left, label=f"cold: {name[:-2]}")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    stall = [one["worlds_stall_s"] for one in results]
    lost = [max(0.0, one["overlapped"]["lost_s"]) for one in results]
    axis.barh([y + 0.2 for y in at], stall, 0.35, label="overlapped: stall", color="black")
    axis.barh([y + 0.2 for y in at], lost, 0.35, stall, label="step time lost", color="gray")
    names = [f"{r['start']} → {r['world']}, {r['target']}" for r in results]
    axis.set_yticks(list(at), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.set_title("Start-up and worlds", fontsize=10)
    axis.legend(fontsize=8)


def _draw_losses(axis: Any, results: list[Result]) -> None:
    (one,) = results
    static, switched = one["losses"]["static"], one["losses"]["switched"]
    steps = range(1, len(static) + 1)
    axis.plot(steps, static, color="lightgray", lw=4, label="4 ranks throughout")
    axis.plot(steps, switched, color="C0", lw=1, label="4 and 2 ranks in turn")
    for switch in one["switches"]:
        if switch["left"]:
            axis.axvspan(
                switch["iteration"], switch["iteration"] + one["period"], color="C1", alpha=0.12
            )
    axis.set_xlabel("step (shaded: 2 ranks)")
    axis.set_ylabel("loss")
    axis.set_title(f"At most {one['most_apart']:.1e} apart", fontsize=10)
    axis.legend(fontsize=8)


def _draw_kinds(axis: Any, results: list[Result]) -> None:
    kinds = dict.fromkeys(one["kind"] for one in results)
    for number, kind in enumerate(kinds):
        same = [one for one in results if one["kind"] == kind]
        for first, mark in ((True, "D"), (False, "o")):
            points = [
                (one["moved_bytes"] / 1e6, one["stall_s"])
                for one in same
                if (one["round"] == 0) is first
            ]
            if points:
                label = None if first and len(same) > 1 else kind
                axis.plot(*zip(*points, strict=True), mark, color=f"C{number}", label=label)
    axis.set_xlabel("MB moved (diamonds: the first of its kind)")
    axis.set_ylabel("stall, seconds")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
