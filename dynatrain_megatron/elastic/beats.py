"""Signs of life: what each process of a job tells the others, again and again, and who is silent.

They are judged by their change, by the reader's own clock, so that no two clocks are compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.whereabouts import LastWord, from_text

BEAT_S = 1.0
SILENT_S = 10.0
"""A process that has given no sign of life for so long, seconds, is taken for lost."""

_WATCHED = 2


class Beats:
    """When each of some processes was last heard of; for one thread."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._seen: dict[str, tuple[bytes, float]] = {}

    def silent(self, uids: Sequence[str], seconds: float = SILENT_S) -> list[str]:
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


def watched_by(uid: str, uids: Sequence[str]) -> list[str]:
    """Whom of ``uids`` this one watches: those that follow it, round in a ring.

    If any live and any are silent, one that lives watches one that is silent. So a job of n
    processes reads 2 n beats at a time and not n².
    """
    at = uids.index(uid)
    ring = [*uids[at + 1 :], *uids[:at]]
    return ring[:_WATCHED]


def last_words(directory: Directory, uids: Sequence[str]) -> list[LastWord]:
    """Where each was when it was last heard of."""
    return [from_text(beat) for beat in directory.beats(uids)]
