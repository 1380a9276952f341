"""All that is known ahead of one switch: bytes, operations, memory, seconds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.ahead.cases import Case
from dynatrain_megatron.ahead.memory import Memory, plan_memory, too_much
from dynatrain_megatron.ahead.network import Network, Outcome, Traffic, run
from dynatrain_megatron.ahead.rebuild import Local, Rebuild, rebuild
from dynatrain_megatron.planner import Placement, Plan, make_plan, place
from dynatrain_megatron.planner.bound import least_load, load_of
from dynatrain_megatron.planner.checks import lower_bound_bytes
from dynatrain_megatron.planner.plan import Pass
from dynatrain_megatron.shapes import make_rosters
from dynatrain_megatron.vps.boxes import IntArray
from dynatrain_megatron.vps.roster import RosterSet

EFFICIENCY = 0.8
"""Share of a link's rate that large messages reach."""
LATENCY_S = 10e-6
WHOLE_UP_TO = 1024
"""Ranks up to which every message is planned, and travels by itself in a simulation."""
_BUSIEST = 3


@dataclass(frozen=True, slots=True)
class Busy:
    """A rank with much to do, bytes."""

    rank: int
    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class Bound:
    """The busiest rank's or node's load in the plan, and the least there could be; bytes."""

    planned: int
    least: int

    @property
    def gap(self) -> float:
        return self.planned / self.least if self.least else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """One switch, ahead of it.

    ``lower_bound`` and ``moved`` are bytes over all ranks, of the latter ``within`` inside of nodes
    and ``between`` them; ``rebuilt`` are parameters gathered anew. ``wire`` has an outcome for each
    pass. ``by_message`` tells whether each message travelled by itself there, or all between two
    ranks as one. ``memory_bytes`` is what each rank has, None where that is not known,
    ``placement`` the best one, where it was asked for.
    """

    case: Case
    plan: Plan
    lower_bound: int
    within: int
    between: int
    memory: Memory
    rebuilt: Rebuild
    wire: tuple[Outcome, ...]
    by_message: bool
    efficiency: float
    bound: Bound | None = None
    memory_bytes: int | None = None
    placement: Placement | None = None

    @property
    def wire_s(self) -> float:
        """Simulated seconds of all passes, one after the other."""
        return sum(outcome.seconds for outcome in self.wire)

    @property
    def seconds(self) -> float:
        """Wire and rebuilding; without planning, process groups and checks."""
        return self.wire_s + self.rebuilt.seconds

    @property
    def refusal(self) -> str:
        """Why the switch cannot be for want of memory; empty where it can."""
        return "" if self.memory_bytes is None else too_much(self.memory, self.memory_bytes)

    @property
    def gap(self) -> float:
        """Bytes moved over the lower bound."""
        return self.plan.moved_bytes / self.lower_bound if self.lower_bound else 1.0

    def busiest(self) -> list[Busy]:
        """The ranks that send and receive the most together, busiest first."""
        sent, received = self.plan.sent_bytes, self.plan.received_bytes
        order = np.argsort(-(sent + received), kind="stable")[:_BUSIEST]
        return [
            Busy(int(r), int(sent[r]), int(received[r])) for r in order if sent[r] + received[r]
        ]

    def as_json(self) -> dict[str, object]:
        """Everything but the matrix, as plain values."""
        case, plan, topology = self.case, self.plan, self.case.topology
        return {
            "feasible": not self.refusal,
            "reason": self.refusal or None,
            "source": str(case.source),
            "target": str(case.target),
            "ranks": {"source": case.source.world, "target": case.target.world},
            "parameters": case.model.numel,
            "bytes": {
                "moved": plan.moved_bytes,
                "lower_bound": self.lower_bound,
                "within_nodes": self.within,
                "between_nodes": self.between,
                "retained": plan.retained_bytes,
                "rebuilt": self.rebuilt.nbytes,
                "max_send": plan.max_send_bytes,
                "max_recv": plan.max_recv_bytes,
                "saved_by_best_placement": self.placement and self.placement.saved_bytes,
            },
            "gap": self.gap,
            "busiest": [dataclasses.asdict(one) for one in self.busiest()],
            "bound": None if self.bound is None else dataclasses.asdict(self.bound),
            "ops": plan.num_operations,
            "rounds": plan.num_windows,
            "passes": len(plan.passes),
            "schedule": list(dict.fromkeys(str(each.windows_by) for each in plan.passes)),
            "memory": dataclasses.asdict(self.memory),
            "predicted_s": plan.predicted_s,
            "simulated_s": {
                "total": self.seconds,
                "wire": [outcome.seconds for outcome in self.wire],
                "busiest_link": [outcome.least_s for outcome in self.wire],
                "rebuild": self.rebuilt.seconds,
                "by_message": self.by_message,
            },
            "topology": {
                "nodes": len(set(topology.node)),
                "node_width": topology.node_width,
                **dataclasses.asdict(topology.speeds),
                "efficiency": self.efficiency,
                "latency_s": LATENCY_S,
            },
        }


