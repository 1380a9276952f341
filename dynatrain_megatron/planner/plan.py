"""The plan: everything one transition moves and keeps, as plain data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.planner.cells import grouped_order
from dynatrain_megatron.planner.checks import check_coverage, lower_bound_bytes
from dynatrain_megatron.planner.flows import Flows, find_flows
from dynatrain_megatron.planner.routes import pieces_of
from dynatrain_megatron.planner.schedule import (
    Links,
    Messages,
    Schedule,
    links_of,
    schedule_direct,
)
from dynatrain_megatron.planner.shares import Shares, choose_shares
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import IntArray
from dynatrain_megatron.vps.roster import RosterSet
from dynatrain_megatron.vps.tensors import LogicalTensor

_ALGORITHM = b"2"
"""Changed with everything that may change a plan, so that ranks with other code are found out."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """``staging_bytes`` bounds the staging memory of a rank; ``window_ops`` its operations."""

    staging_bytes: int = 256 << 20
    window_ops: int = 256


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A transition: as a whole, or what one rank does in it.

    ``links`` and everything worked out from them are about all ranks, ``schedule`` and
    ``lower_bound_bytes`` (bytes that must be received) about ``rank``, or about all where that is
    None. ``retained`` [num_ranks] are the bytes that each rank keeps. ``digest`` is equal for the
    same inputs, whichever rank it is made for.
    """

    tensors: tuple[LogicalTensor, ...]
    num_ranks: int
    rank: int | None
    schedule: Schedule
    links: Links
    retained: IntArray
    num_operations: int
    num_windows: int
    lower_bound_bytes: int
    digest: str

    @property
    def bytes_matrix(self) -> IntArray:
        """Bytes from rank (row) to rank (column), [num_ranks, num_ranks]; diagonal: retained."""
        matrix = np.diag(self.retained)
        matrix[self.links.src, self.links.dst] = self.links.nbytes
        return matrix

    @property
    def moved_bytes(self) -> int:
        return int(self.links.nbytes.sum())

    @property
    def retained_bytes(self) -> int:
        return int(self.retained.sum())

    @property
    def max_send_bytes(self) -> int:
        """Bytes of the busiest sender."""
        return int(_by_rank(self.links.src, self.links.nbytes, self.num_ranks).max(initial=0))

    @property
    def max_recv_bytes(self) -> int:
        """Bytes of the busiest receiver."""
        return int(_by_rank(self.links.dst, self.links.nbytes, self.num_ranks).max(initial=0))


def make_plan(
    source: RosterSet,
    target: RosterSet,
    topology: Topology,
    options: PlanOptions,
    *,
    rank: int | None = None,
) -> Plan:
    """Plan the transition between two roster sets over the same ranks and logical tensors.

    With ``rank`` only what that rank sends, receives and keeps: the part of the whole plan, made
    without the rest, which takes a large world seconds instead of minutes. Pure and deterministic.
    Raises :class:`TransitionError` where an element of the target has no holder, or where the
    coverage proof fails.
    """
    flows = find_flows(source, target, topology)
    shares = choose_shares(flows, topology)
    links, link = links_of(flows, shares)
    messages = schedule_direct(
        links,
        target.num_ranks,
        staging_bytes=options.staging_bytes,
        window_ops=options.window_ops,
    )
    kept = link < 0
    retained = _by_rank(
        shares.dst[kept],
        (shares.numel * flows.element_bytes[shares.flow])[kept],
        target.num_ranks,
    )
    schedule = _schedule(flows, shares, link, links, messages, source, target, rank)
    check_coverage(schedule.pieces.and_also(schedule.retained), source, target, rank)
    return Plan(
        target.tensors,
        target.num_ranks,
        rank,
        schedule,
        links,
        retained,
        len(messages),
        messages.num_windows,
        lower_bound_bytes(source, target, rank),
        _digest(source, target, topology, options, links, messages),
    )


def _schedule(
    flows: Flows,
    shares: Shares,
    link: IntArray,
    links: Links,
    messages: Messages,
    source: RosterSet,
    target: RosterSet,
    rank: int | None,
) -> Schedule:
    """Pieces and messages of all ranks, or of one; ``link`` is the one each share belongs to."""
    moved, kept, sent = link >= 0, link < 0, np.ones(len(links), dtype=np.bool_)
    if rank is not None:
        moved &= (shares.src == rank) | (shares.dst == rank)
        kept &= shares.dst == rank
        sent = (links.src == rank) | (links.dst == rank)
    own_link, part, window = messages.of_links(np.nonzero(sent)[0])
    pieces, share, piece_part = pieces_of(
        flows, shares.take(moved), source, target, messages.steps[link[moved]]
    )
    retained, _, _ = pieces_of(flows, shares.take(kept), source, target)
    # Messages are in order of link and part, and so are pieces: bring both into that of windows.
    turn = (links.dst - links.src)[own_link] % target.num_ranks
    order = np.lexsort((part, links.src[own_link], turn, window))
    place = np.zeros(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    parts = int(messages.count.max(initial=0)) + 1
    key = link[moved][share] * parts + piece_part
    message = place[np.searchsorted(own_link * parts + part, key)]
    by_message = grouped_order(message)
    pieces, message = pieces.take(by_message), message[by_message]
    own_link, part, window = own_link[order], part[order], window[order]
    nbytes = np.zeros(len(order), dtype=np.int64)
    np.add.at(nbytes, message, pieces.numel * target.element_bytes[pieces.tensor])
    return Schedule(
        part * len(links) + own_link,
        links.src[own_link],
        links.dst[own_link],
        window,
        nbytes,
        np.searchsorted(message, np.arange(len(order) + 1)),
        pieces,
        retained,
    )


def _by_rank(rank: IntArray, nbytes: IntArray, num_ranks: int) -> IntArray:
    total = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(total, rank, nbytes)
    return total


def _digest(
    source: RosterSet,
    target: RosterSet,
    topology: Topology,
    options: PlanOptions,
    links: Links,
    messages: Messages,
) -> str:
    """Of the inputs, and of all that every rank worked out of them."""
    inputs = (source.digest(), target.digest(), topology, options)
    state = hashlib.sha256(_ALGORITHM + repr(inputs).encode())
    for columns in (links, messages):
        for name in columns.__slots__:
            state.update(np.ascontiguousarray(getattr(columns, name), dtype="<i8"))
    return state.hexdigest()
