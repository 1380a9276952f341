"""What each rank takes while it switches: bf16 training with float32 gradients and Adam.

Main parameters and moments are what moves; gradients hold nothing between two steps and are given
back meanwhile; bf16 parameters are made anew. Activations are not counted: there are none then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.ahead.rebuild import PARAM_BYTES, Local
from dynatrain_megatron.observe.units import size
from dynatrain_megatron.planner.stages import (
    Room,
    SideMemory,
    Stages,
    choose_stages,
    one_stage,
    planned_peak,
)
from dynatrain_megatron.vps.boxes import IntArray
from dynatrain_megatron.vps.roster import RosterSet

GRAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank, each figure by itself.

    ``before`` and ``after`` are all state in the two layouts. ``kept`` and ``freed`` are the most
    during the switch, the state of before included: with ``engine.keep_source=always`` and with
    ``never``, in ``stages``.
    """

    before: int
    after: int
    kept: int
    freed: int
    stages: int


def too_much(memory: Memory, limit_bytes: int) -> str:
    """Why a switch does not fit into so many bytes a rank; empty where it does, in some way."""
    for nbytes, what in (
        (memory.before, "the state before the switch"),
        (memory.after, "the state after the switch"),
        (memory.freed, "the switch, even if the old state is freed stage by stage,"),
    ):
        if nbytes > limit_bytes:
            return f"{what} takes {size(nbytes)} on the fullest rank, which has {size(limit_bytes)}"
    return ""


def plan_memory(
    rosters: tuple[RosterSet, RosterSet],
    local: tuple[Local, Local] | None,
    staging_bytes: int,
) -> Memory:
    """``local`` is None where weights alone move; then nothing else is counted."""
    source, target = rosters
    at_once = one_stage(source, target)
    stages = choose_stages(source, target, Room.none(source.num_ranks))
    locals_ = (None, None) if local is None else local
    sides = _Side(source, locals_[0]), _Side(target, locals_[1])
    figures = [
        _of_rank(sides, rank, at_once, stages, staging_bytes) for rank in _distinct(rosters, local)
    ]
    before, after, kept, freed = (max(column) for column in zip(*figures, strict=True))
    return Memory(before, after, kept, freed, stages.count)


def _distinct(rosters: tuple[RosterSet, RosterSet], local: tuple[Local, Local] | None) -> list[int]:
    """One rank for each combination of what it holds, wants and rebuilds."""
    columns = [side.kind_of_rank for side in rosters]
    columns += [] if local is None else [side.numel for side in local]
    _, first = np.unique(np.stack(columns), axis=1, return_index=True)
    return [int(rank) for rank in first]


def _of_rank(
    sides: tuple[_Side, _Side], rank: int, at_once: Stages, stages: Stages, staging_bytes: int
) -> tuple[int, int, int, int]:
    """(before, after, most while the source is kept, most while it is freed) of one rank."""
    source, target = sides[0].of(rank, at_once.source), sides[1].of(rank, at_once.target)
    staging = min(staging_bytes, int(source.moved.sum() + target.moved.sum()))
    kept = planned_peak(source, target, np.array([staging]), frees=False)
    freed = planned_peak(
        sides[0].of(rank, stages.source),
        sides[1].of(rank, stages.target),
        np.full(stages.count, staging),
        frees=True,
    )
    before = source.nbytes
    return before, target.nbytes, before + kept.extra, before + freed.extra


class _Side:
    """What the storages of ranks take in one layout."""

    def __init__(self, rosters: RosterSet, local: Local | None) -> None:
        states = np.array([len(t.states) for t in rosters.tensors], dtype=np.int64)
        self._rosters, self._local = rosters, local
        self._bytes = rosters.row_bytes
        self._largest = self._bytes // states[rosters.rows.tensor]  # of one state

    def of(self, rank: int, stage_of_row: IntArray) -> SideMemory:
        """Those of one rank, its storages in the stages that their rows are in."""
        own = self._rosters.rows_of(rank)
        dense, expert = (
            (0, 0)
            if self._local is None
            else (int(self._local.dense[rank]), int(self._local.expert[rank]))
        )
        return SideMemory(
            self._bytes[own],
            stage_of_row[own],
            GRAD_BYTES * (dense + expert),
            PARAM_BYTES * (dense + expert),
            0,
            max(int(self._largest[own].max(initial=0)), GRAD_BYTES * max(dense, expert)),
        )
