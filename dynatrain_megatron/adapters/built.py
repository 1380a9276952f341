"""Layouts as they were built on this rank: the one in force, and dormant ones kept for next time.

::

    in force   groups, objects, memory; Megatron's frames hold objects that share its attributes
    dormant    the same groups and objects, put back as they were once built, without memory
    ended      groups ended, objects taken apart

What depends on the run's position is not kept: :func:`.skeleton.take_position` sets it anew.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from dynatrain_megatron.adapters import groups
from dynatrain_megatron.adapters.skeleton import Skeleton
from dynatrain_megatron.adapters.state import HostState
from dynatrain_megatron.elastic.live import LiveWorld
from dynatrain_megatron.elastic.records import Held
from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.memory import Dropped, distinct_storages, release
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Recent


@dataclass(frozen=True, slots=True)
class BuiltKey:
    """What shaped groups and objects: who takes part, in order, how they talk, and the layout.

    ``processes`` are uids, by rank;
    ``options`` are those Megatron makes groups by, each with its value as text.
    """

    layout: ParallelLayout
    processes: tuple[str, ...]
    backend: str
    options: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls, layout: ParallelLayout, args: Namespace, processes: tuple[str, ...], backend: str
    ) -> BuiltKey:
        """From validated ``args`` and the uids by rank; local, the same on every rank."""
        return cls(
            layout,
            processes,
            backend,
            tuple((name, repr(value)) for name, value in sorted(groups.options(args).items())),
        )


class Built:
    """One layout on this rank: its world, Megatron's objects, and our description of its state."""

    def __init__(
        self, key: BuiltKey, world: LiveWorld[groups.Groups], skeleton: Skeleton, args: Namespace
    ) -> None:
        self.key = key
        self.world = world
        self.skeleton = skeleton
        self._args = args
        self._as_built: _AsBuilt | None = None
        self._dropped: Dropped | None = None
        self._forget_description()

    def note_as_built(self) -> None:
        """Remember the objects as they are, before anything has run in them."""
        self._as_built = _AsBuilt(self.skeleton.model)

    def _forget_description(self) -> None:
        self.state = HostState(self.skeleton.model, self.skeleton.optimizer, self._args)
        self._fragments: Fragments | None = None
        self._rests_on: tuple[object, ...] = ()
        self.digest = ""

    def fragments(self) -> Fragments:
        """The fragments of this layout, described anew only where their memory is another.

        Local; its own groups must be installed. They are ``described`` afterwards, and ``digest``
        is that of their roster. Raises as :meth:`HostState.fragments` does.
        """
        self.state.allocate_moments()
        rests_on = self.state.memory()
        if self._fragments is None or rests_on != self._rests_on:
            self._forget_description()
            self._fragments = self.state.fragments()
            self._rests_on = rests_on
            self.digest = hashlib.sha256(self._fragments.roster.to_bytes()).hexdigest()
        return self._fragments

    @property
    def described(self) -> Fragments:
        """What :meth:`fragments` found last."""
        assert self._fragments is not None
        return self._fragments

    def sleep(self, sizes: Mapping[int, int]) -> None:
        """Give the memory back, and put what Megatron's objects remember as it was once built.

        ``sizes`` are those of the storages, some of which may have gone before.
        """
        assert self._as_built is not None
        self._as_built.restore()
        self.state.clear_gradients()
        self._dropped = Dropped(self.state.tensors(), sizes)
        self.world.groups.forget_scratch()

    def wake(self) -> Dropped:
        """What is still without memory: all that a switch fills or makes anew, in its time."""
        dropped, self._dropped = self._dropped, None
        assert dropped is not None and self._as_built is not None
        later = {storage._cdata for storage in distinct_storages(self.written_later())}
        for storage in dropped.storages:
            if storage._cdata not in later:
                dropped.restore_one(storage, zeros=True)
        self._as_built.fill_buffers()
        return dropped

    def written_later(self) -> Iterator[torch.Tensor]:
        """What a switch to this layout fills, and what it makes anew afterwards."""
        for views in self.described.views:
            yield from views
        yield from self.state.gradients()
        yield from self.state.rebuilt()

    def end(self, keep: Collection[Held] = ()) -> int:
        """End its groups but those that other worlds keep; returns how many. Objects are dead then.

        The same on every rank. Empty objects are left to Python's collector, which would take
        longer than the rest of a commit if it were run here.
        """
        release(self.state.tensors())
        _take_apart(self.skeleton.model)
        return self.world.end(keep=[held.group for held in keep])