def estimate(
    case: Case,
    *,
    efficiency: float = EFFICIENCY,
    bound: bool = False,
    memory_bytes: int | None = None,
) -> Estimate:
    """Plan a case and let it run on its topology; ``bound`` also solves the linear program.

    Raises :class:`TransitionError` where the target wants what the source does not have.
    """
    rosters = case_rosters(case)
    by_message = case.num_ranks <= WHOLE_UP_TO
    # What every rank does is in any rank's plan but for the messages' contents and windows.
    plan = make_plan(*rosters, case.topology, case.options, rank=None if by_message else 0)
    network = Network(case.topology, efficiency, LATENCY_S)
    local = _locals(case)
    node = np.array(case.topology.node, dtype=np.int64)
    links = [each.links for each in plan.passes]
    far = sum(int(own.nbytes[node[own.src] != node[own.dst]].sum()) for own in links)
    return Estimate(
        case,
        plan,
        lower_bound_bytes(*rosters),
        plan.moved_bytes - far,
        far,
        plan_memory(rosters, local, case.options.staging_bytes),
        Rebuild(0, 0.0) if local is None else rebuild(local[1], case.target, network),
        tuple(run(traffic_of(each, by_message), network) for each in plan.passes),
        by_message,
        efficiency,
        _bound(case, rosters, plan) if bound else None,
        memory_bytes,
        place(*rosters, case.topology) if case.place else None,
    )


def case_rosters(case: Case) -> tuple[RosterSet, RosterSet]:
    """The rosters of all ranks in both layouts."""
    source, target = (
        make_rosters(case.model, side, weights_only=case.weights_only, num_ranks=case.num_ranks)
        for side in (case.source, case.target)
    )
    return source, target


def traffic_of(each: Pass, by_message: bool) -> Traffic:
    """The messages of a pass, or all that goes from one rank to another as one message."""
    if by_message:
        own = each.schedule
        return Traffic(own.src, own.dst, own.window, own.nbytes)
    links = each.links
    return Traffic(links.src, links.dst, np.zeros(len(links), dtype=np.int64), links.nbytes)


def bytes_matrix(estimate: Estimate, most: int) -> tuple[IntArray, str]:
    """Bytes from rank to rank, diagonal retained; by node where ranks are more than ``most``."""
    plan, node = estimate.plan, np.array(estimate.case.topology.node, dtype=np.int64)
    if plan.num_ranks <= most:
        return plan.bytes_matrix, "rank"
    size = int(node.max()) + 1
    matrix = np.zeros((size, size), dtype=np.int64)
    np.add.at(matrix, (node, node), plan.retained)
    for each in plan.passes:
        np.add.at(matrix, (node[each.links.src], node[each.links.dst]), each.links.nbytes)
    return matrix, "node"


def _locals(case: Case) -> tuple[Local, Local] | None:
    if case.weights_only:
        return None
    source, target = (
        Local.of(case.model, side, case.num_ranks) for side in (case.source, case.target)
    )
    return source, target


def _bound(case: Case, rosters: tuple[RosterSet, RosterSet], plan: Plan) -> Bound:
    least, _ = least_load(*rosters, case.topology, relay=case.options.relay)
    return Bound(round(load_of(plan, case.topology).time), round(least.time))
