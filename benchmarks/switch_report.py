"""Tables and the picture of ``switch_time.py``, out of its results as they are in its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PHASES = ("prepare", "quiesce", "groups", "build", "plan", "memory", "pack", "wire", "unpack")
PHASES = (*PHASES, "rebuild", "verify", "commit", "other")


def line_of(result: dict[str, Any]) -> str:
    """One line about one case of any part."""
    if "switches" not in result:
        phases = ", ".join(f"{name} {value:.2f} s" for name, value in result["seconds"].items())
        return f"{result['family']:6s} {result['name']:30s} {result['model']:>5s}  {phases}"
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
            ratios = {
                "megatron.core.resharding ÷ our weights": seconds["megatron"] / seconds["ours"]
            }
            if nbytes["ours"]:
                ratios["its bytes ÷ ours"] = nbytes["megatron"] / nbytes["ours"]
            for name, ratio in ratios.items():
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

    def placements() -> Iterator[list[str]]:
        for one in results:
            if one.get("placement"):
                found = one["placement"]
                nbytes = [found["bytes"][name] / 1e6 for name in ("identity", "best")]
                seconds = [found["seconds"][name] for name in ("identity", "best")]
                ratio = nbytes[1] / nbytes[0] if nbytes[0] else 1.0
                yield [
                    *_name(one),
                    *(f"{value:.0f} MB" for value in nbytes),
                    f"{ratio:.3f}",
                    *(f"{value:.3f}" for value in seconds),
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
        "## Placement: what moves if processes take other ranks",
        "",
        "All ranks in one node; seconds are those predicted on the wire.",
        "",
        *_rows("transition | layouts | as they are | best | ratio | s | best, s", placements()),
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
    return ["## Stall against bytes moved", "", _name(results[0])[1], "", *_rows(head, rows())]


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
    axis.set_title(_name(results[0])[1], fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def rounded(value: Any) -> Any:
    """Floats to the microsecond, in all of a tree."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value
