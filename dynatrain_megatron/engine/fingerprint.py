"""Fingerprints: layout-independent sums over the bits of a state, modulo 2**64.

For one state of one logical tensor x, with odd pseudo-random 64-bit weights a_d for each dim::

    H(x) = sum over i of  a_0[i_0] * a_1[i_1] * ... * bits(x[i])      (mod 2**64)

The sum is additive over any cut into regions, so each rank hashes what it holds where it lies, and
the sums agree across layouts exactly when the bits do. A single flipped bit always changes it,
since a product of odd weights is odd. Seeds come from the state's :func:`label`, so what a
checkpoint on disk holds has the same sums.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynatrain_megatron import whereabouts
from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.transport import Message, Transport
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.faults import Phase
from dynatrain_megatron.planner.plan import Plan
from dynatrain_megatron.planner.routes import Routes, TakesFrom, unique_cover
from dynatrain_megatron.planner.schedule import Schedule
from dynatrain_megatron.vps.boxes import BoolArray, IntArray
from dynatrain_megatron.vps.roster import RosterSet
from dynatrain_megatron.vps.tensors import LogicalTensor, StateKind

Sums = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_MASK = (1 << 64) - 1
_CHUNK_ELEMENTS = 1 << 18  # as many as a core's cache holds
_CHUNK_ELEMENTS_GPU = 1 << 22  # as many as take a GPU longer than being asked to
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Piece:
    """A region ``[start, stop)`` of tensor number ``tensor``, and the views of its states."""

    tensor: int
    start: tuple[int, ...]
    views: tuple[torch.Tensor, ...]


def hash_pieces(tensors: Sequence[LogicalTensor], pieces: Iterable[Piece]) -> Sums:
    """The sums of ``pieces``, [len(tensors), most states]; local, no communication."""
    sums = np.zeros((len(tensors), _num_states(tensors)), dtype=np.uint64)
    for piece in pieces:
        for k, view in enumerate(piece.views):
            value = _hash_view(tensors[piece.tensor], k, piece.start, view)
            sums[piece.tensor, k] = (int(sums[piece.tensor, k]) + value) & _MASK
    return sums


def own_sums(
    rosters: RosterSet,
    fragments: Fragments,
    rank: int,
    *,
    chosen: BoolArray | None = None,
) -> Sums:
    """What ``rank`` adds to the sums of a layout's whole state, each element counted once; local.

    With ``chosen`` [tensors] only of those logical tensors; the rest is zero.
    """
    cover = unique_cover(rosters, rank)
    if chosen is not None:
        cover = cover.take(chosen[cover.tensor])
    return hash_pieces(rosters.tensors, _pieces(cover, fragments))


def label(tensor: LogicalTensor, state: int) -> str:
    """The name of one state of a logical tensor: the same in every layout and in a checkpoint.

    What no optimizer changes is ``plain``: a checkpoint does not tell parameters from buffers.
    """
    kind = tensor.states[state].kind
    if kind in (StateKind.PARAM, StateKind.BUFFER):
        return f"{tensor.name.removesuffix(f' {kind}')} plain"
    return f"{tensor.name} {kind}"


def by_label(tensors: Sequence[LogicalTensor], sums: Sums) -> dict[str, str]:
    """The fingerprint of each state, 16 hex digits, by its :func:`label`."""
    return {
        label(tensor, state): f"{int(sums[i, state]):016x}"
        for i, tensor in enumerate(tensors)
        for state in range(len(tensor.states))
    }


def whole(labelled: Mapping[str, str]) -> str:
    """The fingerprint of all states together, 16 hex digits."""
    text = "".join(f"{name} {digits}\n" for name, digits in sorted(labelled.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint_of(
    tensors: Sequence[LogicalTensor], own: Sums, transport: Transport, *, timeout_s: float
) -> tuple[str, Sums]:
    """The fingerprint of the whole state of which every rank has its ``own`` sums; collective.

    Returns 16 hex digits over everything, and the sums by logical tensor and state.
    """
    total = _sum_over_ranks(own, transport, timeout_s)
    return whole(by_label(tensors, total)), total


def fingerprint(
    rosters: RosterSet, fragments: Fragments, transport: Transport, *, timeout_s: float
) -> tuple[str, Sums]:
    """As :func:`fingerprint_of`, of the state as it lies in ``fragments``; collective."""
    own = own_sums(rosters, fragments, transport.rank)
    return fingerprint_of(rosters.tensors, own, transport, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class Checked:
    """Sums of all that this rank ``gave`` and of all that it ``got``, by tensor and state."""

    gave: Sums
    got: Sums


def check_received(
    plan: Plan, source: Fragments, target: Fragments, transport: Transport, *, timeout_s: float
) -> Checked:
    """Every rank's target fragments hold the bits their sources hold; collective.

    Each rank hashes, for each receiver, the regions it gave to it, and tells that one the sums;
    each receiver compares them with those of its own fragments, so that every replica is checked.
    Raises :class:`TransitionError` on all ranks, naming the receiving ranks and tensors that
    differ.
    """
    whereabouts.begin(Phase.verify, transport.rank)
    index = {t.name: i for i, t in enumerate(plan.tensors)}
    roster = target.roster
    got = hash_pieces(
        plan.tensors,
        (
            Piece(
                index[roster.tensors[int(roster.tensor[slot])].name],
                tuple(int(x) for x in roster.start[slot]),
                target.views[slot],
            )
            for slot in range(len(roster))
        ),
    )
    gave, expected = np.zeros_like(got), np.zeros_like(got)
    for each in plan.passes:
        given = source if each.takes_from is TakesFrom.SOURCE else target
        _add_given(gave, expected, plan.tensors, each.schedule, given, transport, timeout_s)
    wrong = [plan.tensors[t].name for t in np.unique(np.nonzero(expected != got)[0])]
    reports = transport.all_gather(json.dumps(wrong).encode(), timeout_s=timeout_s)
    named = {r: json.loads(report) for r, report in enumerate(reports) if report != b"[]"}
    if named:
        raise TransitionError(
            "state after the transfer differs from its source: "
            + "; ".join(f"rank {r}: {', '.join(names[:5])}" for r, names in named.items())
        )
    return Checked(gave, got)


def _add_given(
    gave: Sums,
    expected: Sums,
    tensors: Sequence[LogicalTensor],
    schedule: Schedule,
    given: Fragments,
    transport: Transport,
    timeout_s: float,
) -> None:
    """Add to both the sums of what this rank kept in a pass, and of what it ``gave`` or got.

    Between two ranks go those of the tensors that went between them, in the window of their first
    message: so this can no more deadlock than messages can, nor take more operations at a time.
    """
    rank, device = transport.rank, transport.device
    kept = schedule.retained.take(schedule.retained.dst == rank)
    in_place = hash_pieces(tensors, _pieces(kept, given))
    gave += in_place
    expected += in_place
    exchanges: list[tuple[list[Message], list[Message], list[IntArray]]] = []
    for window in schedule.pairs_of(rank):
        sends: list[Message] = []
        receives: list[Message] = []
        rows: list[IntArray] = []
        for pieces in map(schedule.pieces.take, window):
            own = np.unique(pieces.tensor)
            src, dst = int(pieces.src[0]), int(pieces.dst[0])
            if src == rank:
                sums = hash_pieces(tensors, _pieces(pieces, given))
                gave += sums
                sends.append((dst, _as_numbers(sums[own]).to(device)))
            else:
                room = torch.empty((len(own), expected.shape[1]), dtype=torch.int64, device=device)
                receives.append((src, room))
                rows.append(own)
        exchanges.append((sends, receives, rows))
    for sends, receives, rows in exchanges:  # all is hashed before anyone waits for it
        transport.exchange(sends, receives, timeout_s=timeout_s)
        for own, (_, told) in zip(rows, receives, strict=True):
            expected[own] += _as_sums(told)


def _sum_over_ranks(own: Sums, transport: Transport, timeout_s: float) -> Sums:
    """What the sums of all ranks add up to, on all of them; collective.

    Up a tree, and down again the same way: a rank has about log2(N) peers at the most::

        0 <- 1    2 <- 3    4        0 <------ 2    4        0 <---------------- 4
    """
    rank, size = transport.rank, transport.size
    total = _as_numbers(own).to(transport.device)
    step, children = 1, []
    while step < size and not rank & step:
        if rank + step < size:
            children.append(rank + step)
            part = torch.empty_like(total)
            transport.exchange([], [(rank + step, part)], timeout_s=timeout_s)
            total = total + part  # wraps, as it should
        step *= 2
    if rank:
        transport.exchange([(rank - step, total)], [], timeout_s=timeout_s)
        total = torch.empty_like(total)
        transport.exchange([], [(rank - step, total)], timeout_s=timeout_s)
    for child in reversed(children):
        transport.exchange([(child, total)], [], timeout_s=timeout_s)
    return _as_sums(total)


def _pieces(routes: Routes, fragments: Fragments) -> Iterator[Piece]:
    """What these pieces take from their sender's fragments."""
    for i in range(len(routes)):
        start, stop = routes.start[i], routes.stop[i]
        views = fragments.piece(int(routes.src_slot[i]), start, stop)
        yield Piece(int(routes.tensor[i]), tuple(int(x) for x in start), views)


