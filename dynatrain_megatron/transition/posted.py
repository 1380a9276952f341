"""Switches that are announced: what is to be done, by whom, and at which step boundary.

One process, rank 0 of the job, announces them, one after the other, by number. Others prepare what
they can while training goes on. Where a switch stops the job is decided by one register, written
once: the boundary, or why there will be none. At a boundary of the schedule all stop by themselves;
any other follows from promises::

    ready      prepared here; training untouched
    armed      all are ready
    hold       a process of the job: I will not pass boundary h before I know where to stop
    stop       the latest of all promises; or, until then, ABORT
    stopped    the job stands still there and has saved what it wanted to; who joins waits for it

In the same way the job's processes agree from which boundary on groups are made, where that is done
a few at each (``begin``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.store import JobStore, store_errors

_ABORT = "ABORT "

To = Literal["begin", "stop"]
"""What a promise is about: making groups, a few at each boundary, or the switch itself."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A switch to come: ``layout`` is what :func:`dynatrain_megatron.layout.derive` takes.

    ``at`` is the first iteration after which it may be; with ``step``, the schedule's step that it
    is, it is exactly there. ``origin`` says who wants it, ``request`` is the number of one from
    outside. Where ``refused`` says why it cannot be, nothing is done. ``placement`` is what the
    order of the target's processes saves, as the event of the switch tells it.
    """

    change: Change
    layout: Any
    at: int = 0
    step: int | None = None
    origin: str = "schedule"
    request: int | None = None
    refused: str = ""
    placement: dict[str, Any] | None = None

    def to_json(self) -> str:
        """As text that :meth:`from_json` reads."""
        return json.dumps(
            {
                **{name: getattr(self, name) for name in self.__slots__ if name != "change"},
                "change": self.change.to_json(),
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Posted:
        """What another process wrote."""
        read = json.loads(text)
        return cls(**{**read, "change": Change.from_json(read["change"])})


class Board:
    """Where switches are announced and their boundaries decided; any thread, local calls."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def post(self, posted: Posted) -> None:
        """Announce a switch; rank 0 of the job."""
        with store_errors("the switch could not be announced"):
            client = self._store.here()
            client.set(_key(posted.change.number, "spec"), posted.to_json())
            client.set("switch/latest", str(posted.change.number))

    def read(self, number: int) -> Posted | None:
        """The switch of this number, if it is announced."""
        key, client = _key(number, "spec"), self._store.here()
        with store_errors("whether a switch is announced cannot be known"):
            if not client.check([key]):
                return None
            return Posted.from_json(bytes(client.get(key)))

    def latest(self) -> int:
        """The number of the last switch that was announced; 0 where there is none."""
        client = self._store.here()
        with store_errors("whether a switch is announced cannot be known"):
            if not client.check(["switch/latest"]):
                return 0
            return int(client.get("switch/latest"))

    def wait(self, number: int, *, timeout_s: float) -> Posted:
        """The switch of this number, once it is announced. Raises :class:`WorldError`."""
        key, client = _key(number, "spec"), self._store.here()
        with store_errors(f"switch {number} was not announced within {timeout_s:g} s"):
            client.wait([key], timedelta(seconds=timeout_s))
            return Posted.from_json(bytes(client.get(key)))

    def ready(self, change: Change) -> None:
        """This process is prepared; the last one arms the switch."""
        client = self._store.here()
        with store_errors("the switch could not be prepared"):
            if client.add(_key(change.number, "ready"), 1) == len(change.processes):
                client.set(_key(change.number, "armed"), "")

    def is_armed(self, number: int) -> bool:
        """Whether all are prepared."""
        return self._has(number, "armed")

    def has_gate(self, change: Change) -> None:
        """This process of the job can make groups a few at each boundary."""
        client = self._store.here()
        with store_errors("where to begin could not be agreed on"):
            if client.add(_key(change.number, "gates"), 1) == len(change.source):
                client.set(_key(change.number, "gated"), "")

    def all_have_gates(self, number: int) -> bool:
        """Whether all of the job can; before, nobody promises to wait for it."""
        return self._has(number, "gated")

    def hold(self, change: Change, boundary: int, to: To = "stop") -> None:
        """Promise to stop, or to ``begin``, at ``boundary`` at the latest; the last one decides."""
        client = self._store.here()
        with store_errors("the boundary could not be agreed on"):
            rank = client.add(_key(change.number, f"{to}-holds"), 1)
            client.set(_key(change.number, f"{to}-hold/{rank}"), str(boundary))
            if rank == len(change.source):
                keys = [_key(change.number, f"{to}-hold/{n}") for n in range(1, rank + 1)]
                client.wait(keys, timedelta(seconds=10))
                self.stop(change.number, max(int(client.get(key)) for key in keys), to)

    def stop(self, number: int, boundary: int, to: To = "stop") -> None:
        """Let the job stop (``begin``) there, unless the switch is called off already."""
        with store_errors("the boundary could not be agreed on"):
            self._store.here().compare_set(_key(number, to), "", str(boundary))

    def call_off(self, number: int, why: str) -> int | str:
        """There will be no such switch, unless its boundary is decided.

        Returns what stands, as :meth:`boundary` does.
        """
        with store_errors("the switch could not be called off"):
            stands = self._store.here().compare_set(_key(number, "stop"), "", f"{_ABORT}{why}")
            return _read_stop(bytes(stands).decode())

    def boundary(self, number: int) -> int | str | None:
        """Where to stop; why there will be none, as text; or None while that is open."""
        client, key = self._store.here(), _key(number, "stop")
        with store_errors("where to stop cannot be known"):
            if not client.check([key]):
                return None
            return _read_stop(bytes(client.get(key)).decode())

    def say_stopped(self, number: int) -> None:
        """The job stands still at the boundary and has saved what it wanted to; rank 0."""
        with store_errors("those that join could not be told to come"):
            self._store.here().set(_key(number, "stopped"), "")

    def has_stopped(self, number: int) -> bool:
        """Whether it does."""
        return self._has(number, "stopped")

    def begins(self, number: int) -> int | str | None:
        """As :meth:`boundary`, of where groups begin to be made; where it stops, if not before."""
        client, key = self._store.here(), _key(number, "begin")
        with store_errors("where to begin cannot be known"):
            if client.check([key]):
                return int(client.get(key))
        return self.boundary(number)

    def wait_for_begin(self, number: int, *, timeout_s: float) -> int | str:
        """As :meth:`begins`, once it is decided; calls the switch off when time is up."""
        return self._wait(self.begins, number, timeout_s)

    def wait_for_boundary(self, number: int, *, timeout_s: float) -> int | str:
        """As :meth:`boundary`, once it is decided; calls the switch off when time is up."""
        return self._wait(self.boundary, number, timeout_s)

    def _wait(
        self, find: Callable[[int], int | str | None], number: int, timeout_s: float
    ) -> int | str:
        deadline = time.monotonic() + timeout_s
        while (found := find(number)) is None:
            if time.monotonic() > deadline:
                why = f"no boundary was agreed on within {timeout_s:g} s"
                return self.call_off(number, why)
            time.sleep(0.005)
        return found

    def forget(self, change: Change) -> None:
        """Delete its keys; for one process, when nobody reads them any more."""
        client = self._store.here()
        names = ["spec", "ready", "armed", "gates", "gated", "stopped", "votes", "decision"]
        names += ["way-back"]
        for to in ("begin", "stop"):
            names += [to, f"{to}-holds"]
            names += [f"{to}-hold/{n + 1}" for n in range(len(change.source))]
        names += [f"back/{uid}" for uid in change.source]
        names += [f"done/{uid}" for uid in change.target]
        names += [f"finished/{uid}" for uid in change.processes]
        names += [f"ends/{uid}" for uid in change.processes]
        for name in names:
            client.delete_key(_key(change.number, name))

    def _has(self, number: int, name: str) -> bool:
        with store_errors("how far a switch is cannot be known"):
            return bool(self._store.here().check([_key(number, name)]))


def ends_key(change: Change, uid: str) -> str:
    """Where a process tells the others which connections its new groups have."""
    return _key(change.number, f"ends/{uid}")


def _key(number: int, name: str) -> str:
    return f"switch/{number}/{name}"


def _read_stop(text: str) -> int | str:
    return text.removeprefix(_ABORT) if text.startswith(_ABORT) else int(text)
