"""The running job: the host objects a switch reads and replaces."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dynatrain_megatron.adapters.arguments import LaunchArguments
from dynatrain_megatron.adapters.groups import RanksFunction
from dynatrain_megatron.adapters.samplers import LaunchData
from dynatrain_megatron.elastic.live import LiveWorld
from dynatrain_megatron.elastic.store import JobStore
from dynatrain_megatron.engine import BoundPlan, Fragments, Transport
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Plan, PlanCache, Recent, Topology
from dynatrain_megatron.vps import RosterSet

if TYPE_CHECKING:
    from dynatrain_megatron.adapters.built import Built, BuiltCache


_MAX_TRANSITIONS = 32
"""Rosters and plans kept: those of every way between six layouts."""


@dataclass(frozen=True)
class Recipe:
    """How this job builds what depends on the layout, as recorded from its own start.

    ``setup`` is Megatron's ``setup_model_and_optimizer`` with the first call's arguments,
    ``build_iterators`` its ``build_train_valid_test_data_iterators``; ``dataset_provider`` is the
    script's. ``data`` is how the launch dealt out samples.
    """

    setup: Callable[..., tuple[list[Any], Any, Any]]
    setup_args: tuple[Any, ...]
    setup_kwargs: dict[str, Any]
    build_iterators: Callable[[Any], tuple[Any, Any, Any]]
    dataset_provider: Any
    embedding_ranks: RanksFunction
    position_embedding_ranks: RanksFunction
    data: LaunchData


@dataclass
class Iterators:
    """Data iterators of the layout in force; each may be None, or a list with virtual pipeline."""

    train: Any
    valid: Any
    test: Any


@dataclass(frozen=True, slots=True)
class RostersKey:
    """The rosters of two layouts, by the digests of every rank's own."""

    source: tuple[str, ...]
    target: tuple[str, ...]


class BoundPlans:
    """Plans bound to memory before, for as long as both layouts' fragments are the same."""

    def __init__(self) -> None:
        self._of_source = WeakKeyDictionary[
            Fragments, WeakKeyDictionary[Fragments, tuple[Plan, BoundPlan]]
        ]()

    def get(self, plan: Plan, source: Fragments, target: Fragments) -> BoundPlan | None:
        """``plan`` bound to these fragments; None where it is not known here."""
        made, bound = self._of_source.get(source, {target: (None, None)}).get(target, (None, None))
        return bound if made is plan else None

    def put(self, plan: Plan, source: Fragments, target: Fragments, bound: BoundPlan) -> None:
        """Keep ``bound`` in place of the one before between these fragments."""
        self._of_source.setdefault(source, WeakKeyDictionary())[target] = plan, bound


@dataclass
class Bridge:
    """What carries transfers, and nothing else, between ``processes``: uids, by bridge rank.

    ``topology`` are nodes and links as found, ``hosts`` those of the processes.
    """

    processes: tuple[str, ...]
    world: LiveWorld[None]
    transport: Transport
    topology: Topology
    hosts: tuple[str, ...]

    def end(self) -> None:
        """Close it and end its world; who waits for something of this process learns of it."""
        self.transport.close()
        self.world.end()


@dataclass
class Job:
    """A training job at a step boundary.

    ``args``, ``model``, ``optimizer``, ``scheduler``, ``config`` and ``container`` are the objects
    Megatron's frames hold: they stay the same objects for the whole run, their contents change.
    ``baseline`` is a shallow copy of ``args`` as validated for ``layout``. ``bridge`` carries
    transfers; it is made at the first switch, and stays while the processes do. ``built`` is the
    layout in force, None on a process that has no part in the job (one that waits to join, or has
    left); ``dormant`` are layouts left before; ``rosters``, ``plans`` and ``bound_plans`` are those
    of switches made before. The job's processes meet in ``store``; ``num_changes`` counts their
    switches, also those called off; ``next_step`` is the number of the schedule's step that comes
    next. Whoever knows its ``secret`` may ask for one. ``totals`` are
    Megatron's sums over the log interval. No step has run since ``stopped_s``, on this process's
    ``time.perf_counter``. ``at_stake`` are the worlds that a switch under way uses
    or keeps aside, none of which the job needs where the switch is called off.
    """

    launch: LaunchArguments
    recipe: Recipe
    args: Namespace
    baseline: Namespace
    layout: ParallelLayout
    model: list[Any]
    optimizer: Any
    scheduler: Any
    config: Any
    container: Any
    iterators: Iterators
    iteration: int
    num_flops: float
    dormant: BuiltCache
    checkpointing_context: dict[str, Any] = field(default_factory=dict)
    built: Built | None = None
    totals: dict[str, Any] = field(default_factory=dict)
    store: JobStore | None = None
    secret: str = ""
    at_stake: tuple[LiveWorld[Any], ...] = ()
    num_changes: int = 0
    stopped_s: float = 0.0
    next_step: int = 0
    bridge: Bridge | None = None
    rosters: Recent[RostersKey, tuple[RosterSet, RosterSet]] = field(
        default_factory=lambda: Recent(_MAX_TRANSITIONS)
    )
    plans: PlanCache = field(default_factory=lambda: PlanCache(_MAX_TRANSITIONS))
    bound_plans: BoundPlans = field(default_factory=BoundPlans)

    @property
    def processes(self) -> tuple[str, ...]:
        """The uids of the job's processes, by rank; none where this one has no part in it."""
        return () if self.built is None else self.built.key.processes
