"""Random transitions of made-up jobs, each compared bit for bit with a truth made by itself.

A job has a model's state as random bits, laid out over some of sixteen processes, which are threads
here. It walks from layout to layout; on the way processes join and leave, sources stay or go stage
by stage, one transition in ten fails on purpose. Messages travel by
:class:`tests.engine.late.LateTransport`; what is freed, allocated anew, or staging memory used
again is overwritten::

    truth     every state of every logical tensor, unsharded: the same bits for all layouts
    before    the truth cut to fragments; new bits at each transition, so that nothing stale fits
    after     every element of every target fragment is the truth's; or, where it failed, every
              stage is whole in the source or in the target, and what is gone is taken back
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from dynatrain_megatron import faults
from dynatrain_megatron.config import EngineSchedule, Verify
from dynatrain_megatron.engine import Fragments, FragmentsBuilder, holdings, memory
from dynatrain_megatron.engine.execute import _Buffer
from dynatrain_megatron.engine.memory import Ledger
from dynatrain_megatron.faults import Fault, Kind, Phase
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions, Speeds, Topology
from dynatrain_megatron.planner.staged import StagedPlan, make_staged_plan
from dynatrain_megatron.planner.stages import Room, Stages, choose_stages, one_stage
from dynatrain_megatron.shapes import Model, make_rosters
from dynatrain_megatron.transition import move as moving
from dynatrain_megatron.transition.move import Move
from dynatrain_megatron.transition.undo import move_back
from dynatrain_megatron.vps import LogicalTensor, Region, Roster, RosterSet
from tests.engine.late import LateTransport, poison, poison_storage
from tests.engine.test_transport import on_ends
from tests.planner.worlds import region_of, roster_of
from tests.shapes.test_rosters import TINY_GPT, TINY_LATENT, TINY_MOE
from tests.transition.sides import Side

PROCESSES = 16
TIMEOUT_S = 60.0
FAULT_SHARE = 0.1


class Family(NamedTuple):
    """A model, and layouts of it."""

    model: Model
    layouts: tuple[str, ...]


FAMILIES = {
    "dense GPT": Family(
        TINY_GPT,
        (
            *("dp1", "dp3", "dp8", "tp4", "tp2-pp2-dp2", "tp2-pp2-dp3", "pp4-dp2", "pp8"),
            *("pp4-vpp2-dp2", "tp2-pp2-vpp2-dp2", "tp4-cp2-dp2", "tp2-cp4-dp2", "tp2-dp2-noopt"),
            *("dp4-instances2", "tp2-pp2-dp4-order:tp.cp.ep.pp.dp", "tp4-pp4"),
        ),
    ),
    "mixture of experts": Family(
        TINY_MOE,
        (
            *("dp4", "dp8-ep8", "tp4-dp2-ep2-etp1-sp", "tp2-pp2-dp2", "tp2-dp4-ep2-sp"),
            *("dp8-ep2-instances2", "pp2-dp4-ep4", "pp4-vpp2-dp2-ep2", "tp4-sp", "pp3-dp2-ep2"),
            *("dp2-ep2-noopt", "cp2-dp4-ep8", "tp2-dp8-ep4-etp4-sp"),
        ),
    ),
    "latent attention": Family(
        TINY_LATENT,
        (
            *("dp2-ep2", "tp2-pp2-dp2-ep2-etp1-sp", "pp2-dp4-ep4", "dp4-ep2-noopt", "tp4-sp"),
            *("pp4-dp2", "dp16-ep8", "tp2-pp2-dp4-ep4-sp", "tp2-cp2-dp2-ep2-sp", "pp5", "dp12-ep4"),
            "pp2-vpp2-dp2-ep2",
        ),
    ),
}


# ---------------------------------------------------------------------- what is to happen


@dataclass(frozen=True)
class Transition:
    """One transition of a job, and how it is done; plain values, the same for the same seed.

    ``processes`` are those of the target, by rank.
    """

    number: int
    family: str
    source: str
    target: str
    processes: tuple[int, ...]
    schedule: EngineSchedule
    verify: Verify
    frees: bool
    staging_bytes: int
    window_ops: int
    relay: bool
    own_plans: bool
    nodes: int
    hosts: int
    part_bytes: int
    shared: bool
    gap: int
    fault: tuple[Phase, Kind, int] | None
    seed: int


@dataclass
class Outcome:
    """What became of a transition. ``wrong`` says what must not be; empty where all is well.

    ``result`` is done, aborted (the source is whole), or taken back: parts of the source were gone,
    each stage was whole in one of both, and then the source was whole again.
    """

    transition: Transition
    result: str = "done"
    fired: bool = False
    wrong: list[str] = field(default_factory=list)
    world: int = 0
    stages: int = 0
    messages: int = 0
    moved_bytes: int = 0
    checked_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def drawn(
    seed: int,
    number: int,
    family: str,
    source: str,
    world: Sequence[int],
    fault_share: float = FAULT_SHARE,
) -> Transition:
    """The ``number``-th transition of a job that is in ``source`` on these processes."""
    chance = random.Random(f"{seed} {number}")
    target = chance.choice([each for each in FAMILIES[family].layouts if each != source])
    size = ParallelLayout.parse(target).world
    others = [process for process in range(PROCESSES) if process not in world]
    chance.shuffle(others)
    processes = [*world, *others][:size]
    if chance.random() < 0.3:
        chance.shuffle(processes)
    elif chance.random() < 0.3:
        processes = chance.sample(range(PROCESSES), size)
    verify = chance.choices([Verify.messages, Verify.fingerprint, Verify.off], [5, 4, 1])[0]
    fault = None
    if chance.random() < fault_share:
        kinds = [Kind.exception, Kind.oom] + [Kind.bitflip] * (verify is not Verify.off)
        kind = chance.choice(kinds)
        phases = [Phase.memory, Phase.pack, Phase.wire, Phase.unpack]
        phase = Phase.wire if kind is Kind.bitflip else chance.choice(phases)
        fault = phase, kind, chance.choice([1, 1, 2])
    return Transition(
        number,
        family,
        source,
        target,
        tuple(processes),
        chance.choice(list(EngineSchedule)),
        verify,
        frees=chance.random() < 0.4,
        staging_bytes=chance.choice([100_000, 400_000, 1 << 20, 256 << 20]),
        window_ops=chance.choice([4, 32, 256]),
        relay=chance.random() < 0.7,
        own_plans=chance.random() < 0.2,
        nodes=chance.choice([1, 2, 4]),
        hosts=chance.choice([1, 3, PROCESSES]),
        part_bytes=chance.choice([256, 4096, 1 << 19]),
        shared=chance.random() < 0.5,
        gap=chance.choice([0, 3]),
        fault=fault,
        seed=chance.randrange(1 << 32),
    )


# ---------------------------------------------------------------------- the truth


_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class Truth:
    """The bits of every state of every logical tensor, unsharded."""

    def __init__(self, tensors: Sequence[LogicalTensor], seed: int) -> None:
        chance = np.random.default_rng(seed)
        self._bits = {
            (tensor.name, k): torch.from_numpy(
                np.frombuffer(
                    bytearray(chance.bytes(tensor.numel * state.item_bytes)),
                    dtype=_BITS[state.item_bytes],
                ).reshape(tensor.shape)
            )
            for tensor in tensors
            for k, state in enumerate(tensor.states)
        }

    def write(self, fragments: Fragments) -> None:
        """Put the true bits into all fragments of one process."""
        for _, view, bits in self._pairs(fragments):
            view.copy_(bits)

    def differences(self, fragments: Fragments) -> list[str]:
        """Names and regions of what is not as it must be in the fragments of one process."""
        return [
            name
            for name, view, bits in self._pairs(fragments)
            if not view.untyped_storage().nbytes() or not torch.equal(view, bits)
        ]

    def _pairs(self, fragments: Fragments) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        roster = fragments.roster
        for slot, views in enumerate(fragments.views):
            tensor, region = roster.tensors[int(roster.tensor[slot])], region_of(roster, slot)
            for k, view in enumerate(views):
                bits = self._bits[tensor.name, k][_cut(region)]
                yield f"{tensor.name} {tensor.states[k].kind} {region}", view.view(bits.dtype), bits


# ---------------------------------------------------------------------- a job's memory


@functools.cache
def rosters_of(family: str, layout: str) -> tuple[Roster, ...]:
    """Those of all ranks, which together hold every element."""
    found = make_rosters(FAMILIES[family].model, ParallelLayout.parse(layout))
    rosters = tuple(roster_of(found, rank) for rank in range(found.num_ranks))
    held = [np.zeros(tensor.shape, dtype=np.bool_) for tensor in found.tensors]
    for roster in rosters:
        for slot, number in enumerate(roster.tensor.tolist()):
            held[number][_cut(region_of(roster, slot))] = True
    assert all(each.all() for each in held), (family, layout)
    return rosters


def _cut(region: Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))


def nothing(tensors: tuple[LogicalTensor, ...]) -> Roster:
    """That of a process outside of a world."""
    dims = max(len(tensor.shape) for tensor in tensors)
    empty = np.zeros((0, dims), dtype=np.int64)
    return Roster(tensors, np.zeros(0, dtype=np.int64), empty, empty)


def allocated(roster: Roster, *, shared: bool, gap: int) -> Fragments:
    """Memory for a roster: each state by itself with ``gap`` elements between its rows.

    With ``shared`` the first states lie one after the other in one buffer instead, with padding, as
    float32 parameters do in Megatron's.
    """
    regions = [region_of(roster, slot) for slot in range(len(roster))]
    tensors = [roster.tensors[number] for number in roster.tensor.tolist()]
    places: list[torch.Tensor] = []
    if shared:
        sizes = [
            -(-region.numel * tensor.states[0].item_bytes // 64) * 64
            for region, tensor in zip(regions, tensors, strict=True)
        ]
        places = list(torch.empty(sum(sizes) + 64, dtype=torch.uint8)[:-64].split(sizes))
    builder = FragmentsBuilder()
    for slot, (tensor, region) in enumerate(zip(tensors, regions, strict=True)):
        views = []
        for k, state in enumerate(tensor.states):
            dtype = getattr(torch, state.dtype)
            if shared and k == 0:
                flat = places[slot][: region.numel * state.item_bytes].view(dtype)
                views.append(flat.view(region.shape))
            else:
                views.append(_with_gaps(region, dtype, gap))
        builder.add(tensor, region, views)
    return builder.build()


def _with_gaps(region: Region, dtype: torch.dtype, gap: int) -> torch.Tensor:
    *rows, row = region.shape
    return torch.empty((*rows, row + gap), dtype=dtype)[..., gap:]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is freed, allocated without a value, or staging memory used anew, has no value.

    What was freed has none at all afterwards: whoever looks at it by a view of its own finds that
    the view has no memory.
    """
    allocate, clear, free = memory.allocate, _Buffer.clear, memory.free

    def allocated(storage: torch.UntypedStorage, nbytes: int, *, zeros: bool) -> None:
        is_new = not storage.nbytes()
        allocate(storage, nbytes, zeros=zeros)
        if is_new and not zeros:
            poison_storage(storage)

    def cleared(self: Any) -> None:
        if self._memory is not None:
            poison(self._memory)
        clear(self)

    def freed(storages: Any) -> None:
        all_of_them = list(storages)
        for storage in all_of_them:
            poison_storage(storage)
        free(all_of_them)

    with (
        mock.patch.object(holdings, "allocate", allocated),
        mock.patch.object(_Buffer, "clear", cleared),
        mock.patch.object(moving, "free", freed),
    ):
        yield


