"""The pages a reader has: README.md, docs/*.md and the notes beside code, taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELLS = ("bash", "sh", "shell", "console", "zsh")
_FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,}) *(?P<info>.*)")
_CONTINUES = re.compile(r"<!-- continues: (\S+) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; what stands behind its language says what is done with it.

    ``output`` is what the page shows of what it prints.
    """

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str
    output: str | None = None

    def __str__(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"

    def value(self, name: str) -> str | None:
        """``value`` of a word ``name=value``."""
        found = [word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")]
        return found[0] if found else None

    @property
    def is_run(self) -> bool:
        """Whether it is run, and not only looked at."""
        return "run" in self.words


@dataclass(frozen=True, slots=True)
class Page:
    """One page; ``continues`` is the page in whose folder, and after which, its blocks run."""

    name: str
    text: str
    blocks: tuple[Block, ...]

    @property
    def continues(self) -> str | None:
        """The page whose folder its blocks run in."""
        found = _CONTINUES.search(self.text)
        return found[1] if found else None

    @property
    def commands(self) -> tuple[Block, ...]:
        """The blocks that are for a shell."""
        return tuple(block for block in self.blocks if block.language in SHELLS)

    @property
    def prose(self) -> str:
        """The text without its fenced blocks, which are left as empty lines."""
        lines, inside = [], None
        for line in self.text.splitlines():
            fence = _FENCE.match(line)
            if inside is None and fence:
                inside = fence["ticks"]
            elif inside is not None:
                if line.strip() == inside:
                    inside = None
            else:
                lines.append(line)
                continue
            lines.append("")
        return "\n".join(lines)

    @property
    def spans(self) -> list[str]:
        """What stands between single backticks in the prose, line breaks as blanks."""
        return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.prose)]


@cache
def pages() -> tuple[Page, ...]:
    """All of them."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found += [ROOT / "patches" / "README.md", ROOT / "benchmarks" / "results" / "README.md"]
    return tuple(_page(path) for path in found)


def page(name: str) -> Page:
    """The page of that path."""
    return next(one for one in pages() if one.name == name)


def _page(path: Path) -> Page:
    name, text = str(path.relative_to(ROOT)), path.read_text()
    return Page(name, text, tuple(_with_outputs(_blocks(name, text))))


def _blocks(name: str, text: str) -> Iterator[Block]:
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if not fence:
            continue
        inside = []
        for _, inner in lines:
            if inner.strip() == fence["ticks"]:
                break
            inside.append(inner.removeprefix(fence["indent"]))
        language, *words = fence["info"].split() or [""]
        yield Block(name, number, language, tuple(words), "\n".join(inside))


def _with_outputs(blocks: Iterator[Block]) -> Iterator[Block]:
    """A block of ``output`` belongs to the commands right before it."""
    last: Block | None = None
    for block in blocks:
        if block.language == "output":
            assert last is not None and last.is_run, f"{block}: output of nothing that is run"
            last = Block(
                last.page, last.line, last.language, last.words, last.text, block.text
            )  # fmt: skip
            continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last
