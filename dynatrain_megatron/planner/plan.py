"""The plan: everything one transition moves and keeps, as plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.config import EngineConfig, EnginePromote, EngineSchedule
from dynatrain_megatron.planner.cells import grouped_order
from dynatrain_megatron.planner.checks import check_coverage, check_messages, lower_bound_bytes
from dynatrain_megatron.planner.flows import Flows, find_flows
from dynatrain_megatron.planner.relays import choose_relayed_shares
from dynatrain_megatron.planner.routes import Routes, TakesFrom, pieces_of
from dynatrain_megatron.planner.schedule import Links, Messages, Schedule, links_of
from dynatrain_megatron.planner.shares import Shares, Sources, choose_shares, no_shares
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.planner.windows import place_messages
from dynatrain_megatron.vps.boxes import IntArray
from dynatrain_megatron.vps.roster import RosterSet
from dynatrain_megatron.vps.tensors import LogicalTensor

_ALGORITHM = b"5"
"""Changed with everything that may change a plan, so that ranks with other code are found out."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """``staging_bytes`` bounds the staging memory of a rank; ``window_ops`` its operations
    in one window.

    ``schedule`` says how messages are placed into windows, ``sources`` who sends what several
    ranks hold. With ``relay``, where sources are balanced, what several ranks of a node want is
    relayed where that should be faster; what is in their node only if ``relay_within_nodes``.
    """

    staging_bytes: int = 256 << 20
    window_ops: int = 256
    schedule: EngineSchedule = EngineSchedule.direct
    relay: bool = True
    relay_within_nodes: bool = True
    sources: Sources = Sources.balanced

    @classmethod
    def of(cls, engine: EngineConfig) -> PlanOptions:
        """As a job with these settings plans."""
        return cls(
            staging_bytes=engine.staging_mib << 20,
            window_ops=engine.window_ops,
            schedule=engine.schedule,
            relay=engine.promote is not EnginePromote.off,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Messages that go together, in windows of their own.

    A rank begins a pass when all that it gets in the passes before is in its place, so a pass may
    take from the target what an earlier one brought there. ``links`` are about all ranks, the
    numbers of operations and windows too, ``schedule`` about the rank that the plan is made for.
    ``windows_by`` is the schedule that placed them, never ``auto``, and ``predicted_s`` what they
    should take (:mod:`planner.cost`).
    """

    takes_from: TakesFrom
    links: Links
    schedule: Schedule
    num_operations: int
    num_windows: int
    windows_by: EngineSchedule
    predicted_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A transition: as a whole, or what one rank does in it.

    The schedules of ``passes`` and ``lower_bound_bytes`` (bytes that must be received) are about
    ``rank``, or about all where that is None; everything else is about all ranks. ``retained``
    [num_ranks] are the bytes that each rank keeps. ``digest`` is equal for the same inputs,
    whichever rank it is made for.
    """

    tensors: tuple[LogicalTensor, ...]
    num_ranks: int
    rank: int | None
    passes: tuple[Pass, ...]
    retained: IntArray
    lower_bound_bytes: int
    digest: str

    @property
    def bytes_matrix(self) -> IntArray:
        """Bytes from rank (row) to rank (column), [num_ranks, num_ranks]; diagonal: retained.

        For small worlds: at 4,096 ranks these are 16 million numbers.
        """
        matrix = np.diag(self.retained)
        for each in self.passes:
            matrix[each.links.src, each.links.dst] += each.links.nbytes
        return matrix

    @property
    def moved_bytes(self) -> int:
        return sum(int(each.links.nbytes.sum()) for each in self.passes)

    @property
    def retained_bytes(self) -> int:
        return int(self.retained.sum())

    @property
    def sent_bytes(self) -> IntArray:
        """Bytes that each rank sends, [num_ranks]."""
        return self._by_rank("src")

    @property
    def received_bytes(self) -> IntArray:
        """Bytes that each rank receives, [num_ranks]."""
        return self._by_rank("dst")

    @property
    def max_send_bytes(self) -> int:
        """Bytes of the busiest sender."""
        return int(self.sent_bytes.max(initial=0))

    @property
    def max_recv_bytes(self) -> int:
        """Bytes of the busiest receiver."""
        return int(self.received_bytes.max(initial=0))

    @property
    def num_operations(self) -> int:
        return sum(each.num_operations for each in self.passes)

    @property
    def num_windows(self) -> int:
        return sum(each.num_windows for each in self.passes)

    @property
    def predicted_s(self) -> float:
        """Seconds that all passes should take, one after the other."""
        return sum(each.predicted_s for each in self.passes)

    def pieces(self) -> Iterator[tuple[TakesFrom, Routes]]:
        """All pieces, moved and retained, and where their sources lie."""
        for each in self.passes:
            yield each.takes_from, each.schedule.pieces
            yield each.takes_from, each.schedule.retained

    def staging_bytes(self, rank: int) -> int:
        """Staging memory of one window of ``rank``: the most that any of them can need."""
        return max((each.schedule.staging_bytes(rank) for each in self.passes), default=0)

    def peak_staging_bytes(self, rank: int) -> int:
        """Staging memory of all windows that ``rank`` has under way together.

        It takes less only where the transport carries the state as it lies.
        """
        busiest = max((each.schedule.windows_under_way(rank) for each in self.passes), default=0)
        return busiest * self.staging_bytes(rank)

    def _by_rank(self, end: str) -> IntArray:
        total = np.zeros(self.num_ranks, dtype=np.int64)
        for each in self.passes:
            np.add.at(total, getattr(each.links, end), each.links.nbytes)
        return total


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
    if options.relay and options.sources is Sources.balanced:
        brought, relayed = choose_relayed_shares(
            flows, topology, within_nodes=options.relay_within_nodes
        )
    else:
        brought, relayed = choose_shares(flows, topology, options.sources), no_shares()
    about = source, target, topology, options, rank
    made = [_make_pass(flows, brought, TakesFrom.SOURCE, *about)]
    if len(relayed):
        made.append(_make_pass(flows, relayed, TakesFrom.TARGET, *about))
    kept = brought.src == brought.dst
    retained = _by_rank(
        brought.dst[kept],
        (brought.numel * flows.element_bytes[brought.flow])[kept],
        target.num_ranks,
    )
    for each, _ in made:
        check_messages(each.schedule)
    first = made[0][0].schedule
    check_coverage(
        first.pieces.and_also(first.retained),
        source,
        target,
        rank,
        relays=[each.schedule.pieces for each, _ in made[1:]],
    )
    return Plan(
        target.tensors,
        target.num_ranks,
        rank,
        tuple(each for each, _ in made),
        retained,
        lower_bound_bytes(source, target, rank),
        _digest(source, target, topology, options, made),
    )


def _make_pass(
    flows: Flows,
    shares: Shares,
    takes_from: TakesFrom,
    source: RosterSet,
    target: RosterSet,
    topology: Topology,
    options: PlanOptions,
    rank: int | None,
) -> tuple[Pass, Messages]:
    """The pass that moves and keeps ``shares``, and the messages of all ranks in it."""
    links, link = links_of(flows, shares)
    windows = place_messages(
        links,
        topology,
        options.schedule,
        staging_bytes=options.staging_bytes,
        window_ops=options.window_ops,
    )
    messages = windows.messages
    schedule = _schedule(
        flows,
        shares,
        takes_from,
        link,
        links,
        messages,
        source,
        target,
        rank,
        options.window_ops,
    )
    made = Pass(
        takes_from,
        links,
        schedule,
        len(messages),
        messages.num_windows,
        windows.schedule,
        windows.predicted_s,
    )
    return made, messages


def _schedule(
    flows: Flows,
    shares: Shares,
    takes_from: TakesFrom,
    link: IntArray,
    links: Links,
    messages: Messages,
    source: RosterSet,
    target: RosterSet,
    rank: int | None,
    window_ops: int,
) -> Schedule:
    """Pieces and messages of all ranks, or of one; ``link`` is the one each share belongs to."""
    moved, kept, sent = link >= 0, link < 0, np.ones(len(links), dtype=np.bool_)
    if rank is not None:
        moved &= (shares.src == rank) | (shares.dst == rank)
        kept &= shares.dst == rank
        sent = (links.src == rank) | (links.dst == rank)
    own_link, part, window = messages.of_links(np.nonzero(sent)[0])
    pieces, share, piece_part = pieces_of(
        flows, shares.take(moved), source, target, messages.steps[link[moved]], takes_from
    )
    retained, _, _ = pieces_of(flows, shares.take(kept), source, target, takes_from=takes_from)
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
    own_link, window = own_link[order], window[order]
    nbytes = np.zeros(len(order), dtype=np.int64)
    np.add.at(nbytes, message, pieces.numel * target.element_bytes[pieces.tensor])
    return Schedule(
        links.src[own_link],
        links.dst[own_link],
        window,
        nbytes,
        _max_parcels(nbytes, messages.fullest_window(links), window_ops),
        np.searchsorted(message, np.arange(len(order) + 1)),
        pieces,
        retained,
    )


def _max_parcels(nbytes: IntArray, fullest: tuple[int, int], window_ops: int) -> IntArray:
    """How many operations each message may be, [m]; the same at both its ends.

    What the fullest window leaves of ``window_ops`` is shared out by bytes, so that no window of
    any rank has more.
    """
    most, most_bytes = fullest
    return 1 + nbytes * (window_ops - most) // max(1, most_bytes)


def _by_rank(rank: IntArray, nbytes: IntArray, num_ranks: int) -> IntArray:
    total = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(total, rank, nbytes)
    return total


def _digest(
    source: RosterSet,
    target: RosterSet,
    topology: Topology,
    options: PlanOptions,
    passes: list[tuple[Pass, Messages]],
) -> str:
    """Of the inputs, and of all that every rank worked out of them."""
    inputs = (source.digest(), target.digest(), topology, options)
    state = hashlib.sha256(_ALGORITHM + repr(inputs).encode())
    for each, messages in passes:
        for columns in (each.links, messages):
            for name in columns.__slots__:
                state.update(np.ascontiguousarray(getattr(columns, name), dtype="<i8"))
    return state.hexdigest()
