"""What the processes of a switch tell each other over the bridge, and agree on before data moves.

Everything here is collective over the bridge and ends alike on all of its ranks.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dynatrain_megatron.adapters.built import Built
from dynatrain_megatron.adapters.job import Bridge, Job, RostersKey
from dynatrain_megatron.adapters.state import Steps, merge_steps
from dynatrain_megatron.config import EngineTransport, KeepSource, Verify
from dynatrain_megatron.engine import BoundPlan, Fragments, FragmentsBuilder, Transport
from dynatrain_megatron.engine.fingerprint import Sums
from dynatrain_megatron.engine.holdings import Holdings
from dynatrain_megatron.engine.memory import Dropped
from dynatrain_megatron.errors import ConfigError, SwitchRefused, TransitionError
from dynatrain_megatron.planner import PlanOptions, Topology, TopologyFile
from dynatrain_megatron.planner.staged import StagedPlan
from dynatrain_megatron.transition.keep import Free, decide
from dynatrain_megatron.vps import Roster, RosterSet
from dynatrain_megatron.vps.roster import union_of_tensors

logger = logging.getLogger(__name__)

_MESSAGE_CHARS = 500  # of a host's message; some print whole dictionaries


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """``verify`` is never ``auto``; ``timeout_s`` bounds each wait of the transfer.

    ``check_replicas`` compares what several ranks hold before anything is built. ``topology`` is
    what the user says of nodes and links.
    """

    plan: PlanOptions
    transport: EngineTransport = EngineTransport.auto
    verify: Verify = Verify.fingerprint
    keep_source: KeepSource = KeepSource.auto
    check_replicas: bool = False
    topology: TopologyFile | None = None
    connect_s: float = 30.0
    decide_s: float = 60.0
    timeout_s: float = 600.0


class Side(NamedTuple):
    """One layout on this rank, old or new: nothing where the process is not in its world."""

    built: Built | None
    holdings: Holdings

    @classmethod
    def of(cls, built: Built, fragments: Fragments, missing: Dropped | None = None) -> Side:
        """A layout that is ``built`` here; ``missing`` are its storages without memory yet."""
        holdings = Holdings(
            fragments,
            gradients=built.state.gradients(),
            rebuilt=built.state.rebuilt(),
            everything=built.state.tensors(),
            missing=missing,
        )
        return cls(built, holdings)

    @classmethod
    def absent(cls) -> Side:
        """A layout that this process has no part in."""
        nothing = FragmentsBuilder().build()
        return cls(None, Holdings(nothing, gradients=(), rebuilt=(), everything=()))

    @property
    def digest(self) -> str:
        """Of its roster; empty for nothing."""
        return "" if self.built is None else self.built.digest


def everyones_problem(own: str, bridge: Transport, timeout_s: float) -> str:
    """What the first rank that has a problem says of it; empty where none has."""
    for rank, problem in enumerate(bridge.all_gather(own.encode(), timeout_s=timeout_s)):
        if problem:
            return f"rank {rank}: {problem.decode()}"
    return ""


def told(error: Exception, what: str) -> str:
    """A host's error as others are told it; logged here with its traceback."""
    if isinstance(error, SwitchRefused):
        return str(error)
    logger.warning("%s on this rank", what, exc_info=True)
    return f"{what}: {type(error).__name__}: {str(error)[:_MESSAGE_CHARS]}"


def described(built: Built | None, bridge: Transport, timeout_s: float) -> Side:
    """This rank's old layout, once every rank could describe its own."""
    refusal, fragments = "", None
    try:
        fragments = None if built is None else built.fragments()
    except Exception as error:  # Megatron's own description of a checkpoint fails for some models
        refusal = told(error, "the state could not be described")
    refusal = everyones_problem(refusal, bridge, timeout_s)
    if refusal:
        raise SwitchRefused(refusal)
    if built is None or fragments is None:
        return Side.absent()
    return Side.of(built, fragments)


def gather_rosters(fragments: Fragments, bridge: Transport, timeout_s: float) -> list[Roster]:
    """Every rank's roster of one layout, by bridge rank."""
    rows = bridge.all_gather(fragments.roster.to_bytes(), timeout_s=timeout_s)
    read = {row: Roster.from_bytes(row) for row in set(rows)}  # replicas have equal ones
    return [read[row] for row in rows]


def _merged(old: list[Roster], new: list[Roster]) -> tuple[RosterSet, RosterSet]:
    """Both roster sets over one list of logical tensors; all ranks see the same rosters.

    Raises :class:`SwitchRefused` where two of them contradict each other.
    """
    try:
        tensors = union_of_tensors([*old, *new])
    except ValueError as error:
        raise SwitchRefused(str(error), "the job stays in its layout") from error
    return RosterSet.merge(old, tensors), RosterSet.merge(new, tensors)


