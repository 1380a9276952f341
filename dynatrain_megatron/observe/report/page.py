"""The report as one HTML page that needs nothing else: pictures inside, no script, no network.

Every text that comes from a file is escaped on its way in; a policy in the page forbids scripts
and any address all the same.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from dynatrain_megatron import __version__
from dynatrain_megatron.observe.records import EVENTS
from dynatrain_megatron.observe.report import tables
from dynatrain_megatron.observe.report.compare import loss_differences
from dynatrain_megatron.observe.report.read import Run, Switch, clean
from dynatrain_megatron.observe.report.tables import escape
from dynatrain_megatron.observe.report.theme import DARK, LIGHT, Theme
from dynatrain_megatron.observe.units import duration, scientific, size

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
NARROW_UP_TO_PX = 640


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart drawn for each width and theme: PNGs by (format name, theme name)."""

    heading: str
    caption: str
    alt: str
    pngs: Mapping[tuple[str, str], bytes]


def render(
    run: Run,
    static: Run | None,
    pictures: Mapping[str, Picture],
    times: tuple[Sequence[str], Sequence[tuple[Switch, Mapping[str, float]]]],
) -> str:
    """The whole page. ``pictures`` are ``loss``, ``time`` and ``bytes``, or some of them.

    ``times`` are phase names and, for each switch, its seconds by phase.
    """
    name = escape(clean(run.directory.resolve().name))
    shown = {name: _picture(picture) for name, picture in pictures.items()}
    told = tables.sections(run, *times)
    order = ("loss", "timeline", "time", "times", "bytes", "links", "memory", "groups", "switches")
    sections = [
        part[name] for name in (*order, "refused") for part in (shown, told) if name in part
    ]
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
    called_off = sum(refusal.called_off for refusal in run.refusals)
    refused = len(run.refusals) - called_off
    parts += [f"{refused} refused"] * bool(refused)
    parts += [f"{called_off} called off"] * bool(called_off)
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
