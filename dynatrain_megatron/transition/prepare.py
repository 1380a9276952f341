"""What a switch needs beside the state: a bridge between its processes, and the target's groups.

::

    prepare   what this process will be, and which groups it asks for      main thread, local
    build     the bridge and the target's world                            any thread, collective

Nothing of the model is built here. Where both have been done before the boundary, the stall has
none of it.
"""

from __future__ import annotations

import json
import socket
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from dynatrain_megatron.adapters import arguments, groups
from dynatrain_megatron.adapters.built import BuiltKey
from dynatrain_megatron.adapters.groups import Groups, WantedGroups
from dynatrain_megatron.adapters.job import Bridge, Job
from dynatrain_megatron.config import EngineTransport
from dynatrain_megatron.elastic import build as worlds
from dynatrain_megatron.elastic import building, records
from dynatrain_megatron.elastic.building import Building
from dynatrain_megatron.elastic.change import Change
from dynatrain_megatron.elastic.connections import Appearing, Connections, Ends
from dynatrain_megatron.elastic.gate import Gate
from dynatrain_megatron.elastic.groups import all_held
from dynatrain_megatron.elastic.live import LiveWorld
from dynatrain_megatron.elastic.maker import Group, GroupMaker
from dynatrain_megatron.elastic.store import JobStore, store_errors
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.engine import connect
from dynatrain_megatron.planner import Topology
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.transition.check import Target
from dynatrain_megatron.transition.posted import ends_key

_GROUPS_AT_ONCE = 4  # of a rank, made at one boundary where they are made at boundaries
_RINGS_SHARE = 4  # the part of staging memory that a transport may hold is one of so many


@dataclass(frozen=True, slots=True)
class Wire:
    """How worlds are built: ``timeout_s`` bounds a transfer's waits, ``connect_s`` those of
    building, but for the last of these, until all processes have built theirs: ``agree_s``.
    """

    transport: EngineTransport
    staging_bytes: int
    timeout_s: float
    connect_s: float = 30.0
    agree_s: float = 45.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """One process's view of a switch to come.

    ``key`` is that of the layout to be built, None on a process that leaves; ``wanted`` are its
    groups, None where they exist: it is dormant. ``donors`` are worlds that end with the switch,
    whose groups may be taken over. ``bridge`` is one that fits already.
    """

    change: Change
    target: Target
    key: BuiltKey | None
    wanted: WantedGroups | None
    donors: tuple[LiveWorld[Groups], ...]
    bridge: Bridge | None
    backend: str
    timeout_s: float

    @property
    def needs_building(self) -> bool:
        """Whether something has to be made that takes all processes; all of them agree on that."""
        return self.wanted is not None or self.bridge is None or bool(self.change.leavers)


@dataclass
class Worlds:
    """The bridge, ``is_new`` or one there was, and the target's world where it had to be built."""

    bridge: Bridge
    is_new: bool
    world: LiveWorld[Groups] | None

    def abandon(self) -> None:
        """Nobody wants it: end what was built; local."""
        if self.world is not None:
            self.world.abandon()
        if self.is_new:
            self.bridge.end()


def prepare(job: Job, change: Change, target: Target) -> Prepared:
    """What this process needs for ``change``; local, main thread, at a step boundary."""
    uid, args = process_uid(), target.args
    key = wanted = None
    backend = str(args.distributed_backend)
    if uid in change.target:
        key = BuiltKey.of(target.layout, args, change.target, backend)
        if job.dormant.get(key) is None:
            recipe, rank = job.recipe, change.target.index(uid)
            with _live_arguments(job, args):
                wanted = groups.wanted(
                    args, recipe.embedding_ranks, recipe.position_embedding_ranks, rank
                )
    left = None if job.built is None else job.built.key
    bridge = job.bridge
    if bridge is not None and set(bridge.processes) != set(change.processes):
        bridge = None
    return Prepared(
        change,
        target,
        key,
        wanted,
        tuple(built.world for built in job.dormant.giving_way(change.target, left)),
        bridge,
        backend,
        60.0 * args.distributed_timeout_minutes,
    )


