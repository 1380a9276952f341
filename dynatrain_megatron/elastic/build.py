"""Building a world beside the one in force.

::

    build    connect to the store, default group, the caller's groups, meet     any thread
             verdict: built by all, or by none                                  through the store
    install  one assignment                                                     every thread sees it
    retire   groups that no world needs any more are ended, one by one          main thread

A build cannot be called off: torch returns from connecting when all have come or time is up. So
its timeout is short, one build runs at a time, and the world in force does not depend on it. Its
groups get the timeout of training once it is built. Over a group that is reused from another world
nothing is sent meanwhile, since that world may be in force.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from dynatrain_megatron.elastic import records
from dynatrain_megatron.elastic.groups import HeldGroups
from dynatrain_megatron.elastic.live import LiveWorld
from dynatrain_megatron.elastic.maker import GroupMaker
from dynatrain_megatron.elastic.records import Record
from dynatrain_megatron.elastic.store import StoreAddress, store_errors
from dynatrain_megatron.elastic.world import World
from dynatrain_megatron.errors import WorldError, release_frames

_BUILT = "built"
_MESSAGE_CHARS = 300  # of torch's; some carry a stack
_ids: set[int] = set()  # of worlds that were ever begun here


class _Ballot:
    """One register in the store that says how a build ended, on all its processes alike."""

    def __init__(self, world: World, store: Store) -> None:
        self._world = world
        self._store = store
        store.set(f"came/{world.rank}", "")

    def built(self, timeout_s: float) -> str:
        """This process is done: returns the verdict when all are, or one is not in time."""
        if self._store.add(_BUILT, 1) == self._world.size:
            return self._say(_BUILT)
        try:
            self._store.wait(["verdict"], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            num_built = self._store.add(_BUILT, 0)
            self._say(f"after {timeout_s:g} s only {num_built} of {self._world.size} were done")
        return str(self._store.get("verdict").decode())

    def failed(self, error: BaseException) -> str:
        """This process failed: say so, unless another has; returns what stands there."""
        own = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:_MESSAGE_CHARS]}"
        try:
            return self._say(own)
        except dist.DistError:
            return f"{self._world.uid}: {own}; the store is out of reach too"

    def _say(self, verdict: str) -> str:
        if verdict != _BUILT:
            keys = set(self._store.list_keys())
            absent = [
                uid for rank, uid in enumerate(self._world.processes) if f"came/{rank}" not in keys
            ]
            missing = f"; never came: {', '.join(absent)}" if absent else ""
            verdict = f"{self._world.uid}: {verdict}{missing}"
        return bytes(self._store.compare_set("verdict", "", verdict)).decode()


def build[T](
    world: World,
    address: StoreAddress,
    make_groups: Callable[[GroupMaker], T],
    *,
    known: HeldGroups | None = None,
    timeout_s: float = 30.0,
    agree_s: float,
) -> LiveWorld[T]:
    """Collective over the world's processes: make it, on all of them or on none.

    Runs in any thread; the world in force stays in force for the others. ``make_groups`` is called
    with the new world in force for this thread, and gets a :class:`GroupMaker`. ``known`` are
    groups of other worlds to take over, as :mod:`.groups` says. Each wait is bounded by
    ``timeout_s``, but the last one, until all have made theirs, by ``agree_s``, which is longer:
    others may have come later, and know better what they wait for.

    Raises :class:`WorldError` where a process fails or stays away, with the first reason given;
    nothing is left then but the id, which is spent.
    """
    if world.id in _ids or world.id == 0:
        raise WorldError(f"world id {world.id} was used before; take a new one from the store")
    _ids.add(world.id)
    client = address.connect(timeout_s=timeout_s)
    store = PrefixStore(world.prefix, client)
    with store_errors(f"world {world.id} was not built"):
        ballot = _Ballot(world, store)
    record = Record(world.first_name)
    maker = GroupMaker(world, record, known or {}, timeout_s)
    live: LiveWorld[Any] = LiveWorld(world, record, None, client=store)
    cause: BaseException | None = None
    try:
        with records.entered(record), records.excepthook_kept():
            maker.default(store)
            live.groups = make_groups(maker)
            maker.meet()
        verdict = ballot.built(agree_s)
    except BaseException as error:
        verdict, cause = ballot.failed(error), error
    if cause is not None or verdict != _BUILT:
        live.held, live.reused = maker.held, tuple(maker.reused)
        live.abandon()
        live.groups = None
        del maker
        release_frames(cause)  # a failed group can burn a core for as long as it lives
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        raise WorldError(f"world {world.id} was not built: {verdict}") from cause
    live.held, live.reused = maker.held, tuple(maker.reused)
    maker.set_timeouts()
    client.set_timeout(timedelta(seconds=world.timeout_s))
    return live
