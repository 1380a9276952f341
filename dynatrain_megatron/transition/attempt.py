"""One attempt to switch, as its processes decide on it: all of them commit, or none does.

What decides is one register in the store, which is written once::

    vote      I have all I need, verified; the last to say so writes COMMIT
    abort     I cannot: ABORT and why, unless something stands there already
    outcome   what stands there: everyone obeys it

COMMIT can only be written when all have voted, so whoever has not voted may abort, and whoever has
may only wait. After an abort the processes of the job call the roll: training goes on when all of
them are back, and the job ends where one is not. Where parts of the old state are gone, all say
before how far they got, and bring it back together (:mod:`.undo`).

What keeps a process waiting is told by the others' signs of life, which say where they are; they
are read when something went wrong, and not before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from dynatrain_megatron import whereabouts
from dynatrain_megatron.elastic.beats import BEAT_S, SILENT_S, Beats, last_words
from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.store import JobStore, store_errors
from dynatrain_megatron.errors import SwitchAborted, TransitionError, WorldError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_COMMIT = "COMMIT"
_ABORT = "ABORT "
_REASON_CHARS = 1000
_MOST_NAMED = 5


class Attempt:
    """This process's part in deciding on ``change``; ``uid`` is its own. Any thread.

    ``in_doubt`` says that this process has voted and does not know the outcome: others may have
    committed, so it must neither commit nor go back. ``is_agreed`` says that it knows that all have
    voted for it.
    """

    def __init__(self, store: JobStore, change: Change, uid: str) -> None:
        self.change = change
        self.uid = uid
        self.in_doubt = False
        self.is_agreed = False
        self._store = store

    def vote(self, *, timeout_s: float) -> None:
        """Say yes and wait for the outcome; returns when it is to commit.

        Raises :class:`SwitchAborted` where it is not, :class:`TransitionError` where the store is
        gone, so that nobody can know: then the process must end.
        """
        try:
            outcome = self._outcome(timeout_s)
        except WorldError as error:
            raise TransitionError(
                f"{error}; others may have committed the switch, so this process ends"
            ) from error
        self.in_doubt = False
        self.is_agreed = outcome == _COMMIT
        if not self.is_agreed:
            raise SwitchAborted(outcome.removeprefix(_ABORT))

    def _outcome(self, timeout_s: float) -> str:
        client = self._client()
        self.in_doubt = True
        with store_errors("the outcome of the vote cannot be known: the store is gone"):
            if client.add(self._key("votes"), 1) == len(self.change.processes):
                return self._decide(client, _COMMIT)
            with whereabouts.waiting("the others' votes"):
                is_decided = self._waited(client, "decision", timeout_s)
            if is_decided:
                return bytes(client.get(self._key("decision"))).decode()
            why = f"{self.missing()}{self.uid} waited {timeout_s:g} s for the others' votes"
            return self._decide(client, f"{_ABORT}{why}")

    def abort(self, reason: str) -> str:
        """This process has not voted and will not: returns why the attempt ends, as all know it."""
        text = f"{_ABORT}{self.uid}: {' '.join(reason.split())[:_REASON_CHARS]}"
        with store_errors("the switch cannot be called off: the store is gone"):
            return self._decide(self._client(), text).removeprefix(_ABORT)

    @property
    def is_aborted(self) -> bool:
        """Whether somebody has called it off."""
        return self._stands() not in (None, _COMMIT)

    @property
    def is_committed(self) -> bool:
        """Whether all have voted for it."""
        return self._stands() == _COMMIT

    def say_finished(self, stages: int) -> None:
        """After an abort: so many stages are finished as far as this process knows."""
        with store_errors("how far the switch got cannot be told"):
            self._client().set(self._key(f"finished/{self.uid}"), str(stages))

    def finished(self, *, timeout_s: float) -> int:
        """How many stages are finished, once all processes have said so; each of them asks.

        Raises :class:`TransitionError` naming those that do not say.
        """
        with whereabouts.waiting("all to say how far they got"):
            return self._finished(timeout_s)

    def _finished(self, timeout_s: float) -> int:
        client, found, silent = self._client(), 0, []
        deadline = time.monotonic() + timeout_s
        with store_errors("how far the switch got cannot be known"):
            for rank, uid in enumerate(self.change.processes):
                left = max(0.001, deadline - time.monotonic())
                if self._waited(client, f"finished/{uid}", left):
                    found = max(found, int(client.get(self._key(f"finished/{uid}"))))
                else:
                    silent.append(rank)
        if silent and found:
            raise TransitionError(
                f"these did not come back within {timeout_s:g} s, with parts of the state that are "
                f"nowhere else: {self.told_of(silent)}"
            )
        return found

    def way_back(self, *, timeout_s: float) -> int:
        """A world's id for the bridge of the way back, the same on all; each process asks."""
        client = self._client()
        with store_errors("the way back from the switch could not be agreed on"):
            if self.uid == self.change.processes[0]:
                client.set(self._key("way-back"), str(self._store.new_world_ids(1)[0]))
            client.wait([self._key("way-back")], timedelta(seconds=timeout_s))
            return int(client.get(self._key("way-back")))

    def call_roll(self, *, timeout_s: float) -> None:
        """Wait until all processes of the job are back from an abort; each of them calls it.

        One that gives no sign of life is not waited for that long. Raises :class:`TransitionError`
        naming those that are not back.
        """
        self._say("back")
        with whereabouts.waiting("all processes to be back"):
            self._all_did("back", self.change.source, "after the switch was called off", timeout_s)

    def say_done(self) -> None:
        """Committed here, as far as this process itself goes."""
        self._say("done")

    def wait_for_done(self, *, timeout_s: float) -> None:
        """As :meth:`call_roll`, of the processes of the target that have committed."""
        with whereabouts.waiting("all processes to commit"):
            self._all_did("done", self.change.target, "after the switch was committed", timeout_s)

    def missing(self) -> str:
        """Whom this process waits for, as far as the others' last words tell, in front of an error.

        Empty where all of them wait themselves, or the store is gone.
        """
        uids = self.change.processes
        try:
            words = last_words(Directory(self._store), uids)
        except (WorldError, RuntimeError):
            return ""
        ranks = [n for n, word in enumerate(words) if not word.waits_for and uids[n] != self.uid]
        return f"not come so far: {self.told_of(ranks)}; " if ranks else ""

    def told_of(self, ranks: Sequence[int]) -> str:
        """Processes by their ranks in the bridge, and where they were when last heard of."""
        uids = [self.change.processes[rank] for rank in ranks[:_MOST_NAMED]]
        try:
            words = [f", {word}" for word in last_words(Directory(self._store), uids)]
        except (WorldError, RuntimeError):
            words = [""] * len(uids)
        told = [f"{uid} (rank {n}){w}" for n, uid, w in zip(ranks, uids, words, strict=False)]
        return "; ".join([*told, *_and_more(ranks)])

    def _all_did(self, what: str, uids: Sequence[str], when: str, timeout_s: float) -> None:
        """Wait until all of ``uids`` have said that they did ``what``."""
        client, begin = self._client(), time.monotonic()
        beats, silent = Beats(Directory(self._store)), 2 * SILENT_S
        with store_errors(f"who is there {when} cannot be known"):
            for uid in uids:
                while not self._waited(client, f"{what}/{uid}", min(BEAT_S, timeout_s)):
                    waited_s = time.monotonic() - begin
                    if waited_s < timeout_s and not beats.silent([uid], silent):
                        continue
                    absent = [
                        self.change.processes.index(each)
                        for each in uids
                        if not client.check([self._key(f"{what}/{each}")])
                    ]
                    raise TransitionError(
                        f"{when} these did not come back within {waited_s:.1f} s: "
                        f"{self.told_of(absent)}. The job cannot go on without; start again from "
                        "the last checkpoint"
                    )

    def _say(self, what: str) -> None:
        with store_errors("the others cannot be told how far this process is"):
            self._client().set(self._key(f"{what}/{self.uid}"), "")

    def _stands(self) -> str | None:
        client = self._client()
        with store_errors("whether the switch was called off cannot be known"):
            if not client.check([self._key("decision")]):
                return None
            return bytes(client.get(self._key("decision"))).decode()

    def _decide(self, client: Store, outcome: str) -> str:
        return bytes(client.compare_set(self._key("decision"), "", outcome)).decode()

    def _waited(self, client: Store, key: str, timeout_s: float) -> bool:
        import torch.distributed as dist

        try:
            client.wait([self._key(key)], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            return False
        return True

    def _key(self, name: str) -> str:
        return f"switch/{self.change.number}/{name}"

    def _client(self) -> Store:
        return self._store.here()


def named(change: Change, ranks: Sequence[int]) -> str:
    """Processes of ``change`` by their ranks in its bridge."""
    told = [f"{change.processes[rank]} (rank {rank})" for rank in ranks[:_MOST_NAMED]]
    return ", ".join([*told, *_and_more(ranks)])


def _and_more(ranks: Sequence[int]) -> list[str]:
    more = len(ranks) - _MOST_NAMED
    return [f"and {more} more"] if more > 0 else []
