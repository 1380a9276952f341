"""The tables of the page: every event, and the switches by what they took."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynatrain_megatron.observe.report.links import MOST_LINKS, Loads, loads_of
from dynatrain_megatron.observe.report.read import Placement, Refusal, Run, Switch
from dynatrain_megatron.observe.units import duration, size

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading and how its cells are set (classes of page.css)."""

    heading: str
    style: str = ""


def sections(
    run: Run, phases: Sequence[str], times: Sequence[tuple[Switch, Mapping[str, float]]]
) -> dict[str, str]:
    """HTML by name of the section, of those that have anything to show.

    ``times`` are the switches whose seconds by phase were recorded, with them.
    """
    switches, refusals = run.switches, run.refusals
    found = {
        "timeline": _timeline(run.events) if run.events else "",
        "times": _times(phases, times) if times else "",
        "links": _links(switches),
        "memory": _memory(switches),
        "groups": _groups(switches),
        "switches": _switches(switches) if switches else "",
        "refused": _refused(refusals) if refusals else "",
    }
    return {name: section for name, section in found.items() if section}


def escape(text: str) -> str:
    """``text`` as it may stand in the page, in an attribute too."""
    return html.escape(text, quote=True)


# ---------------------------------------------------------------- the sections


def _timeline(events: Sequence[Switch | Refusal]) -> str:
    columns = (
        Column("event", "which"),
        Column("iteration", "number"),
        Column("time (UTC)", "when"),
        Column("from", "layout"),
        Column("to", "layout"),
        Column("asked by", "word"),
        Column("ranks", "number"),
        Column("stall", "number"),
        Column("moved", "number"),
    )
    return _section(
        "Timeline",
        "All that was done or asked for, in the order of events.jsonl. What iteration N has was "
        "between steps N and N + 1; the stall is the time for which no training step ran.",
        _table("timeline", columns, map(_timeline_row, events)),
    )


def _timeline_row(event: Switch | Refusal) -> list[str]:
    row = [str(event.iteration), _time(event.time), _layout(event.source), _layout(event.target)]
    if isinstance(event, Refusal):
        what = f'<b class="bad">{_kind(event)}</b>'
        return [what, *row, NOTHING, NOTHING, NOTHING, NOTHING]
    failed = "" if event.ok else f' <b class="bad">failed</b> {escape(event.error)}'
    return [
        f"<b>switch {event.number}</b>{failed}",
        *row,
        escape(event.origin) or NOTHING,
        _ranks(event),
        _seconds(event.stall_s),
        _size(event.moved),
    ]


def _times(phases: Sequence[str], times: Sequence[tuple[Switch, Mapping[str, float]]]) -> str:
    columns = (*_WHICH, *(Column(name, "number") for name in ("stall", *phases)))
    rows = (
        [
            *_which(switch),
            NOTHING if switch.stall_s is None else f"{switch.stall_s:.3f}",
            *(f"{of[phase]:.3f}" if phase in of else NOTHING for phase in phases),
        ]
        for switch, of in times
    )
    table = _table("times", columns, rows)
    return f"<section><details><summary>Seconds of each phase</summary>{table}</details></section>"


def _links(switches: Sequence[Switch]) -> str:
    loads = [(switch, found) for switch in switches if (found := loads_of(switch)) is not None]
    if not loads:
        return ""
    columns = (
        *_WHICH,
        Column("within nodes", "number"),
        Column("between nodes", "number"),
        Column("busiest sender", "number"),
        Column("busiest receiver", "number"),
        Column("busiest ÷ mean sent", "number"),
    )
    rows = (
        [
            *_which(switch),
            _size(of.within),
            _size(of.between),
            _rank(of.sender),
            _rank(of.receiver),
            f"{of.sender[1] / of.mean_sent:.2f}" if of.mean_sent else NOTHING,
        ]
        for switch, of in loads
    )
    parts = [_table("loads", columns, rows)]
    many = [(switch, of) for switch, of in loads if of.links]
    if many:
        parts.append(_node_links(many))
    return _section(
        "Load of links",
        "Bytes that ranks sent each other, as planned, by where they lie. The busiest rank or link "
        "says how long the wire takes at the least.",
        *parts,
    )


