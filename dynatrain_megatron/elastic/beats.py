"""Which processes have given no sign of life for too long."""

from __future__ import annotations

import time

from dynatrain_megatron.elastic.directory import Directory

SILENT_S = 10.0
"""A process that has given no sign of life for so long, seconds, is taken for lost."""


class Beats:
    """When each of some processes was last heard of, by this process's own clock."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._seen: dict[str, tuple[bytes, float]] = {}

    def silent(self, uids: tuple[str, ...], seconds: float = SILENT_S) -> list[str]:
        """Those of ``uids`` that have been silent for so long since they were first asked for."""
        now = time.monotonic()
        found = []
        for uid, beat in zip(uids, self._directory.beats(uids), strict=True):
            last, since = self._seen.get(uid, (None, now))
            if last != beat:
                since = now
            self._seen[uid] = beat, since
            if now - since > seconds:
                found.append(uid)
        return found
