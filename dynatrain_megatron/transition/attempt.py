"""One attempt to switch, as its processes decide on it: all of them commit, or none does.

What decides is one register in the store, which is written once::

    vote      I have all I need, verified; the last to say so writes COMMIT
    abort     I cannot: ABORT and why, unless something stands there already
    outcome   what stands there: everyone obeys it

COMMIT can only be written when all have voted, so whoever has not voted may abort, and whoever has
may only wait. After an abort the processes of the job call the roll: training goes on when all of
them are back, and the job ends where one is not. Where parts of the old state are gone, all say
before how far they got, and bring it back together (:mod:`.undo`).
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.store import JobStore, store_errors
from dynatrain_megatron.errors import SwitchAborted, TransitionError, WorldError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_COMMIT = "COMMIT"
_ABORT = "ABORT "
_REASON_CHARS = 1000


class Attempt:
    """This process's part in deciding on ``change``; ``uid`` is its own. Any thread.

    ``in_doubt`` says that this process has voted and does not know the outcome: others may have
    committed, so it must neither commit nor go back.
    """

    def __init__(self, store: JobStore, change: Change, uid: str) -> None:
        self.change = change
        self.uid = uid
        self.in_doubt = False
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
        if outcome != _COMMIT:
            raise SwitchAborted(outcome.removeprefix(_ABORT))

    def _outcome(self, timeout_s: float) -> str:
        client = self._client()
        self.in_doubt = True
        with store_errors("the outcome of the vote cannot be known: the store is gone"):
            if client.add(self._key("votes"), 1) == len(self.change.processes):
                return self._decide(client, _COMMIT)
            if self._waited(client, "decision", timeout_s):
                return bytes(client.get(self._key("decision"))).decode()
            return self._decide(
                client, f"{_ABORT}{self.uid} waited {timeout_s:g} s for the others' votes"
            )

    def abort(self, reason: str) -> str:
        """This process has not voted and will not: returns why the attempt ends, as all know it."""
        text = f"{_ABORT}{self.uid}: {' '.join(reason.split())[:_REASON_CHARS]}"
        with store_errors("the switch cannot be called off: the store is gone"):
            return self._decide(self._client(), text).removeprefix(_ABORT)

    @property
    def is_aborted(self) -> bool:
        """Whether somebody has called it off."""
        client = self._client()
        with store_errors("whether the switch was called off cannot be known"):
            if not client.check([self._key("decision")]):
                return False
            return bytes(client.get(self._key("decision"))).decode() != _COMMIT

    def say_finished(self, stages: int) -> None:
        """After an abort: so many stages are finished as far as this process knows."""
        with store_errors("how far the switch got cannot be told"):
            self._client().set(self._key(f"finished/{self.uid}"), str(stages))

    def finished(self, *, timeout_s: float) -> int:
        """How many stages are finished, once all processes have said so; each of them asks.

        Raises :class:`TransitionError` naming those that do not say.
        """
        client, found, silent = self._client(), 0, []
        deadline = time.monotonic() + timeout_s
        with store_errors("how far the switch got cannot be known"):
            for uid in self.change.processes:
                left = max(0.001, deadline - time.monotonic())
                if self._waited(client, f"finished/{uid}", left):
                    found = max(found, int(client.get(self._key(f"finished/{uid}"))))
                else:
                    silent.append(uid)
        if silent and found:
            raise TransitionError(
                f"{', '.join(silent)} did not come back within {timeout_s:g} s, with parts of the "
                "state that are nowhere else"
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

        Raises :class:`TransitionError` naming those that are not.
        """
        client = self._client()
        deadline = time.monotonic() + timeout_s
        with store_errors("who is back from the switch cannot be known"):
            client.set(self._key(f"back/{self.uid}"), "")
            for uid in self.change.source:
                left = max(0.001, deadline - time.monotonic())
                if not self._waited(client, f"back/{uid}", left):
                    keys = [self._key(f"back/{uid}") for uid in self.change.source]
                    absent = [
                        uid
                        for uid, key in zip(self.change.source, keys, strict=True)
                        if not client.check([key])
                    ]
                    raise TransitionError(
                        f"after the switch was called off {', '.join(absent)} did not come back "
                        f"within {timeout_s:g} s, and the job cannot go on without; start again "
                        "from the last checkpoint"
                    )

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
