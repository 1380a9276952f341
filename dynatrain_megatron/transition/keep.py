"""Whether the old state is kept until a switch is done: one decision, the same on all ranks."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.config import KeepSource
from dynatrain_megatron.engine import Transport
from dynatrain_megatron.engine.holdings import Holdings
from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.planner.stages import (
    Room,
    SideMemory,
    Stages,
    choose_stages,
    one_stage,
    planned_peak,
)
from dynatrain_megatron.platform import current as current_platform
from dynatrain_megatron.vps.boxes import IntArray
from dynatrain_megatron.vps.roster import RosterSet

_SLACK_SHARE = 0.05  # of what a plan says, for what it does not count
_SLACK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that a rank could have had before the switch began; ranks of one ``pool`` share it."""

    pool: str
    nbytes: int

    @classmethod
    def now(cls) -> Free:
        platform = current_platform()
        return cls(f"{socket.gethostname()} {platform.memory_pool}", platform.free_bytes())


def decide(
    wanted: KeepSource,
    rosters: tuple[RosterSet, RosterSet],
    old: Holdings,
    new: Holdings,
    free: Free,
    bridge: Transport,
    *,
    staging_bytes: int,
    timeout_s: float,
) -> tuple[KeepSource, Stages]:
    """``always`` or ``never``, and the stages that go with it; collective.

    Raises :class:`SwitchRefused` on all ranks where ``auto`` finds memory for neither.
    """
    at_once = one_stage(*rosters)
    if wanted is KeepSource.always:
        return wanted, at_once
    source = _memory(old, at_once.source[rosters[0].rows_of(bridge.rank)], last=True)
    target = _memory(new, at_once.target[rosters[1].rows_of(bridge.rank)], last=False)
    staging = min(staging_bytes, int(source.moved.sum() + target.moved.sum()))
    kept = planned_peak(source, target, np.array([staging]), frees=False)
    room = _room(rosters, source, target, bridge.rank, staging)
    row = json.dumps([free.pool, free.nbytes, kept.extra, *room]).encode()
    rows = [json.loads(row) for row in bridge.all_gather(row, timeout_s=timeout_s)]
    pools, frees = [row[0] for row in rows], [row[1] for row in rows]
    if wanted is KeepSource.auto and not _short(pools, frees, [row[2] for row in rows]):
        return KeepSource.always, at_once
    first, later = (np.array([row[i] for row in rows], dtype=np.int64) for i in (3, 4))
    stages = choose_stages(*rosters, Room(first, later))
    if wanted is KeepSource.auto:
        own = planned_peak(
            _memory(old, stages.source[rosters[0].rows_of(bridge.rank)], last=True),
            _memory(new, stages.target[rosters[1].rows_of(bridge.rank)], last=False),
            np.full(stages.count, staging),
            frees=True,
        )
        needs = bridge.all_gather(str(own.extra).encode(), timeout_s=timeout_s)
        short = _short(pools, frees, [int(need) for need in needs])
        if short:
            raise SwitchRefused(
                f"engine.keep_source=auto: {short}, even if the old state is freed stage by stage",
                "free memory, or lower engine.staging_mib",
            )
    return KeepSource.never, stages


def _memory(holdings: Holdings, stage_of_slot: IntArray, *, last: bool) -> SideMemory:
    return holdings.memory(holdings.stages(stage_of_slot, last=last))


def _room(
    rosters: tuple[RosterSet, RosterSet],
    source: SideMemory,
    target: SideMemory,
    rank: int,
    staging: int,
) -> tuple[int, int]:
    """What a rank can take, in the first stage and later, without its peak growing for it.

    The peak is never less than growth, which is what a rank has to have in the end.
    """
    base = target.other - source.gradients
    least = max(0, base + target.largest, target.nbytes - source.nbytes)
    held, wanted = (int(side.row_bytes[side.rows_of(rank)].sum()) for side in rosters)
    first = least - base - staging - (max(held, wanted) - held)
    return first, first + source.rebuilt


def _short(pools: Sequence[str], free: Sequence[int], extra: Sequence[int]) -> str:
    """Which pool has too little for what its ranks take beyond what they have; empty if none."""
    needs: dict[str, int] = defaultdict(int)
    has: dict[str, int] = {}
    for pool, nbytes, more in zip(pools, free, extra, strict=True):
        needs[pool] += int(more * (1 + _SLACK_SHARE)) + _SLACK_BYTES
        has[pool] = min(nbytes, has.get(pool, nbytes))
    for pool, need in needs.items():
        if need > has[pool]:
            ranks = [rank for rank, its in enumerate(pools) if its == pool]
            return (
                f"ranks {ranks} take {need >> 20} MiB more for a while and {pool} has "
                f"{has[pool] >> 20} MiB free"
            )
    return ""