def build(prepared: Prepared, store: JobStore, wire: Wire, gate: Gate | None = None) -> Worlds:
    """Make the bridge and the target's world where there is none; collective over all processes.

    In any thread, which waits at ``gate`` before each few groups. Raises :class:`WorldError` or
    :class:`SwitchRefused` on all of them where one fails; nothing is left then.
    """
    change, bridge, port = prepared.change, prepared.bridge, store.address.port
    gate = Gate(is_open=True) if gate is None else gate
    gate()
    is_new, world = bridge is None, None
    appearing = Appearing(but_at=port)

    def wait() -> None:
        if not gate.is_open:
            appearing.pause()
            gate()
            appearing.go_on()

    def done() -> None:  # before the others are waited for, which training must not be
        if not gate.is_open:
            appearing.pause()
        gate.done()

    if bridge is None:
        bridge = make_bridge(change, store, wire, prepared.backend)
    of_bridge = appearing.take()
    appearing.go_on()
    try:
        if prepared.wanted is not None:
            world = worlds.build(
                change.world(prepared.backend, prepared.timeout_s),
                store.address,
                partial(_make_each, prepared.wanted, wait, done),
                known=all_held(donor.held for donor in prepared.donors),
                timeout_s=wire.connect_s,
                agree_s=wire.agree_s,
            )
        done()
        if prepared.needs_building:
            made = (of_bridge, appearing.take())
            found = _known_to_others(made, change, store, wire.agree_s)
            if is_new:
                bridge.world.connections = found[0]
            if world is not None:
                world.connections = found[1].and_those_of(d.connections for d in prepared.donors)
    except BaseException:
        if world is not None:
            world.abandon()
        if is_new:
            bridge.end()
        raise
    return Worlds(bridge, is_new, world)


def _make_each(
    wanted: WantedGroups, wait: Callable[[], None], done: Callable[[], None], maker: GroupMaker
) -> Groups:
    """Make all groups; ``wait`` before each few, the same on all ranks, and say when ``done``."""
    since: Counter[int] = Counter()

    def create(**call: Any) -> Group:
        ranks = call["ranks"]
        if not since or any(since[rank] == _GROUPS_AT_ONCE for rank in ranks):
            wait()
            since.clear()
        since.update(ranks)
        return maker(**call)

    made = wanted.make(create)
    done()
    return made


def start_building(
    prepared: Prepared, store: JobStore, wire: Wire, gate: Gate | None = None
) -> Building[Worlds]:
    """The same in a thread of its own; by the main thread."""
    make = current_platform().in_thread(lambda: build(prepared, store, wire, gate))
    return building.start(f"switch {prepared.change.number}", make)


def _known_to_others(
    made: Sequence[dict[int, Ends]], change: Change, store: JobStore, timeout_s: float
) -> list[Connections]:
    """Which connections lead to processes of the change, so that hung ones can be given up.

    They tell each other in the store: nothing is sent over any group beside training.
    """
    own = json.dumps([here for each in made for here, _ in each.values()])
    client, keys = store.here(), [ends_key(change, uid) for uid in change.processes]
    with store_errors(f"not all processes of switch {change.number} told their connections"):
        client.set(ends_key(change, process_uid()), own)
        client.wait(keys, timedelta(seconds=timeout_s))
        ends = [end for key in keys for end in json.loads(client.get(key))]
    return [Connections.among(each, ends) for each in made]


def make_bridge(change: Change, store: JobStore, wire: Wire, backend: str) -> Bridge:
    """The bridge of a change; collective over its processes, in any thread.

    Raises :class:`SwitchRefused` on all of them where the transport asked for cannot be had.
    """
    with current_platform().only_told_of_errors():
        world = worlds.build(
            change.bridge(backend, wire.timeout_s),
            store.address,
            lambda maker: None,
            timeout_s=wire.connect_s,
            agree_s=wire.agree_s,
        )
    group = world.record.default_pg
    try:
        with records.entered(world.record):
            transport = connect(
                group,
                current_platform().device,
                wire.transport,
                timeout_s=wire.timeout_s,
                ring_bytes=wire.staging_bytes // _RINGS_SHARE,
            )
            links = current_platform().links()
            own = json.dumps([socket.gethostname(), links.near_gb_s, links.rails_gb_s]).encode()
            rows = transport.all_gather(own, timeout_s=wire.timeout_s)
    except BaseException:
        with suppress(RuntimeError):
            world.give_up()
        world.end()
        raise
    hosts, near, rails = zip(*map(json.loads, rows), strict=True)
    topology = Topology.from_hosts(hosts).with_devices(near, rails)
    return Bridge(change.processes, world, transport, topology, hosts)


@contextmanager
def _live_arguments(job: Job, args: Namespace) -> Iterator[None]:
    """Megatron's live arguments are ``args`` inside."""
    kept = dict(vars(job.args))
    arguments.replace_in_place(job.args, args)
    try:
        yield
    finally:
        arguments.replace_in_place(job.args, Namespace(**kept))