class _AsBuilt:
    """What the modules of a model and their helpers hold, to be put back in place later.

    Hooks, counters and handles of gradient buckets, functions bound in the config, tensors of the
    last step in token dispatchers, training mode: all come back without being named. Contents of
    tensors do not, but for buffers that no checkpoint keeps.
    """

    def __init__(self, model: list[Any]) -> None:
        attributes = [vars(each) for each in _objects(model)]
        inner = [value for each in attributes for value in each.values()]
        containers = [each for each in inner if isinstance(each, (dict, list, set))]
        self._saved = [(each, each.copy()) for each in (*attributes, *containers)]
        self._buffers = [(buffer, buffer.clone()) for buffer in _unsaved_buffers(model)]

    def restore(self) -> None:
        """Put attributes and containers back."""
        for container, saved in self._saved:
            container.clear()
            if isinstance(container, list):
                container.extend(saved)
            else:
                container.update(saved)

    def fill_buffers(self) -> None:
        """Write the buffers that no checkpoint keeps; they have memory again."""
        for buffer, contents in self._buffers:
            buffer.copy_(contents)


def _objects(model: list[Any]) -> list[Any]:
    """The modules, and what else of Megatron's they hold: configs, buckets, token dispatchers."""
    found: dict[int, Any] = {}
    waiting = list(model)
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        for value in vars(each).values():
            items = value.values() if isinstance(value, dict) else value
            several = isinstance(value, (dict, list, tuple))
            waiting.extend(filter(_is_object, items if several else [value]))
    return list(found.values())


def _is_object(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return True
    if not type(value).__module__.startswith("megatron.core."):
        return False
    return hasattr(value, "__dict__") and not isinstance(value, Enum)


def _unsaved_buffers(model: list[Any]) -> Iterator[torch.Tensor]:
    for chunk in model:
        for module in chunk.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in module._non_persistent_buffers_set:
                    yield buffer


def _take_apart(model: list[Any]) -> None:
    """Let go of all that the old modules hold, process groups with threads and sockets above all.

    The collector cannot free them by itself: modules such as token dispatchers keep tensors of
    their last step, whose graph reaches, out of its sight, the gradient hooks that hold the model.
    """
    for chunk in model:
        for module in list(chunk.modules()):
            vars(module).clear()


class BuiltCache:
    """The dormant layouts used last, at most ``max_layouts``; the same on every rank.

    See :mod:`dynatrain_megatron.elastic.groups` for why that is so.
    """

    def __init__(self, max_layouts: int) -> None:
        self._max_layouts = max_layouts
        self._dormant = Recent[BuiltKey, Built](max_layouts)

    def __len__(self) -> int:
        return len(self._dormant)

    def __iter__(self) -> Iterator[Built]:
        return iter(self._dormant)

    def get(self, key: BuiltKey) -> Built | None:
        """The dormant layout of this key."""
        return self._dormant.get(key)

    def take(self, key: BuiltKey) -> Built | None:
        """The dormant layout of this key, which is in the cache no longer."""
        return self._dormant.pop(key)

    def put(self, built: Built) -> list[Built]:
        """Keep a layout that sleeps; returns those that have to end for it."""
        return self._dormant.put(built.key, built)

    def drop(self, present: Collection[str]) -> list[Built]:
        """Give up the layouts that have a process that is not ``present``; returns them."""
        here = set(present)
        lost = [built for built in self._dormant if not here.issuperset(built.key.processes)]
        for built in lost:
            self._dormant.pop(built.key)
        return lost

    def giving_way(self, target: Collection[str], left: BuiltKey | None) -> list[Built]:
        """Those that end when layout ``left`` falls asleep for one of ``target``'s processes.

        Only their groups may be taken over: so a group is never in two worlds that live on, and
        what is ended or cut of one is no loss to another.
        """
        here = set(target)
        lost = [built for built in self._dormant if not here.issuperset(built.key.processes)]
        staying = [built for built in self._dormant if built not in lost]
        comes = left is not None and here.issuperset(left.processes)
        surplus = max(0, len(staying) + comes - self._max_layouts)
        return lost + staying[:surplus]