# ---------------------------------------------------------------------- one transition


class _Ends(NamedTuple):
    """A transition on the processes of both worlds, which count anew from 0."""

    old: list[Side]
    new: list[Side]
    rosters: tuple[RosterSet, RosterSet]
    stages: Stages
    topology: Topology
    options: PlanOptions
    plans: list[StagedPlan]

    @property
    def moved_bytes(self) -> int:
        return sum(plan.moved_bytes for plan in self.plans[0].plans)


class Made:
    """A made-up job of one family: where it is, and the memory of its state by process."""

    def __init__(self, family: str, seed: int) -> None:
        self.family = family
        self.tensors = rosters_of(family, FAMILIES[family].layouts[0])[0].tensors
        chance = random.Random(f"{seed} {family}")
        self._enter(chance.choice(FAMILIES[family].layouts), None, shared=False, gap=0)

    def _enter(
        self, layout: str, processes: Sequence[int] | None, *, shared: bool, gap: int
    ) -> None:
        """Begin anew there."""
        self.layout = layout
        found = rosters_of(self.family, layout)
        self.world = list(range(len(found)) if processes is None else processes)
        self.held = {
            process: allocated(roster, shared=shared, gap=gap)
            for process, roster in zip(self.world, found, strict=True)
        }

    def run(self, wanted: Transition) -> Outcome:
        """Carry it out and look at every bit."""
        truth = Truth(self.tensors, wanted.seed)
        for fragments in self.held.values():
            truth.write(fragments)
        bridge = sorted({*self.world, *wanted.processes})
        ends = self._ends(wanted, bridge)
        outcome = Outcome(wanted, world=len(bridge), stages=ends.stages.count)
        outcome.moved_bytes = ends.moved_bytes
        fault = _armed(wanted, ends)
        moves = self._moves(wanted, ends)
        with poisoned():
            errors = self._carried_out(wanted, ends, moves)
        outcome.messages = sum(each.num_operations for move in moves for each in move.reports)
        outcome.fired = fault is not None and _has_fired(fault)
        outcome.wrong += _unexpected(errors, fault if outcome.fired else None)
        if any(errors):
            outcome.result = self._look_at_both(truth, ends, outcome)
            if outcome.result == "split":
                self._take_back(wanted, truth, ends, moves, outcome)
        else:
            self._look_at_target(truth, ends, moves, outcome)
            self.layout, self.world = wanted.target, list(wanted.processes)
            self.held = {
                process: side.holdings.fragments
                for process, side in zip(bridge, ends.new, strict=True)
                if process in wanted.processes
            }
        return outcome

    def _ends(self, wanted: Transition, bridge: Sequence[int]) -> _Ends:
        absent = nothing(self.tensors)
        target = dict(zip(wanted.processes, rosters_of(self.family, wanted.target), strict=True))
        old, new = [], []
        for process in bridge:
            held = self.held.get(process)
            old.append(Side.of(held or allocated(absent, shared=False, gap=0), there=True))
            memory_of = allocated(target.get(process, absent), shared=wanted.shared, gap=wanted.gap)
            new.append(Side.of(memory_of, there=False))
        rosters = tuple(
            RosterSet.merge([each.holdings.fragments.roster for each in side], self.tensors)
            for side in (old, new)
        )
        both = rosters[0], rosters[1]
        size = len(bridge)
        stages = choose_stages(*both, Room.none(size)) if wanted.frees else one_stage(*both)
        # With operations that cost nothing the little state here is worth being relayed.
        chance = random.Random(wanted.seed)
        nodes = sorted(chance.randrange(wanted.nodes) for _ in range(size))
        topology = Topology(tuple(nodes), None, Speeds(operation_s=0))
        options = PlanOptions(
            wanted.staging_bytes, wanted.window_ops, wanted.schedule, relay=wanted.relay
        )
        make = functools.partial(make_staged_plan, *both, stages, topology, options)
        if not wanted.own_plans:
            plans = [make()] * size
        else:
            plans = [make(rank=rank) for rank in range(size)]
        return _Ends(old, new, both, stages, topology, options, plans)

    def _moves(self, wanted: Transition, ends: _Ends) -> list[Move]:
        return [
            Move(
                plan,
                old.holdings,
                new.holdings,
                Ledger([*old.tensors, *new.tensors]),
                wanted.frees,
                lambda: None,
            )
            for plan, old, new in zip(ends.plans, ends.old, ends.new, strict=True)
        ]

    def _take_back(
        self,
        wanted: Transition,
        truth: Truth,
        ends: _Ends,
        moves: Sequence[Move],
        outcome: Outcome,
    ) -> None:
        """Bring back what was freed: the job must be as it was then."""
        finished = max(move.finished for move in moves)

        def body(end: Any) -> BaseException | None:
            try:
                move_back(
                    moves[end.rank],
                    ends.rosters,
                    finished,
                    end,
                    ends.topology,
                    ends.options,
                    verify=wanted.verify,
                    timeout_s=TIMEOUT_S,
                )
            except Exception as error:
                end.close()
                return error
            return None

        faults.arm(())
        with poisoned():
            errors = on_ends(self._mesh(wanted, len(moves)), body)
        outcome.wrong += [f"on the way back: {error}" for error in errors if error is not None]
        for rank, old in enumerate(ends.old):
            found = truth.differences(old.holdings.fragments)
            outcome.wrong += [f"rank {rank}: taken back {name}" for name in found]
        outcome.result = "taken back"

    def _mesh(self, wanted: Transition, size: int) -> list[LateTransport]:
        chance = random.Random(wanted.seed)
        return LateTransport.mesh(
            size,
            [chance.randrange(wanted.hosts) for _ in range(size)],
            part_bytes=wanted.part_bytes,
            seed=wanted.seed,
        )

    def _carried_out(
        self, wanted: Transition, ends: _Ends, moves: Sequence[Move]
    ) -> list[BaseException | None]:
        """What each rank raised."""

        def body(end: Any) -> BaseException | None:
            move = moves[end.rank]
            moving.free([ends.old[end.rank].gradients])
            try:
                move.run(ends.rosters, end, verify=wanted.verify, timeout_s=TIMEOUT_S)
            except Exception as error:
                end.close()
                return error
            move.rebuild_begins()
            return None

        return on_ends(self._mesh(wanted, len(moves)), body)

    def _look_at_target(
        self, truth: Truth, ends: _Ends, moves: Sequence[Move], outcome: Outcome
    ) -> None:
        frees = outcome.transition.frees
        for rank, (old, new) in enumerate(zip(ends.old, ends.new, strict=True)):
            target = new.holdings.fragments
            outcome.checked_bytes += sum(view.nbytes for views in target.views for view in views)
            outcome.wrong += [f"rank {rank}: {name}" for name in truth.differences(target)]
            if frees and any(storage.nbytes() for storage in old.holdings.storages):
                outcome.wrong.append(f"rank {rank}: old state was not freed")
            if not frees:
                source = old.holdings.fragments
                changed = [f"rank {rank}: source {name}" for name in truth.differences(source)]
                outcome.wrong += changed
            plan = moves[rank].planned(ends.rosters, rank)
            if moves[rank].ledger.peak_extra_bytes > plan.extra:
                outcome.wrong.append(f"rank {rank}: more memory than planned")
        sent = sum(report.sent_bytes for move in moves for report in move.reports)
        if sent != ends.moved_bytes:
            outcome.wrong.append(f"{sent} bytes were sent, {ends.moved_bytes} planned")

    def _look_at_both(self, truth: Truth, ends: _Ends, outcome: Outcome) -> str:
        """Every stage is whole in the source, or where some of that is gone, in the target."""
        stages, rosters = ends.stages, ends.rosters
        gone: set[int] = set()
        for rank, old in enumerate(ends.old):
            own = stages.source[rosters[0].rows_of(rank)].tolist()
            gone |= {
                stage
                for stage, views in zip(own, old.holdings.fragments.views, strict=True)
                if not all(view.untyped_storage().nbytes() for view in views)
            }
        for rank, (old, new) in enumerate(zip(ends.old, ends.new, strict=True)):
            for name, side, rows, chosen in (
                ("source", old, stages.source[rosters[0].rows_of(rank)], False),
                ("target", new, stages.target[rosters[1].rows_of(rank)], True),
            ):
                slots = np.nonzero(np.isin(rows, sorted(gone)) == chosen)[0]
                part = side.holdings.fragments.part(slots)
                outcome.checked_bytes += sum(v.nbytes for views in part.views for v in views)
                outcome.wrong += [f"rank {rank}: {name} {n}" for n in truth.differences(part)]
        return "split" if gone else "aborted"


