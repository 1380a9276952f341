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

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from dynatrain_megatron.elastic import records
from dynatrain_megatron.elastic.groups import GroupCache
from dynatrain_megatron.elastic.live import LiveWorld
from dynatrain_megatron.elastic.maker import GroupMaker
from dynatrain_megatron.elastic.records import Record
from dynatrain_megatron.elastic.store import StoreAddress, store_errors
from dynatrain_megatron.elastic.world import World
from dynatrain_megatron.errors import WorldError

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
    cache: GroupCache | None = None,
    timeout_s: float = 30.0,
    device: torch.device | None = None,
) -> LiveWorld[T]:
    """Collective over the world's processes: make it, on all of them or on none.

    Runs in any thread; the world in force stays in force for the others. ``make_groups`` is called
    with the new world in force for this thread, and gets a :class:`GroupMaker`. ``device`` lets
    NCCL connect at once. Each wait is bounded by ``timeout_s``.

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
    maker = GroupMaker(world, record, cache, timeout_s)
    live: LiveWorld[Any] = LiveWorld(world, record, None, client=store)
    cause: BaseException | None = None
    try:
        with records.entered(record), _excepthook_kept():
            maker.default(store, device)
            live.groups = make_groups(maker)
            maker.meet()
        # Others may have come later, and know better what they wait for.
        verdict = ballot.built(1.5 * timeout_s)
    except BaseException as error:
        verdict, cause = ballot.failed(error), error
    live.keys, live.made, live.reused = tuple(maker.keys), maker.made, maker.reused
    if cause is not None or verdict != _BUILT:
        live.end()
        live.groups = None
        del maker
        _release(cause)
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        raise WorldError(f"world {world.id} was not built: {verdict}") from cause
    maker.set_timeouts()
    client.set_timeout(timedelta(seconds=world.timeout_s))
    return live


def _release(error: BaseException | None) -> None:
    """Let go of what its frames hold: a failed group can burn a core for as long as it lives."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


@contextlib.contextmanager
def _excepthook_kept() -> Iterator[None]:
    """Take back the hook that torch wraps around ``sys.excepthook`` for each default group."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


class Building[T]:
    """A world that a thread of its own is making."""

    def __init__(self, world: World, make: Callable[[], LiveWorld[T]]) -> None:
        self.world = world
        self._make = make
        self._lock = threading.Lock()
        self._built: LiveWorld[T] | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        # A thread that hangs in torch must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, name=f"build world {world.id}", daemon=True
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the thread has returned, with a world or without."""
        return not self._thread.is_alive()

    def result(self, *, timeout_s: float) -> LiveWorld[T]:
        """The world; waits for it. Raises :class:`WorldError` where it could not be built."""
        self._thread.join(timeout_s)
        if not self.is_done:
            raise WorldError(f"world {self.world.id} is still being built after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._built is not None
        return self._built

    def abandon(self) -> None:
        """Nobody wants it any more: end it, now or when the thread is done with it."""
        with self._lock:
            self._is_abandoned = True
            built, self._built = self._built, None
            if built is not None:
                self._error = WorldError(f"world {self.world.id} was abandoned")
        if built is not None:
            built.end()

    def _run(self) -> None:
        try:
            built = self._make()
        except BaseException as error:
            self._error = error
            return
        with self._lock:
            if not self._is_abandoned:
                self._built = built
                return
            self._error = WorldError(f"world {self.world.id} was abandoned")
        built.end()


_latest: Building[Any] | None = None


def start[T](
    world: World,
    address: StoreAddress,
    make_groups: Callable[[GroupMaker], T],
    *,
    cache: GroupCache | None = None,
    timeout_s: float = 30.0,
    device: torch.device | None = None,
) -> Building[T]:
    """As :func:`build`, in a thread of its own, while this one goes on.

    ``make_groups`` starts no threads: they would see the world in force. Raises
    :class:`WorldError` while an earlier build is under way, which includes one that has failed
    elsewhere and still waits here.
    """
    global _latest
    if _latest is not None and not _latest.is_done:
        raise WorldError(
            f"world {_latest.world.id} is still being built on this process; build world "
            f"{world.id} when that has ended, at the latest after its timeout"
        )
    building = Building(
        world,
        lambda: build(world, address, make_groups, cache=cache, timeout_s=timeout_s, device=device),
    )
    _latest = building
    return building