def _node_links(loads: Sequence[tuple[Switch, Loads]]) -> str:
    columns = (*_WHICH, Column("link"), Column("bytes", "number"), Column("", "chart"))
    most = max(of.links[0][2] for _, of in loads)
    rows = []
    for switch, of in loads:
        for source, target, num_bytes in of.links:
            name = f"node {source} → node {target}"
            rows.append([*_which(switch), name, _size(num_bytes), _bar(num_bytes, most)])
    table = _table("links", columns, rows)
    left_out = any(of.num_links > len(of.links) for _, of in loads)
    summary = f"Links between nodes{f', the busiest {MOST_LINKS} of each switch' * left_out}"
    return f"<details><summary>{summary}</summary>{table}</details>"


def _memory(switches: Sequence[Switch]) -> str:
    shown = [switch for switch in switches if switch.peak_extra is not None]
    if not shown:
        return ""
    columns = (
        *_WHICH,
        Column("old state"),
        Column("stages", "number"),
        Column("planned", "number"),
        Column("recorded", "number"),
        Column("bound", "number"),
        Column("recorded and planned", "chart"),
    )
    figures = [
        figure
        for s in shown
        for figure in (s.peak_extra, s.planned_peak_extra, s.bound_peak_extra)
        if figure is not None
    ]
    rows = (
        [
            *_which(switch),
            _KEPT.get(switch.keep_source, escape(switch.keep_source) or NOTHING),
            _count(switch.stages),
            _size(switch.planned_peak_extra),
            _size(switch.peak_extra),
            _size(switch.bound_peak_extra),
            _bar(switch.peak_extra or 0, max(figures), switch.planned_peak_extra),
        ]
        for switch in shown
    )
    return _section(
        "Memory",
        "The most that a rank held beyond what the old state took: as planned before anything was "
        "moved (the upright mark), as recorded (the bar), and what it can be at the most. The "
        "fullest rank's.",
        _table("memory", columns, rows),
    )


_KEPT = {"always": "kept to the end", "never": "freed stage by stage"}


def _groups(switches: Sequence[Switch]) -> str:
    shown = [s for s in switches if s.groups or s.placement is not None or s.joined or s.left]
    if not shown:
        return ""
    columns = (
        *_WHICH,
        Column("groups reused", "number"),
        Column("made", "number"),
        Column("destroyed", "number"),
        Column("joined", "number"),
        Column("left", "number"),
        Column("placement"),
    )
    rows = (
        [
            *_which(switch),
            *(_count(switch.groups.get(name)) for name in ("reused", "created", "destroyed")),
            _count(switch.joined),
            _count(switch.left),
            _placed(switch.placement),
        ]
        for switch in shown
    )
    return _section(
        "Process groups and placement",
        "Process groups of rank 0: those that were there from an earlier layout, those made for "
        "this one, and those that went. Processes that came and went. With engine.placement=best, "
        "what it saved that processes took other ranks.",
        _table("groups", columns, rows),
    )


def _placed(placement: Placement | None) -> str:
    if placement is None:
        return NOTHING
    identity, best = placement.identity, placement.best
    if identity is None or best is None:
        return "applied"
    saved = f"{1 - best / identity:.0%}" if identity else "0%"
    return f"moved {size(best)} instead of {size(identity)} (−{saved})"


def _switches(switches: Sequence[Switch]) -> str:
    columns = (
        *_WHICH,
        Column("moved", "number"),
        Column("÷ lower bound", "number"),
        Column("retained", "number"),
        Column("rebuilt", "number"),
        Column("ops", "number"),
        Column("rounds", "number"),
        Column("schedule", "word"),
        Column("wire", "number"),
        Column("predicted", "number"),
        Column("checked by", "word"),
        Column("fingerprint", "print"),
    )
    rows = (
        [
            *_which(switch),
            _size(switch.moved),
            NOTHING if switch.bytes_ratio is None else f"{switch.bytes_ratio:.3f}",
            _size(switch.retained),
            _size(switch.rebuilt),
            _count(switch.ops),
            _count(switch.rounds),
            escape(switch.schedule) or NOTHING,
            _seconds(switch.seconds.get("wire")),
            _seconds(switch.predicted_s),
            escape(switch.verify) or NOTHING,
            _fingerprint(switch.fingerprint),
        ]
        for switch in switches
    )
    return _section(
        "Transfers",
        "Retained bytes stay on their rank, rebuilt ones are gathered from main parameters. "
        "Predicted is the cost model's time on the wire. The fingerprint is of the whole state, "
        "before and after, where engine.verify=fingerprint.",
        _table("switches", columns, rows),
    )