def _rosters(
    job: Job, old: Side, new: Side, bridge: Transport, timeout_s: float
) -> tuple[RosterSet, RosterSet]:
    """Both roster sets, exchanged only where they are not those of a switch before.

    All ranks know the same ones, since all have made the same switches. Raises
    :class:`SwitchRefused` on all ranks alike.
    """
    own = json.dumps([old.digest, new.digest]).encode()
    digests = [json.loads(row) for row in bridge.all_gather(own, timeout_s=timeout_s)]
    key = RostersKey(*(tuple(column) for column in zip(*digests, strict=True)))
    known = job.rosters.get(key)
    if known is None:
        before, after = (
            gather_rosters(side.holdings.fragments, bridge, timeout_s) for side in (old, new)
        )
        known = _merged(before, after)
        job.rosters.put(key, known)
    return known


class Planned(NamedTuple):
    """A plan, what it was made of, and whether the old state is ``kept`` until all is done.

    ``bound`` is this rank's part in memory where all ranks know theirs from a switch before.
    """

    plan: StagedPlan
    rosters: tuple[RosterSet, RosterSet]
    topology: Topology
    kept: KeepSource
    bound: BoundPlan | None


def planned(
    job: Job, old: Side, new: Side, free: Free, bridge: Bridge, options: SwitchOptions
) -> Planned:
    """This rank's part of the plan that all agreed on, and what it was made of.

    Collective. Raises :class:`SwitchRefused` on all ranks where one of them finds that the plan
    cannot be, :class:`TransitionError` where they made different plans.
    """
    timeout_s, transport, topology = options.timeout_s, bridge.transport, bridge.topology
    # At least a byte: whoever wants little staging memory gets as many windows as there can be.
    room = max(1, options.plan.staging_bytes - transport.held_bytes)
    # The ranks of a node copy host memory through one bus: nobody gains by sending for another.
    own_links = transport.device.type != "cpu"
    plan_options = replace(options.plan, staging_bytes=room, relay_within_nodes=own_links)
    rosters = _rosters(job, old, new, transport, timeout_s)
    kept, stages = decide(
        options.keep_source,
        rosters,
        old.holdings,
        new.holdings,
        free,
        transport,
        staging_bytes=options.plan.staging_bytes,
        timeout_s=timeout_s,
    )
    problem = digest = ""
    bound = None
    try:
        if options.topology is not None:
            topology = options.topology.over(topology, bridge.hosts)
        plan = job.plans.staged(*rosters, stages, topology, plan_options, rank=transport.rank)
        digest = plan.digest
        if stages.count == 1:
            bound = job.bound_plans.get(
                plan.plans[0], old.holdings.fragments, new.holdings.fragments
            )
    except (ConfigError, TransitionError) as error:
        problem = str(error)
    own = json.dumps([problem, digest, bound is not None]).encode()
    answers = [json.loads(row) for row in transport.all_gather(own, timeout_s=timeout_s)]
    for found, _, _ in answers:
        if found:
            raise SwitchRefused(found, f"the job stays in layout {job.layout}")
    odd = [rank for rank, (_, made, _) in enumerate(answers) if made != answers[0][1]]
    if odd:
        raise TransitionError(
            f"ranks {odd} made another plan than rank 0; their rosters, options or package "
            "versions differ"
        )
    known = all(each for _, _, each in answers)
    return Planned(plan, rosters, topology, kept, bound if known else None)


def exchange_steps(own: Steps, bridge: Transport, timeout_s: float) -> Steps:
    """The step counts of all; raises :class:`SwitchRefused` where two contradict each other."""
    rows = bridge.all_gather(json.dumps(own).encode(), timeout_s=timeout_s)
    return merge_steps(json.loads(row) for row in rows)


def compared(rosters: RosterSet, old: tuple[str, Sums], new: tuple[str, Sums]) -> dict[str, str]:
    """Both fingerprints of the whole state, which must be one."""
    (before, old_sums), (after, new_sums) = old, new
    if before != after:
        odd = np.unique(np.nonzero(old_sums != new_sums)[0])
        raise TransitionError(
            f"fingerprint of the whole state was {before} and is {after}, although every rank has "
            "its sources' bits: copies that should be equal differed before the switch, of "
            f"{', '.join(rosters.tensors[i].name for i in odd[:5])}; engine.check_replicas=true "
            "names the ranks and refuses such a switch"
        )
    return {"before": before, "after": after}