def _armed(wanted: Transition, ends: _Ends) -> Fault | None:
    """Arm the fault on a rank where it can happen: a bit is flipped of what is received."""
    faults.arm(())
    if wanted.fault is None:
        return None
    phase, kind, at = wanted.fault
    received = ends.plans[0].bytes_matrix.copy()
    np.fill_diagonal(received, 0)
    able = np.nonzero(received.sum(0))[0] if kind is Kind.bitflip else range(len(received))
    if not len(able):
        return None
    fault = Fault((random.Random(wanted.seed).choice(list(map(int, able))),), phase, kind, at)
    faults.arm([fault])
    return fault


def _has_fired(fault: Fault) -> bool:
    (rank,) = fault.ranks
    return faults._armed.passed[0, rank] >= fault.at and not faults._armed.flips[rank]


def _unexpected(errors: Sequence[BaseException | None], fault: Fault | None) -> list[str]:
    """What ranks raised and should not have, or should have and did not."""
    told = [f"{type(error).__name__}: {error}" for error in errors if error is not None]
    if fault is None:
        return told
    if not told:
        return [f"{fault} was not noticed"]
    if fault.kind is Kind.bitflip:
        # Everyone learns of it by the same check, before anything is freed or used.
        unknown = [text for text in told if "TransitionError" not in text]
        return [f"only {len(told)} ranks know"] * (len(told) < len(errors)) + unknown
    own = f"rank {fault.ranks[0]}: injected {fault}"
    known = [text for text in told if own in text or text.startswith("TransitionError: ")]
    return [text for text in told if text not in known] + ["hid"] * (own not in " ".join(told))


# ---------------------------------------------------------------------- all of them


def soak(
    count: int,
    seed: int,
    *,
    fault_share: float = FAULT_SHARE,
    tell: Callable[[Outcome, float], None] = lambda *_: None,
) -> list[Outcome]:
    """``count`` transitions, families by turns; ``tell`` hears of each and its seconds."""
    jobs = [Made(family, seed) for family in FAMILIES]
    found = []
    for number in range(count):
        job = jobs[number % len(jobs)]
        begin = time.monotonic()
        wanted = drawn(seed, number, job.family, job.layout, job.world, fault_share)
        try:
            outcome = job.run(wanted)
        finally:
            faults.arm(())
        found.append(outcome)
        tell(outcome, time.monotonic() - begin)
    return found
