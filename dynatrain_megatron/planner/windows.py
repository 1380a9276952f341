"""Windows: the messages of a transition placed by one of the schedules, and how long they take.

``direct``  as early as the bounds allow, to and from many peers at once (:mod:`planner.direct`)
``xor``     rounds of pairs, i with i ⊕ s (:mod:`planner.rounds`)
``ring``    rounds of pairs, as few as there can be for any number of ranks
``auto``    the one of these that is predicted to take least (:mod:`planner.cost`)
"""

from __future__ import annotations

from dataclasses import dataclass

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner.cost import (
    least_pairwise_seconds,
    predicted_pairwise_seconds,
    predicted_seconds,
)
from dynatrain_megatron.planner.direct import schedule_direct
from dynatrain_megatron.planner.rounds import ring_rounds, schedule_rounds, xor_rounds
from dynatrain_megatron.planner.schedule import Links, Messages
from dynatrain_megatron.planner.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Messages, the schedule that placed them (never ``auto``), and the seconds predicted."""

    messages: Messages
    schedule: EngineSchedule
    predicted_s: float


def place_messages(
    links: Links,
    topology: Topology,
    schedule: EngineSchedule,
    *,
    staging_bytes: int,
    window_ops: int,
) -> Windows:
    """The same on every rank, from what all ranks know.

    In each window a rank takes part in at most ``window_ops`` messages. Those of its windows that
    are under way together take at most ``staging_bytes``, but for windows of a single message of
    one element that is larger.
    """
    num_ranks = len(topology.node)

    def placed(kind: EngineSchedule) -> Windows:
        bounds = {"staging_bytes": staging_bytes, "window_ops": window_ops}
        if kind is EngineSchedule.direct:
            messages = schedule_direct(links, num_ranks, **bounds)
            return Windows(messages, kind, predicted_seconds(links, messages, topology))
        xor = kind is EngineSchedule.xor
        rounds = xor_rounds(links) if xor else ring_rounds(links, num_ranks)
        messages = schedule_rounds(links, rounds, **bounds)
        predicted_s = predicted_pairwise_seconds(links, rounds, messages, topology)
        return Windows(messages, kind, predicted_s)

    if schedule is not EngineSchedule.auto:
        return placed(schedule)
    direct = placed(EngineSchedule.direct)
    # On large worlds trying all would take longer than the rest of planning.
    if direct.predicted_s <= least_pairwise_seconds(links, topology):
        return direct
    others = placed(EngineSchedule.xor), placed(EngineSchedule.ring)
    return min(direct, *others, key=lambda windows: windows.predicted_s)
