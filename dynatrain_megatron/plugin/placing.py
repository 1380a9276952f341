"""Which process takes which rank of a switch that is to be announced: the most bytes stay in place.

Worlds are built from that order, long before any of the target's objects exists. So what ranks hold
is taken from the model's shape and the layouts alone (:mod:`dynatrain_megatron.shapes`), once that
has been held against what this rank really holds. Where it differs, every process keeps its rank:
a placement decides how much moves, never what.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynatrain_megatron.adapters.job import Job
from dynatrain_megatron.ahead.flags import model_of_job
from dynatrain_megatron.errors import ConfigError, TransitionError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe import progress
from dynatrain_megatron.planner import PlacementOptions, Topology, TopologyFile, place
from dynatrain_megatron.shapes import Model, make_rosters
from dynatrain_megatron.vps import RosterSet
from dynatrain_megatron.vps.boxes import IntArray, volumes


@dataclass(frozen=True, slots=True)
class Placed:
    """The uids of a target by rank, and what that saves: ``told`` is a switch's ``placement``."""

    target: tuple[str, ...]
    told: dict[str, Any] | None = None


class Placing:
    """Finds placements; for rank 0 of the job, main thread, local."""

    def __init__(self, job: Job, launched: Namespace, topology: TopologyFile | None) -> None:
        """``launched`` are the arguments as validated at launch."""
        self._job = job
        self._launched = launched
        self._topology = topology
        self._overlap = bool(launched.overlap_grad_reduce)
        self._model: Model | None = None
        self._is_known: bool | None = None

    def order(self, target: Sequence[str], layout: ParallelLayout) -> Placed:
        """The processes of ``target``, by the rank that each is to take in ``layout``.

        Those of a layout that is come back to take the ranks they had: its groups are still there.
        Who is in the job and not in ``target`` leaves, and the others of its node stay on theirs.
        """
        for built in self._job.dormant:
            key = built.key
            if key.layout == layout and set(key.processes) == set(target):
                return Placed(key.processes)
        if layout.pipeline is not None or self._job.layout.pipeline is not None:
            return Placed(tuple(target))
        if self._is_known is None:
            self._is_known = self._knows_own_rank()
        if not self._is_known or self._model is None:
            return Placed(tuple(target))
        begin = time.perf_counter()
        source = self._job.processes
        processes = [*target, *(uid for uid in source if uid not in set(target))]
        rosters = self._rosters(self._model, source, processes, layout)
        leavers = tuple(range(len(target), len(processes)))
        try:
            found = place(*rosters, self._nodes(processes), PlacementOptions(pinned=leavers))
        except (ConfigError, TransitionError) as error:
            progress(0, f"no placement: {error}; every process keeps its rank")
            return Placed(tuple(target))
        told = {
            "bytes": {"best": found.moved_bytes, "identity": found.identity_bytes},
            "seconds": {"best": found.seconds, "identity": found.identity_seconds},
        }
        moved = sum(rank != process for rank, process in enumerate(found.process_of_rank))
        progress(
            0,
            f"placement: {found.moved_bytes} bytes to move instead of {found.identity_bytes}, "
            f"{moved} processes take other ranks (found in {time.perf_counter() - begin:.3f} s)",
        )
        return Placed(tuple(processes[p] for p in found.process_of_rank[: len(target)]), told)

    def _rosters(
        self,
        model: Model,
        source: Sequence[str],
        processes: Sequence[str],
        layout: ParallelLayout,
    ) -> tuple[RosterSet, RosterSet]:
        """The job's by process, those of ``layout`` by rank; others hold or want nothing."""
        place_of = {uid: place for place, uid in enumerate(processes)}
        others = [uid for uid in processes if uid not in set(source)]
        held, wanted = (
            make_rosters(model, side, overlap=self._overlap, num_ranks=len(processes))
            for side in (self._job.layout, layout)
        )
        return held.permuted([place_of[uid] for uid in (*source, *others)]), wanted

    def _nodes(self, processes: Sequence[str]) -> Topology:
        """Nodes by process, as the bridge of the switch will see them."""
        bridge = self._job.bridge
        if bridge is not None and set(bridge.processes) == set(processes):
            order = bridge.processes
        else:
            source = self._job.processes
            order = (*source, *(uid for uid in processes if uid not in set(source)))
        hosts = [uid.rsplit(":", 2)[0] for uid in order]
        found = Topology.from_hosts(hosts)
        if self._topology is not None:
            found = self._topology.over(found, hosts)
        return replace(found, node=tuple(found.node[order.index(uid)] for uid in processes))

    def _knows_own_rank(self) -> bool:
        """Whether the model's shape says of this rank what it really holds."""
        job, problem = self._job, ""
        assert job.built is not None
        try:
            self._model = model_of_job(self._launched)
            said = make_rosters(self._model, job.layout, overlap=self._overlap)
            rows, own = said.rows, said.rows_of(job.args.rank)
            number, start, stop = rows.tensor[own], rows.start[own], rows.stop[own]
            made = _held([said.tensors[n].name for n in number.tolist()], volumes(start, stop))
        except (ConfigError, ValueError) as error:
            problem = str(error)
        else:
            roster = job.built.fragments().roster
            names = [roster.tensors[n].name for n in roster.tensor.tolist()]
            if made != _held(names, volumes(roster.start, roster.stop)):
                problem = "this job's parameters are not those that its flags stand for"
        if problem:
            progress(0, f"no placement: {problem}; every process keeps its rank")
        return not problem


def _held(names: Sequence[str], numel: IntArray) -> dict[str, int]:
    """Elements by logical tensor."""
    found: dict[str, int] = {}
    for name, count in zip(names, numel.tolist(), strict=True):
        found[name] = found.get(name, 0) + count
    return found