def _as_numbers(sums: Sums) -> torch.Tensor:
    """Sums as a transport carries them; torch adds up no unsigned numbers."""
    return torch.from_numpy(sums.view(np.int64))


def _as_sums(numbers: torch.Tensor) -> Sums:
    return numbers.cpu().numpy().view(np.uint64)


def _num_states(tensors: Sequence[LogicalTensor]) -> int:
    return max((len(t.states) for t in tensors), default=0)


def _hash_view(tensor: LogicalTensor, state: int, start: Sequence[int], view: torch.Tensor) -> int:
    """H of one region: ``view`` has the region's shape, ``start`` is where it begins."""
    seed = hashlib.sha256(label(tensor, state).encode()).digest()
    if not view.dim():
        view, start = view.reshape(1), (0,)
    weights = [
        _weights(seed, dim, start[dim], start[dim] + n).to(view.device)
        for dim, n in enumerate(view.shape)
    ]
    if view.element_size() == 8:  # the halves of 64-bit data are hashed apart
        halves = view.contiguous().view(torch.int32).reshape(*view.shape, 2)
        low_high = _weights(seed, len(weights), 0, 2).to(view.device)
        return _weighted_sum(halves, [*weights, low_high])
    if view.dtype == torch.bool:
        view = view.to(torch.uint8)
    return _weighted_sum(view.view(_BITS[view.element_size()]), weights)


