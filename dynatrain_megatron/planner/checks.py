"""Proofs about routes, each computed another way than the routes themselves."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner.routes import Routes, unique_cover
from dynatrain_megatron.vps.region import Region
from dynatrain_megatron.vps.roster import IntArray, RosterSet


def check_coverage(routes: Routes, source: RosterSet, target: RosterSet) -> None:
    """Every element of every target fragment is written exactly once, by a rank that holds it.

    Raises :class:`TransitionError` naming the tensor, region and ranks of the first piece that
    breaks the law.
    """
    source_row = {key: i for i, key in enumerate(zip(source.rank, source.slot, strict=True))}
    target_row = {key: i for i, key in enumerate(zip(target.rank, target.slot, strict=True))}
    by_fragment: dict[int, list[int]] = defaultdict(list)
    for i in range(len(routes)):
        giver = source_row[routes.src[i], routes.src_slot[i]]
        taker = target_row[routes.dst[i], routes.dst_slot[i]]
        for side, rosters, row in (("source", source, giver), ("target", target, taker)):
            inside = (
                rosters.tensor[row] == routes.tensor[i]
                and (rosters.start[row] <= routes.start[i]).all()
                and (rosters.stop[row] >= routes.stop[i]).all()
            )
            if not inside:
                raise TransitionError(f"{_piece(routes, target, i)} is outside its {side} fragment")
        by_fragment[taker].append(i)
    numel = routes.numel
    for row in range(len(target.rank)):
        pieces = np.array(by_fragment.get(row, []), dtype=np.int64)
        low = np.maximum(routes.start[pieces][:, None], routes.start[pieces][None])
        high = np.minimum(routes.stop[pieces][:, None], routes.stop[pieces][None])
        twice = np.argwhere(np.triu((low < high).all(axis=2), k=1))
        if len(twice):
            a, b = pieces[twice[0]]
            raise TransitionError(
                f"{_piece(routes, target, int(a))} and {_piece(routes, target, int(b))} overlap"
            )
        if int(numel[pieces].sum()) != int(target.numel[row]):
            raise TransitionError(
                f"{target.tensors[int(target.tensor[row])].name!r}: slot {int(target.slot[row])} "
                f"of rank {int(target.rank[row])} gets {int(numel[pieces].sum())} of "
                f"{int(target.numel[row])} elements"
            )


def lower_bound_bytes(source: RosterSet, target: RosterSet) -> int:
    """Bytes that must move for this placement: the sum over target fragments of need minus own."""
    own: dict[tuple[int, int], list[Region]] = defaultdict(list)
    for row in range(len(source.rank)):
        key = (int(source.rank[row]), int(source.tensor[row]))
        new = [_region(source, row)]
        for known in own[key]:  # a rank may hold a region twice: count it once
            new = [r for part in new for r in part.subtract(known)]
        own[key] += new
    total = 0
    for row in range(len(target.rank)):
        need = _region(target, row)
        held = own.get((int(target.rank[row]), int(target.tensor[row])), [])
        kept = sum(common.numel for h in held if (common := need.intersect(h)) is not None)
        total += (need.numel - kept) * target.tensors[int(target.tensor[row])].element_bytes
    return total


def check_nothing_lost(source: RosterSet, target: RosterSet) -> None:
    """What the source holds of each logical tensor, the target holds too, no more and no less.

    A target in which a layer is missing would be covered all the same. Raises
    :class:`TransitionError` naming the tensors and how many elements each side has.
    """
    held = [_elements(rosters) for rosters in (source, target)]
    odd = np.nonzero(held[0] != held[1])[0]
    if len(odd):
        raise TransitionError(
            "the target layout does not hold the same state: "
            + "; ".join(
                f"{source.tensors[i].name!r} has {held[0][i]} elements now and {held[1][i]} there"
                for i in odd[:5]
            )
        )


def _elements(rosters: RosterSet) -> IntArray:
    """Different elements held of each logical tensor, [len(tensors)]."""
    cover = unique_cover(rosters)
    counts = np.zeros(len(rosters.tensors), dtype=np.int64)
    np.add.at(counts, cover.tensor, cover.numel)
    return counts


def _region(rosters: RosterSet, row: int) -> Region:
    return Region(
        tuple(int(x) for x in rosters.start[row]), tuple(int(x) for x in rosters.stop[row])
    )


def _piece(routes: Routes, target: RosterSet, i: int) -> str:
    tensor = target.tensors[int(routes.tensor[i])]
    ndim = len(tensor.shape)
    return (
        f"{tensor.name!r} [{routes.start[i, :ndim].tolist()}, {routes.stop[i, :ndim].tolist()}) "
        f"from rank {int(routes.src[i])} to rank {int(routes.dst[i])}"
    )
