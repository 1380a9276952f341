"""The report as one HTML page that needs nothing else: pictures inside, no script, no network.

Every text that comes from a file is escaped on its way in; a policy in the page forbids scripts
and any address all the same.
"""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from dynatrain_megatron import __version__
from dynatrain_megatron.observe.records import EVENTS
from dynatrain_megatron.observe.report.compare import loss_differences
from dynatrain_megatron.observe.report.read import Refusal, Run, Switch, clean
from dynatrain_megatron.observe.report.theme import DARK, LIGHT, Theme
from dynatrain_megatron.observe.units import duration, scientific, size

NOTHING = "–"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
NARROW_UP_TO_PX = 640


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart drawn for each width and theme: PNGs by (format name, theme name)."""

    heading: str
    caption: str
    alt: str
    pngs: Mapping[tuple[str, str], bytes]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading and how its cells are set (classes of page.css)."""

    heading: str
    style: str = ""


def render(
    run: Run,
    static: Run | None,
    pictures: Sequence[Picture],
    times: tuple[Sequence[str], Sequence[tuple[Switch, Mapping[str, float]]]],
) -> str:
    """The whole page. ``times`` are phase names and, for each switch, its seconds by phase."""
    name = escape(clean(run.directory.resolve().name))
    sections = [_picture(picture) for picture in pictures]
    if run.switches:
        sections.append(_switch_section(run.switches))
    if times[1]:
        sections.append(_times_section(*times))
    if run.refusals:
        sections.append(_refusal_section(run.refusals))
    # A static run has no events to lack.
    of_static = [note for note in (static.notes if static else ()) if EVENTS not in note]
    notes = [*run.notes, *(f"static run, {note}" for note in of_static)]
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        sections.append(f'<section id="notes"><h2>Notes</h2><ul>{items}</ul></section>')
    css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    beside = f" beside {_code(str(static.directory))}" if static else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name}: run report</title>
