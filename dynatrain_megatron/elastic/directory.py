"""Who belongs to a job, who wants to, who has to go, and what is asked of it: keys of its store.

::

    dynatrain/job            what a process that joins has to know; whoever starts a job writes it
    …/arrival/<k>            a process that waits to be taken into the job
    …/notice/<k>             a process that has to leave
    …/beat/<uid>             a process that lives, and where it is: written anew again and again
    …/request/<k>, answer/<k>  what is asked of the job from outside, and what became of it
    …/status                 what the job is doing, written anew again and again
    …/owner                  with whom the store ends
    …/nobody-stays           all have to leave, and there are no others
    …/end                    the job is over, or whether it ended well

Lists are numbered by counters, so that one look says whether there is something new. Everything is
local; each method takes the calling thread's client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from dynatrain_megatron import __version__
from dynatrain_megatron.elastic.control import signed
from dynatrain_megatron.elastic.store import JobStore, StoreAddress, StoreOwner, store_errors
from dynatrain_megatron.errors import WorldError

_JOB = "dynatrain/job"


@dataclass(frozen=True, slots=True)
class JobCard:
    """What a process must know to join: the job's name in its store, and how it was launched.

    ``flags`` are Megatron's, as text by name, ``versions`` those of the libraries that matter,
    ``config`` is the plugin's configuration as text.
    """

    name: str
    world: int
    flags: dict[str, str]
    versions: dict[str, str]
    config: str

    @classmethod
    def read(cls, address: StoreAddress, *, timeout_s: float) -> JobCard:
        """The card of the job at ``address``.

        Raises :class:`WorldError` where there is none, or one of another version.
        """
        client = address.connect(timeout_s=timeout_s)
        with store_errors(f"no job has told the store at {address} of itself in {timeout_s:g} s"):
            client.wait([_JOB], timedelta(seconds=timeout_s))
            text = client.get(_JOB)
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise WorldError(
                f"the job at {address} tells of itself in another way than this version "
                f"({__version__}) does; start this process with the job's"
            ) from error

    def write(self, address: StoreAddress, *, timeout_s: float) -> None:
        """Let processes join; the last job at a store is the one they join."""
        client = address.connect(timeout_s=timeout_s)
        with store_errors(f"the store at {address} takes no card"):
            client.set(_JOB, json.dumps(asdict(self)))

    def differences(self, other: JobCard) -> list[str]:
        """In words, what keeps a process with the ``other`` card from joining."""
        found = []
        for kind, ours, theirs in (
            ("", self.flags, other.flags),
            ("version of ", self.versions, other.versions),
        ):
            for name in sorted({*ours, *theirs}):
                here, there = ours.get(name, "absent"), theirs.get(name, "absent")
                if here != there:
                    found.append(f"{kind}{name} is {here} in the job and {there} here")
        return found


class Directory:
    """The lists of one job."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def arrive(self, uid: str) -> int:
        """Wait to be taken into the job; returns the arrival's number."""
        return self._append("arrival", lambda _: uid)

    def withdraw_arrival(self, number: int) -> None:
        """It waits no more: it is about to be taken in."""
        self._store.here().set(f"arrival/{number}", "")

    def arrivals(self, after: int) -> list[str]:
        """The uids that have arrived since the first ``after``; empty where taken in since."""
        return self._since("arrival", after)

    def give_notice(self, uid: str) -> int:
        """This process has to leave; returns the number of its notice."""
        return self._append("notice", lambda _: uid)

    def withdraw_notice(self, number: int) -> None:
        """It has left, and may come back."""
        self._store.here().set(f"notice/{number}", "")

    def notices(self, after: int) -> list[str]:
        """The uids that have given notice since the first ``after``; empty where withdrawn."""
        return self._since("notice", after)

    def let_nobody_stay(self) -> None:
        """All processes of the job have to leave, and there are no others."""
        self._store.here().set("nobody-stays", "")

    @property
    def nobody_stays(self) -> bool:
        """Whether that is so."""
        return bool(self._store.here().check(["nobody-stays"]))

    def ask(self, request: dict[str, Any] | str, secret: str) -> int:
        """Ask something of the job whose ``secret`` this is; returns its answer's number.

        A text is passed on as it is.
        """
        text = request if isinstance(request, str) else json.dumps(request)
        return self._append("request", lambda number: signed(text, number, secret))

    def requests(self, after: int) -> list[str]:
        """What was asked since the first ``after`` requests, as signed text."""
        return self._since("request", after)

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Say what became of a request; may be said again, the last counts."""
        self._store.here().set(f"answer/{number}", json.dumps(answer))

    def answer_of(self, number: int) -> dict[str, Any] | None:
        """What became of it so far."""
        return self._read(f"answer/{number}")

    def beat(self, uid: str, text: str) -> None:
        """This process lives; ``text`` is another one each time."""
        self._store.here().set(f"beat/{uid}", text)

    def beats(self, uids: Sequence[str]) -> list[bytes]:
        """The last sign of life of each; empty where there was none yet."""
        client = self._store.here()
        return [
            bytes(client.get(key)) if client.check([key]) else b""
            for key in (f"beat/{uid}" for uid in uids)
        ]

    def publish(self, status: dict[str, Any]) -> None:
        """What the job is doing, for whoever asks."""
        self._store.here().set("status", json.dumps(status))

    def status(self) -> dict[str, Any] | None:
        """What the job said last."""
        return self._read("status")

    def own(self, owner: StoreOwner) -> None:
        """Say with whom the store ends; at the launch."""
        self._store.here().set("owner", json.dumps(asdict(owner)))

    def owner(self) -> StoreOwner:
        """With whom the store ends."""
        read = self._read("owner")
        if read is None:
            return StoreOwner()
        try:
            return StoreOwner(tuple(map(str, read["processes"])), read["what"], read["parks"])
        except (KeyError, TypeError) as error:
            raise WorldError("the job's store has no readable owner") from error

    def end(self, how: str) -> None:
        """The job is over: whoever waits for it may go."""
        self._store.here().compare_set("end", "", how)

    @property
    def has_ended(self) -> bool:
        """Whether it is."""
        return bool(self._store.here().check(["end"]))

    @property
    def ended_how(self) -> str:
        """What was said when it ended; only then."""
        return bytes(self._store.here().get("end")).decode()

    def _append(self, kind: str, text: Callable[[int], str]) -> int:
        client = self._store.here()
        with store_errors(f"the job's store takes no {kind}"):
            number = client.add(f"{kind}s", 1) - 1
            client.set(f"{kind}/{number}", text(int(number)))
        return int(number)

    def _since(self, kind: str, after: int) -> list[str]:
        client = self._store.here()
        with store_errors(f"the job's store does not tell of any {kind}"):
            count = client.add(f"{kind}s", 0)
            # A number that is counted and not written yet is for the next time, and all after it.
            found = []
            for number in range(after, count):
                if not client.check([f"{kind}/{number}"]):
                    break
                found.append(bytes(client.get(f"{kind}/{number}")).decode(errors="replace"))
        return found

    def _read(self, key: str) -> dict[str, Any] | None:
        client = self._store.here()
        try:
            if not client.check([key]):
                return None
            read = json.loads(client.get(key))
        except (ValueError, RuntimeError) as error:
            raise WorldError(f"the job's store has no readable {key}") from error
        if not isinstance(read, dict):
            raise WorldError(f"the job's store has no readable {key}")
        return read
