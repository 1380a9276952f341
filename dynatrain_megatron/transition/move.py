"""Moving the state in stages: allocate → move → verify → free, each of them on all ranks alike.

Sources are freed only when every rank has verified what it got of the stage. So each logical tensor
is whole in one of the two layouts at any moment; but from the first free on it takes both, and
nobody can train in either until all is moved.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dynatrain_megatron import whereabouts
from dynatrain_megatron.config import Verify
from dynatrain_megatron.engine import (
    BoundPlan,
    ExecutionReport,
    Fragments,
    Transport,
    bind_plan,
    execute,
)
from dynatrain_megatron.engine.fingerprint import Checked, Sums, check_received
from dynatrain_megatron.engine.holdings import Holdings
from dynatrain_megatron.engine.memory import Ledger, free
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.faults import Phase
from dynatrain_megatron.planner.plan import Plan
from dynatrain_megatron.planner.staged import StagedPlan
from dynatrain_megatron.planner.stages import Peak, planned_peak
from dynatrain_megatron.vps.boxes import BoolArray, IntArray
from dynatrain_megatron.vps.roster import RosterSet


@dataclass
class Move:
    """One rank's part of moving the state.

    ``finished`` are the stages that all ranks have and have verified, of which sources are gone
    where the move ``frees`` them.
    ``give_back`` lets others have what was freed, where an allocator would keep it. ``bound`` is
    the plan bound to memory, where there is one stage: known to all ranks beforehand or to none.
    ``seconds`` are those outside the transfer itself, by phase.
    """

    plan: StagedPlan
    old: Holdings
    new: Holdings
    ledger: Ledger
    frees: bool
    give_back: Callable[[], None]
    bound: BoundPlan | None = None
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reports: list[ExecutionReport] = field(default_factory=list)
    checked: list[tuple[Plan, Checked]] = field(default_factory=list)
    finished: int = 0

    def planned(self, rosters: tuple[RosterSet, RosterSet], rank: int, held_bytes: int = 0) -> Peak:
        """The memory that the switch takes on a rank whose transport holds ``held_bytes``."""
        old, new = self._stages_of_slots(rosters, rank)
        return planned_peak(
            self.old.memory(self.old.stages(old, last=True)),
            self.new.memory(self.new.stages(new, last=False)),
            self.plan.staging_bytes(rank) + held_bytes,
            frees=self.frees,
        )

    def run(
        self,
        rosters: tuple[RosterSet, RosterSet],
        transport: Transport,
        *,
        verify: Verify,
        timeout_s: float,
    ) -> None:
        """All stages; collective. Raises :class:`TransitionError` where one fails."""
        old, new = self._stages_of_slots(rosters, transport.rank)
        last, first = self.old.stages(old, last=True), self.new.stages(new, last=False)
        if self.frees:
            self.give_back()
        for number, plan in enumerate(self.plan.plans):
            whereabouts.begin(Phase.memory, transport.rank)
            with self._timed("memory"):
                self._allocate(first == number)
            given, got = self.old.fragments, self.new.fragments
            if self.plan.stages.count > 1:
                given, got = _part(given, old, number), _part(got, new, number)
            self._one_stage(plan, given, got, transport, verify=verify, timeout_s=timeout_s)
            self.finished = number + 1
            if self.frees:
                with self._timed("memory"):
                    self._free(last == number, first=not number)

    def sums(self, like: Sums, rosters: RosterSet) -> tuple[Sums, Sums]:
        """Of all that this rank gave and of all that it got, in all stages, shaped as ``like``."""
        place = {tensor.name: i for i, tensor in enumerate(rosters.tensors)}
        gave, got = np.zeros_like(like), np.zeros_like(like)
        for plan, found in self.checked:
            rows = [place[tensor.name] for tensor in plan.tensors]
            columns = found.gave.shape[1]
            gave[rows, :columns] += found.gave
            got[rows, :columns] += found.got
        return gave, got

    def rebuild_begins(self) -> None:
        """Allocate the parameters that are made from what has been moved."""
        self.new.allocate_rebuilt()
        self.ledger.mark()

    def _one_stage(
        self,
        plan: Plan,
        given: Fragments,
        got: Fragments,
        transport: Transport,
        *,
        verify: Verify,
        timeout_s: float,
    ) -> None:
        bound = self.bound
        if bound is None:
            with self._timed("plan"):
                bound = bind_plan(plan, given, got, transport, timeout_s=timeout_s)
            if self.plan.stages.count == 1:
                self.bound = bound
        report = execute(
            plan,
            given,
            got,
            transport,
            timeout_s=timeout_s,
            bound=bound,
            check_messages=verify is Verify.messages,
        )
        self.reports.append(report)
        self.seconds["verify"] += report.verify_s
        self.ledger.mark(report.peak_staging_bytes)
        with self._timed("verify"):
            # Either check ends with all ranks knowing that all are content.
            if verify is Verify.fingerprint:
                found = check_received(plan, given, got, transport, timeout_s=timeout_s)
                self.checked.append((plan, found))
            elif verify is Verify.off and self.frees:
                answers = transport.all_gather(b"well", timeout_s=timeout_s)
                if answers != [b"well"] * transport.size:  # one that was given up says so of none
                    raise TransitionError("the transfer was given up while it was waited for")

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begin

    def _allocate(self, chosen: BoolArray) -> None:
        for number in np.nonzero(chosen)[0].tolist():
            self.new.allocate(number)

    def _free(self, chosen: BoolArray, *, first: bool) -> None:
        free(self.old.storages[number] for number in np.nonzero(chosen)[0].tolist())
        if first:
            free(self.old.rebuilt)
        self.give_back()

    def _stages_of_slots(
        self, rosters: tuple[RosterSet, RosterSet], rank: int
    ) -> tuple[IntArray, IntArray]:
        """The stage of each of this rank's fragments in the source and in the target."""
        stages = self.plan.stages
        return stages.source[rosters[0].rows_of(rank)], stages.target[rosters[1].rows_of(rank)]


def _part(fragments: Fragments, stage_of_slot: IntArray, number: int) -> Fragments:
    return fragments.part(np.nonzero(stage_of_slot == number)[0])
