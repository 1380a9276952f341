"""Orders in which a run visits layouts."""

from __future__ import annotations

from collections.abc import Sequence


def every_pair(layouts: Sequence[str]) -> list[str]:
    """A closed tour that takes every ordered pair of different layouts exactly once.

    Starts and ends at ``layouts[0]``: an Eulerian circuit of the complete digraph, by
    Hierholzer's algorithm.
    """
    unused = {a: [b for b in reversed(layouts) if b != a] for a in layouts}
    stack, tour = [layouts[0]], []
    while stack:
        if unused[stack[-1]]:
            stack.append(unused[stack[-1]].pop())
        else:
            tour.append(stack.pop())
    return tour[::-1]


def schedule(tour: Sequence[str], *, first: int = 2) -> str:
    """The ``schedule`` override that walks a tour, one switch an iteration from ``first`` on."""
    steps = [f"{{iteration: {first + i}, layout: '{to}'}}" for i, to in enumerate(tour[1:])]
    return f"schedule=[{', '.join(steps)}]"