def _refused(refusals: Sequence[Refusal]) -> str:
    columns = (
        Column("event", "which"),
        Column("iteration", "number"),
        Column("from", "layout"),
        Column("asked for", "layout"),
        Column("reason", "reason"),
        Column("then", "reason"),
    )
    rows = (
        [
            f"<b>{_kind(refusal)}</b>",
            str(refusal.iteration),
            _layout(refusal.source),
            _layout(refusal.target),
            escape(refusal.reason),
            escape(refusal.next_step) or NOTHING,
        ]
        for refusal in refusals
    )
    return _section(
        "Refused and called off",
        "Asked for and not made. Refused: nothing was begun. Called off: it had begun, and all "
        "processes went back to the layout they had.",
        _table("refused", columns, rows),
    )


# ---------------------------------------------------------------- parts


_WHICH = (Column("switch", "which"),)
"""The column that says which switch a row is about."""


def _which(switch: Switch) -> list[str]:
    failed = "" if switch.ok else ' <b class="bad">failed</b>'
    layouts = f"{_layout(switch.source)} → {_layout(switch.target)}"
    return [f"<b>{switch.number}</b> {layouts} <small>at {switch.iteration}</small>{failed}"]


def _section(heading: str, caption: str, *parts: str) -> str:
    return f"<section><h2>{heading}</h2><p>{caption}</p>{''.join(parts)}</section>"


def _table(name: str, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """A table whose rows become cards on a phone; cells are HTML already."""
    head = "".join(f'<th class="{c.style}" scope="col">{escape(c.heading)}</th>' for c in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{c.style}{" none" * (cell == NOTHING)}" data-label="{escape(c.heading)}">'
            f"<span>{cell}</span></td>"
            for c, cell in zip(columns, row, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll"><table id="{name}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _bar(value: int, most: int, mark: int | None = None) -> str:
    """A bar of ``value`` where ``most`` is the whole width, with a mark across it."""
    width = 100 * value / most if most else 0.0
    marked = "" if mark is None or not most else f'<b style="left:{100 * mark / most:.2f}%"></b>'
    return f'<span class="bar"><i style="width:{width:.2f}%"></i>{marked}</span>'


def _kind(refusal: Refusal) -> str:
    return "called off" if refusal.called_off else "refused"


def _layout(text: str) -> str:
    """A layout that may break after its dashes."""
    return f"<code>{escape(text).replace('-', '-<wbr>')}</code>"


def _time(text: str) -> str:
    """An ISO 8601 time as date and time of day, to the second; what is none as it is."""
    day, _, clock = text.partition("T")
    if not text:
        return NOTHING
    return f"{escape(day)} <b>{escape(clock[:8])}</b>" if clock else escape(text)


def _ranks(switch: Switch) -> str:
    if switch.world is None:
        return NOTHING
    came = f" +{switch.joined}" if switch.joined else ""
    went = f" −{switch.left}" if switch.left else ""
    return f"{switch.world}{came}{went}"


def _rank(of: tuple[int, int]) -> str:
    rank, num_bytes = of
    return f"rank {rank}: {size(num_bytes)}" if num_bytes else NOTHING


def _seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else duration(seconds)


def _size(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else size(num_bytes)


def _count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}"


def _fingerprint(pair: tuple[str, str] | None) -> str:
    if pair is None:
        return "not taken"
    before, after = pair
    if before == after:
        return f'<code>{escape(before)}</code> <b class="good">equal</b>'
    return (
        f'<code>{escape(before)}</code> <code>{escape(after)}</code> <b class="bad">different</b>'
    )
