"""Who takes part in a switch: the processes of the job before it, and those after."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from dynatrain_megatron.elastic.world import World


@dataclass(frozen=True, slots=True)
class Change:
    """The ``number``-th switch of a job; ``source`` and ``target`` are uids, by rank.

    Its bridge, the world of all of them, has the id ``bridge_id``, the target's world ``world_id``.
    """

    number: int
    source: tuple[str, ...]
    target: tuple[str, ...]
    bridge_id: int
    world_id: int

    @property
    def joiners(self) -> tuple[str, ...]:
        """Who was not there before."""
        return tuple(uid for uid in self.target if uid not in set(self.source))

    @property
    def leavers(self) -> tuple[str, ...]:
        """Who is not there afterwards."""
        return tuple(uid for uid in self.source if uid not in set(self.target))

    @property
    def processes(self) -> tuple[str, ...]:
        """All of them by their rank in the bridge: the source's keep theirs."""
        return self.source + self.joiners

    def bridge(self, backend: str, timeout_s: float) -> World:
        """The world that carries the transfer, as this process sees it."""
        return World.of(self.bridge_id, self.processes, backend=backend, timeout_s=timeout_s)

    def world(self, backend: str, timeout_s: float) -> World:
        """The target's world, as this process sees it, which must be in it."""
        return World.of(self.world_id, self.target, backend=backend, timeout_s=timeout_s)

    def to_json(self) -> str:
        """As text that :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Change:
        """What another process wrote."""
        read = json.loads(text)
        return cls(
            read["number"],
            tuple(read["source"]),
            tuple(read["target"]),
            read["bridge_id"],
            read["world_id"],
        )
