"""Groups that outlive a world: a job that comes back to a layout finds its groups again.

A group is known by its members' uids in their order, not by ranks, which the next world renumbers.
Whoever is asked for a group and has one of that key in a world that is about to end takes that one;
of worlds that stay none is taken, so that no group is ever in two. All members must answer alike,
or one waits for ever where another makes nothing. They do, because of two rules that hold for each
process:

- it keeps the worlds it was in last, as many as its peers, and all of them put a world aside, take
  it back and end it at the same switches;
- where a process leaves, those that stay end every world that it was in, and it ends all of its
  own. So no key has a member that lacks the group: that member was there when the group was made,
  and at every switch since.

Whoever is not in a group makes nothing and needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dynatrain_megatron.elastic.records import Held

_SET_BY_TORCH = {"group_name", "split_color"}
"""Fields of a backend's options that torch writes when it makes a group with them."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What makes a group fit for what another was made for.

    ``members`` are uids in the order of their ranks in the group, ``options`` the backend's own as
    text. Two groups of a world that agree in all else are told apart by ``index``, so that none
    serves two purposes at once.
    """

    members: tuple[str, ...]
    backend: str
    options: str = ""
    purpose: str = ""
    index: int = 0


HeldGroups = Mapping[GroupKey, Held]
"""A process's groups in one world or several."""


def all_held(worlds: Iterable[HeldGroups]) -> dict[GroupKey, Held]:
    """The groups of several worlds, each once."""
    return {key: held for world in worlds for key, held in world.items()}


def options_text(options: Any) -> str:
    """A backend's options as text that is equal where they are; empty for none."""
    if options is None:
        return ""
    parts = []
    for name in sorted(set(dir(options)) - _SET_BY_TORCH):
        if name.startswith("_"):
            continue
        value = getattr(options, name)
        if isinstance(value, (bool, int, float, str, timedelta)):
            parts.append(f"{name}={value}")
        elif name == "config":
            parts.append(f"config=({options_text(value)})")
    return " ".join(parts)