def _weighted_sum(bits: torch.Tensor, weights: list[torch.Tensor]) -> int:
    """Sum of bits times the product of its dims' weights; widened chunk by chunk."""
    columns = weights[-1]
    rows = torch.ones(1, dtype=torch.int64, device=bits.device)
    for weight in weights[:-1]:
        rows = (rows[:, None] * weight[None, :]).reshape(-1)
    most = _CHUNK_ELEMENTS if bits.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    step = max(1, most // max(1, columns.numel()))
    table = bits.reshape(-1, columns.numel())
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, table.shape[0], step):
        wide = table[first : first + step].to(torch.int64)
        inner = torch.mv(wide, columns) if wide.device.type == "cpu" else (wide * columns).sum(1)
        total += (inner * rows[first : first + step]).sum()  # wraps, as it should
    return int(total) & _MASK


@functools.lru_cache(maxsize=256)  # layers share shapes, and a state's kinds share dims
def _weights(seed: bytes, dim: int, start: int, stop: int) -> torch.Tensor:
    """Odd 64-bit weights of positions [start, stop) in one dim: splitmix64 of a counter."""
    base = np.uint64((int.from_bytes(seed[:8], "little") + dim * 0x632BE59BD9B4E019) & _MASK)
    with np.errstate(over="ignore"):
        z = base + np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))
