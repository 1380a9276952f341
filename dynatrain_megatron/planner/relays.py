"""Relays: what several ranks of a node want comes to them once, and they pass it on.

Each of the *receivers* of a flow in a node (its wanters there that do not hold it) gets a chunk of
the stream in a first pass, and sends it to the others in a second one, from where it lies in its
target: a scatter and an all-gather, made of the same messages as everything else. Every receiver
still gets every element once; what changes is who sends it, and over which link::

    node 0     node 1                         pass 1: a chunk each      pass 2: the others' chunks
    rank 0     ranks 1, 2, 3 want it          0 -> 1  ##                1 -> 2, 3  ##
    ######     (or all of them in one         0 -> 2    ##              2 -> 1, 3    ##
               node, with a busy rank 0)      0 -> 3      ##            3 -> 1, 2      ##

Between nodes the stream crosses the link once instead of once a receiver; within one, its holders
send it once, and the receivers the other copies, which helps where every rank has a link of its
own and not where all copy through one memory (``benchmarks/promotion.py``, which also shows what
torch's collectives take: within one host gloo's broadcast is as fast as either, or faster). No
process group is needed for relays, so none has to be built, none kept for a chance to use it, and
no rank waits that has no part in it; and chunks of one receiver's many flows go in one message,
where a collective would be called for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynatrain_megatron.planner.balance import Classes, share_out
from dynatrain_megatron.planner.flows import Flows
from dynatrain_megatron.planner.shares import (
    Demands,
    Shares,
    bring,
    classes_of,
    find_demands,
    in_order,
    loads_of,
    no_shares,
    without_choice,
)
from dynatrain_megatron.planner.topology import Topology
from dynatrain_megatron.vps.boxes import BoolArray, IntArray, ranges, run_starts, scatter

_NS = 1e9
_MOST_SENDERS = 200_000  # of all teams together, whose loads are balanced in well under a second


def choose_relayed_shares(
    flows: Flows, topology: Topology, *, within_nodes: bool = True
) -> tuple[Shares, Shares]:
    """Let every wanter have its flows: (from holders, then from those who have got a chunk).

    A flow is relayed in a node where that should be faster; see :func:`_worthwhile`. Without
    ``within_nodes`` one that has a holder in the node is not.
    """
    demands = find_demands(flows, topology)
    kept = (demands.count == 1) & (flows.sources.rank[demands.first] == demands.dst)
    missing = demands.take(~kept)
    teams = _find_teams(flows, missing, topology)
    teams = teams.take(teams.far | within_nodes)
    teams = teams.take(_worthwhile(flows, missing, teams, topology))
    if not len(teams):
        return bring(flows, demands, topology), no_shares()
    relays = np.zeros(len(missing), dtype=np.bool_)
    relays[ranges(teams.row, teams.size[teams.team])[0]] = True
    others = missing.take(~relays)
    chunks = _cut(flows, missing, teams, _chunk_bytes(flows, missing, others, teams, topology))
    relayed = in_order(_passed_on(missing, teams, chunks), topology)
    brought = demands.take(kept).and_also(others).and_also(_brought(missing, teams, chunks))
    return bring(flows, brought, topology, relayed), relayed


@dataclass(frozen=True, slots=True, eq=False)
class _Teams:
    """Receivers of one node, and the flows that all of them get from the same candidates.

    A *group* is one of these flows: the demands ``row[g] … row[g] + size[team[g]] - 1`` for
    ``nbytes[g]`` bytes each. Team t may have it from the candidates ``first[t]``, ``count[t]``, in
    another node where ``far[t]``. Groups are in order of their team.
    """

    row: IntArray
    nbytes: IntArray
    team: IntArray
    size: IntArray
    first: IntArray
    count: IntArray
    far: BoolArray

    def __len__(self) -> int:
        return len(self.size)

    @property
    def total(self) -> IntArray:
        """Bytes that each receiver of each team gets, [teams]."""
        total = np.zeros(len(self), dtype=np.int64)
        np.add.at(total, self.team, self.nbytes)
        return total

    @property
    def members(self) -> tuple[IntArray, IntArray]:
        """(one of its demands, team) of every receiver of every team, in order of team."""
        first_group = np.nonzero(run_starts(self.team))[0] if len(self) else self.team
        return ranges(self.row[first_group], self.size)

    def take(self, chosen: BoolArray) -> _Teams:
        """The ``chosen`` teams."""
        group = chosen[self.team]
        return _Teams(
            self.row[group],
            self.nbytes[group],
            (np.cumsum(chosen) - 1)[self.team[group]],
            self.size[chosen],
            self.first[chosen],
            self.count[chosen],
            self.far[chosen],
        )


def _find_teams(flows: Flows, missing: Demands, topology: Topology) -> _Teams:
    """All teams of several receivers."""
    if not len(missing):
        none = np.zeros(0, dtype=np.int64)
        return _Teams(none, none, none, none, none, none, none.astype(np.bool_))
    node = np.array(topology.node, dtype=np.int64)
    row = np.nonzero(run_starts(missing.flow, node[missing.dst]))[0]
    mark = np.add.reduceat(scatter(missing.dst), row)  # equal sets of receivers have equal marks
    size = np.diff(np.append(row, len(missing)))
    row, mark, size = row[size > 1], mark[size > 1], size[size > 1]
    far = node[flows.sources.rank[missing.first[row]]] != node[missing.dst[row]]
    order = np.lexsort((mark, far, missing.count[row], missing.first[row]))
    row, mark, size, far = row[order], mark[order], size[order], far[order]
    first, count, flow = missing.first[row], missing.count[row], missing.flow[row]
    new = run_starts(first, count, far, mark) if len(row) else far
    return _Teams(
        row,
        flows.numel[flow] * flows.element_bytes[flow],
        np.cumsum(new) - 1,
        size[new],
        first[new],
        count[new],
        far[new],
    )


def _worthwhile(flows: Flows, missing: Demands, teams: _Teams, topology: Topology) -> BoolArray:
    """Which teams relay.

    Without relays, all is there when the busiest of what brings it to the receivers is done: the
    candidates' sending, the ways out of and into nodes, the receivers' own receiving. With relays,
    of k copies k - 1 come from within the node. Where everything else is fast enough they take as
    long as the receivers need for all that they get, at the speed within a node. If that is less,
    a team saves its part of the difference, and pays for sending and receiving k - 1 messages.
    """
    if not len(teams):
        return teams.far
    node, speeds = np.array(topology.node, dtype=np.int64), topology.speeds
    send, receive, way_out, way_in = _busy_ns(flows, missing, topology)
    at, owner = ranges(teams.first, teams.count)
    rank = flows.sources.rank[at]
    busiest = np.zeros(len(teams), dtype=np.int64)
    np.maximum.at(busiest, owner, np.where(teams.far[owner], way_out[node[rank]], 0))
    np.maximum.at(busiest, owner, send[rank])
    member, owner = teams.members
    dst = missing.dst[member]
    np.maximum.at(busiest, owner, receive[dst])
    np.maximum.at(busiest, owner, np.where(teams.far[owner], way_in[node[dst]], 0))
    wanted = np.zeros(len(node), dtype=np.int64)
    np.add.at(wanted, missing.dst, missing.nbytes(flows))
    need = np.zeros(len(teams), dtype=np.int64)
    np.maximum.at(need, owner, wanted[dst])
    part = (teams.size - 1) / teams.size * teams.total / np.maximum(need, 1)
    saved = (busiest - _ns(need, speeds.near_gb_s)) * part
    worth: BoolArray = saved > 2 * (teams.size - 1) * (speeds.operation_s * _NS)
    return worth


def _busy_ns(
    flows: Flows, missing: Demands, topology: Topology
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """How long ranks send and receive, and ways out of and into nodes are taken, without relays.

    Nanoseconds, [num_ranks] twice and [num_nodes] twice; nobody is balanced yet.
    """
    node, speeds = np.array(topology.node, dtype=np.int64), topology.speeds
    far = node[flows.sources.rank[missing.first]] != node[missing.dst]
    time = _ns(missing.nbytes(flows), np.where(far, speeds.far_gb_s, speeds.near_gb_s))
    receive = np.zeros(len(node), dtype=np.int64)
    np.add.at(receive, missing.dst, time)
    out, into = np.zeros((2, int(node.max()) + 1), dtype=np.int64)
    if topology.node_width is not None:
        np.add.at(into, node[missing.dst[far]], time[far])
        away = _spread(flows, missing.take(far), time[far], topology)
        np.add.at(out, node, away)
        out, into = out // topology.node_width, into // topology.node_width
    return _spread(flows, missing, time, topology), receive, out, into


def _spread(flows: Flows, demands: Demands, amount: IntArray, topology: Topology) -> IntArray:
    """What each rank has of all amounts if candidates have equal parts of them, [num_ranks]."""
    load = np.zeros(len(topology.node), dtype=np.int64)
    if not len(demands):
        return load
    order = np.lexsort((demands.count, demands.first))
    first, count = demands.first[order], demands.count[order]
    begin = np.nonzero(run_starts(first, count))[0]
    total = np.add.reduceat(amount[order], begin)
    at, owner = ranges(first[begin], count[begin])
    np.add.at(load, flows.sources.rank[at], (total // count[begin])[owner])
    return load


def _ns(nbytes: IntArray, gb_s: IntArray | float) -> IntArray:
    return np.rint(nbytes / gb_s).astype(np.int64)


# ---------------------------------------------------------------------- chunks


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Elements ``start … stop - 1`` of the flow of each ``group``.

    The ``member``-th receiver of the group's team gets them and passes them on; all of them get
    what has the member -1.
    """

    group: IntArray
    member: IntArray
    start: IntArray
    stop: IntArray


