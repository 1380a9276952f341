"""Whether replicas are still equal: what several ranks hold must be the same bits on all of them.

A plan takes each element from one of its holders. Where they have diverged, a switch would pick one
of several truths and hide that there were others. What a switch does not move but rebuilds, such
as bf16 parameters beside main parameters, is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from dynatrain_megatron.engine.fingerprint import Piece, hash_pieces
from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.transport import Transport
from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.planner.routes import Replica, replicas
from dynatrain_megatron.vps.roster import RosterSet

_SHOWN = 3

_Set = tuple[int, tuple[int, ...]]
"""A logical tensor's number, and the ranks that all hold some region of it."""


def check_replicas(
    rosters: RosterSet, fragments: Fragments, transport: Transport, *, timeout_s: float
) -> None:
    """Compare what several ranks hold, bit for bit; collective, state is only read.

    Raises :class:`SwitchRefused` on all ranks alike, naming tensors, states and ranks that differ.
    """
    shared: dict[_Set, list[Replica]] = {}
    for replica in replicas(rosters):
        shared.setdefault((replica.tensor, tuple(sorted(replica.holders))), []).append(replica)
    own = [
        _sums(rosters, fragments, transport.rank, regions)
        for (_, ranks), regions in shared.items()
        if transport.rank in ranks
    ]
    rows = transport.all_gather(b"".join(own), timeout_s=timeout_s)
    found = [
        f"{rosters.tensors[tensor].name} {rosters.tensors[tensor].states[state].kind}: {difference}"
        for (tensor, ranks), sums in zip(shared, _by_set(rosters, shared, rows), strict=True)
        for state, difference in _differences(ranks, sums)
    ]
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise SwitchRefused(
            f"replicas have diverged: {'; '.join(found[:_SHOWN])}{more}",
            "find the cause and go on from a checkpoint; with engine.check_replicas=false a switch "
            "would keep one of them unseen",
        )


def _sums(rosters: RosterSet, fragments: Fragments, rank: int, regions: list[Replica]) -> bytes:
    """This rank's sums over regions of one tensor, a number of eight bytes for each state."""
    pieces = (
        Piece(0, tuple(int(x) for x in r.start), fragments.piece(r.holders[rank], r.start, r.stop))
        for r in regions
    )
    sums: bytes = hash_pieces([rosters.tensors[regions[0].tensor]], pieces).tobytes()
    return sums


def _by_set(
    rosters: RosterSet, shared: dict[_Set, list[Replica]], rows: list[bytes]
) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint64]]]:
    """For each set of replicas what its ranks found, [ranks, states]."""
    read = [0] * len(rows)
    for tensor, ranks in shared:
        size = 8 * len(rosters.tensors[tensor].states)
        parts = []
        for rank in ranks:
            parts.append(np.frombuffer(rows[rank][read[rank] : read[rank] + size], np.uint64))
            read[rank] += size
        yield np.stack(parts)


def _differences(
    ranks: tuple[int, ...], sums: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
) -> Iterator[tuple[int, str]]:
    """(state, which ranks differ from the most that agree) where not all are equal."""
    for state, column in enumerate(sums.T.tolist()):
        usual, _ = Counter(column).most_common(1)[0]
        odd = [rank for rank, value in zip(ranks, column, strict=True) if value != usual]
        if odd:
            others = [rank for rank in ranks if rank not in odd]
            yield state, f"rank {_listed(odd)} differs from rank {_listed(others)}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