<link rel="icon" href="data:,">
<style>
:root {{ {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
{css}</style>
</head>
<body>
<header>
<h1>Run <span>{name}</span></h1>
<p>{_code(str(run.directory))}{beside}</p>
</header>
<main>
{_facts(run, static)}
{"\n".join(sections)}
</main>
<footer>Made by <code>dynatrain report</code> {__version__}</footer>
</body>
</html>
"""


def escape(text: str) -> str:
    """``text`` as it may stand in the page, in an attribute too."""
    return html.escape(text, quote=True)


def _code(text: str) -> str:
    return f"<code>{escape(clean(text))}</code>"


def _variables(theme: Theme) -> str:
    names = ("page", "card", "text", "muted", "grid", "run", "switch", "bad", "good")
    return " ".join(f"--{name}: {getattr(theme, name)};" for name in names)


# ---------------------------------------------------------------- facts


def _facts(run: Run, static: Run | None) -> str:
    made = [switch for switch in run.switches if switch.ok]
    tiles = [_steps_fact(run), ("Switches", str(len(made)), _also(run, len(made)))]
    stalls = [switch.stall_s for switch in made if switch.stall_s is not None]
    if stalls:
        longest = f"longest {duration(max(stalls))}"
        tiles.append(("Training stood still", duration(sum(stalls)), longest))
    moved = [s for s in made if s.moved is not None and s.lower_bound is not None]
    if moved:
        total = sum(s.moved or 0 for s in moved)
        bound = sum(s.lower_bound or 0 for s in moved)
        told = f"{total / bound:.3f} × the lower bound" if bound else "nothing had to move"
        tiles.append(("Bytes moved", size(total), told))
    if static is not None:
        differences = loss_differences(run, static)
        if differences:
            largest = scientific(max(differences.values()))
            told = f"relative, over {len(differences)} steps"
            tiles.append(("Largest loss difference", largest, told))
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd><b>{escape(value)}</b> <span>{escape(more)}</span></dd>"
        "</div>"
        for label, value, more in tiles
    )
    return f'<dl id="facts">{items}</dl>'


def _steps_fact(run: Run) -> tuple[str, str, str]:
    if not run.steps:
        return "Steps", "0", "none recorded"
    first, last = run.steps[0].iteration, run.steps[-1].iteration
    return "Steps", f"{len(run.steps):,}", f"iterations {first} to {last}"


def _also(run: Run, made: int) -> str:
    failed = len(run.switches) - made
    parts = [f"{failed} failed"] * bool(failed)
    parts += [f"{len(run.refusals)} refused"] * bool(run.refusals)
    return ", ".join(parts) or "none failed or refused"


# ---------------------------------------------------------------- pictures


def _picture(picture: Picture) -> str:
    narrow = f"(max-width: {NARROW_UP_TO_PX}px)"
    dark = "(prefers-color-scheme: dark)"
    sources = "".join(
        f'<source media="{media}" srcset="{_data(picture.pngs[key])}">\n'
        for media, key in (
            (f"{narrow} and {dark}", ("narrow", "dark")),
            (narrow, ("narrow", "light")),
            (dark, ("wide", "dark")),
        )
    )
    return (
        f"<section><h2>{escape(picture.heading)}</h2><p>{escape(picture.caption)}</p>\n"
        f"<picture>\n{sources}"
        f'<img src="{_data(picture.pngs["wide", "light"])}" alt="{escape(picture.alt)}">\n'
        "</picture></section>"
    )


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


# ---------------------------------------------------------------- tables


def _table(name: str, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """A table whose rows become cards on a phone; cells are HTML already."""
    head = "".join(f'<th class="{c.style}" scope="col">{escape(c.heading)}</th>' for c in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{c.style}" data-label="{escape(c.heading)}"><span>{cell}</span></td>'
            for c, cell in zip(columns, row, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll"><table id="{name}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>"
    )


_SWITCHES = (
    Column("#", "number"),
    Column("iteration", "number"),
    Column("from", "layout"),
    Column("to", "layout"),
    Column("stall", "number"),
    Column("moved", "number"),
    Column("÷ lower bound", "number"),
    Column("retained", "number"),
    Column("rebuilt", "number"),
    Column("ops", "number"),
    Column("rounds", "number"),
    Column("peak extra memory", "number"),
    Column("planned", "number"),
    Column("groups made / reused / gone", "number"),
    Column("fingerprint", "print"),
)


def _switch_section(switches: Sequence[Switch]) -> str:
    table = _table("switches", _SWITCHES, map(_switch_row, switches))
    caption = (
        "A switch of iteration N is made between steps N and N + 1; the stall is the time for "
        "which no training step ran. Retained bytes stay on their rank, rebuilt ones are gathered "
        "from main parameters. The fingerprint is of the whole state, before and after, where "
        "engine.verify=fingerprint."
    )
    return f"<section><h2>Switches</h2><p>{caption}</p>{table}</section>"


def _switch_row(switch: Switch) -> list[str]:
    failed = "" if switch.ok else f' <b class="bad">failed</b> {escape(switch.error)}'
    return [
        str(switch.number),
        str(switch.iteration),
        _layout(switch.source),
        _layout(switch.target) + failed,
        NOTHING if switch.stall_s is None else duration(switch.stall_s),
        _size(switch.moved),
        NOTHING if switch.bytes_ratio is None else f"{switch.bytes_ratio:.3f}",
        _size(switch.retained),
        _size(switch.rebuilt),
        _count(switch.ops),
        _count(switch.rounds),
        _size(switch.peak_extra),
        _size(switch.planned_peak_extra),
        " / ".join(_count(switch.groups.get(name)) for name in ("created", "reused", "destroyed"))
        if switch.groups
        else NOTHING,
        _fingerprint(switch.fingerprint),
    ]


def _times_section(names: Sequence[str], rows: Sequence[tuple[Switch, Mapping[str, float]]]) -> str:
    columns = (Column("#", "number"), Column("iteration", "number"), Column("stall", "number"),
               *(Column(name, "number") for name in names))  # fmt: skip
    table = _table(
        "times",
        columns,
        (
            [
                str(switch.number),
                str(switch.iteration),
                NOTHING if switch.stall_s is None else f"{switch.stall_s:.3f}",
                *(f"{phases[name]:.3f}" if name in phases else NOTHING for name in names),
            ]
            for switch, phases in rows
        ),
    )
    return f"<section><details><summary>Seconds of each phase</summary>{table}</details></section>"


def _refusal_section(refusals: Sequence[Refusal]) -> str:
    columns = (
        Column("iteration", "number"),
        Column("from", "layout"),
        Column("asked for", "layout"),
        Column("reason"),
        Column("then"),
    )
    table = _table(
        "refused",
        columns,
        (
            [
                str(refusal.iteration),
                _layout(refusal.source),
                _layout(refusal.target),
                escape(refusal.reason),
                escape(refusal.next_step) or NOTHING,
            ]
            for refusal in refusals
        ),
    )
    caption = "Asked for and not made; nothing was changed."
    return f"<section><h2>Refused requests</h2><p>{caption}</p>{table}</section>"


def _layout(text: str) -> str:
    """A layout that may break after its dashes."""
    return f"<code>{escape(text).replace('-', '-<wbr>')}</code>"


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