def _chunk_bytes(
    flows: Flows, missing: Demands, others: Demands, teams: _Teams, topology: Topology
) -> IntArray:
    """Bytes of the chunk of every receiver of every team, in order of team.

    Candidates send the first copy; the other k - 1 come from the receivers or, within a node, from
    any of both, so that the busiest sender has the least. Where that is too much to work out, the
    receivers' chunks are equal.
    """
    member, of_team = teams.members
    if int(teams.count.sum()) + len(of_team) > _MOST_SENDERS:
        return _with_rest(teams, (teams.total // teams.size)[of_team])
    whole, open_ = without_choice(flows, others)
    _, besides = classes_of(flows, open_, topology)
    at, team = ranges(teams.first, teams.count)
    near = ~teams.far[team]
    number = np.concatenate((2 * team, 2 * team[near] + 1, 2 * of_team + 1))
    candidate = flows.sources.rank[at]
    rank = np.concatenate((candidate, candidate[near], missing.dst[member]))
    order = np.argsort(number, kind="stable")
    near_only = np.zeros_like(teams.far)
    copies = np.stack((np.ones_like(teams.size), teams.size - 1), axis=1)
    numbers = np.arange(2 * len(teams) + 1)
    classes = Classes(
        np.append(np.searchsorted(number[order], numbers), besides.first[1:] + len(order)),
        np.concatenate((rank[order], besides.rank)),
        np.concatenate(((teams.total[:, None] * copies).reshape(-1), besides.nbytes)),
        np.concatenate((np.stack((teams.far, near_only), axis=1).reshape(-1), besides.far)),
    )
    sent = np.zeros(len(order), dtype=np.int64)
    amount = share_out(classes, *loads_of(flows, whole, topology), topology)
    sent[order] = amount[: len(order)]
    return _with_rest(teams, sent[len(number) - len(of_team) :] // (teams.size - 1)[of_team])


def _with_rest(teams: _Teams, chunk: IntArray) -> IntArray:
    """Chunks of which the last one of each team in another node has what division left."""
    _, of_team = teams.members
    rest = teams.total
    np.subtract.at(rest, of_team, chunk)
    chunk[np.cumsum(teams.size) - 1] += np.where(teams.far, rest, 0)
    return chunk


def _cut(flows: Flows, missing: Demands, teams: _Teams, nbytes: IntArray) -> _Chunks:
    """Cut the streams of each team, one after the other, into its receivers' chunks."""
    _, team = teams.members
    rest = teams.total
    np.subtract.at(rest, team, nbytes)
    # On one line of bytes: the groups, and each team's chunks followed by what is left.
    owner = np.concatenate((team, np.arange(len(teams))))
    order = np.argsort(owner, kind="stable")
    begin = np.cumsum(teams.size + 1) - (teams.size + 1)
    member = np.arange(len(owner)) - begin[owner[order]]
    member[member == teams.size[owner[order]]] = -1
    group_ends, chunk_ends = np.cumsum(teams.nbytes), np.cumsum(np.append(nbytes, rest)[order])
    cuts = np.unique(np.concatenate((group_ends, chunk_ends, [0])))
    low, high = cuts[:-1], cuts[1:]
    group = np.searchsorted(group_ends, low, side="right")
    size = flows.element_bytes[missing.flow[teams.row[group]]]
    begins = (group_ends - teams.nbytes)[group]
    start, stop = (low - begins) // size, (high - begins) // size
    some = start < stop
    chunk = np.searchsorted(chunk_ends, low, side="right")
    return _Chunks(group[some], member[chunk[some]], start[some], stop[some])


def _brought(missing: Demands, teams: _Teams, chunks: _Chunks) -> Demands:
    """Each chunk to its receiver, and what is nobody's chunk to all."""
    row = teams.row[chunks.group]
    single = chunks.member >= 0
    count = np.where(single, 1, teams.size[teams.team[chunks.group]])
    at, owner = ranges(np.where(single, row + chunks.member, row), count)
    return Demands(
        missing.flow[at],
        missing.dst[at],
        chunks.start[owner],
        chunks.stop[owner],
        missing.first[at],
        missing.count[at],
    )


def _passed_on(missing: Demands, teams: _Teams, chunks: _Chunks) -> Shares:
    """Each chunk from its receiver to the others of the team."""
    at, owner = ranges(teams.row[chunks.group], teams.size[teams.team[chunks.group]])
    by = teams.row[chunks.group[owner]] + chunks.member[owner]
    passed = (chunks.member[owner] >= 0) & (by != at)
    at, owner, by = at[passed], owner[passed], by[passed]
    return Shares(
        missing.flow[at],
        missing.dst[by],
        missing.dst[at],
        chunks.start[owner],
        chunks.stop[owner],
    )
