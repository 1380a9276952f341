"""Rosters: all fragments of one rank as columns, and the rosters of all ranks together.

Columns are NumPy arrays, so that a roster is cheap to exchange and to intersect::

    row  tensor  start        stop          the row number is the *slot*: where the rank
    0    0       (0, 0, 0)    (1, 64, 64)   stores the fragment is known to that rank alone
    1    0       (1, 0, 0)    (2, 64, 64)
    2    3       (0, 17, 1)   (40, 18, 1)   tensors of fewer dims are padded with [0, 1)
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dynatrain_megatron.vps.boxes import BoolArray, IntArray, ranges, volumes
from dynatrain_megatron.vps.region import Region
from dynatrain_megatron.vps.tensors import LogicalTensor, State, StateKind

_HEADER_BYTES = 16  # two int64 before the payload: length of the JSON part, number of rows


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """All fragments of one rank in one layout (its sub-VPS).

    ``tensor`` [n] indexes ``tensors``; ``start`` and ``stop`` [n, D] are regions in the logical
    tensors' coordinates, D = the most dims of any of them, padded with [0, 1).
    """

    tensors: tuple[LogicalTensor, ...]
    tensor: IntArray
    start: IntArray
    stop: IntArray

    def __len__(self) -> int:
        return len(self.tensor)

    def part(self, slots: IntArray) -> Roster:
        """The fragments in these slots alone, in that order; over the same logical tensors."""
        return Roster(self.tensors, self.tensor[slots], self.start[slots], self.stop[slots])

    def to_bytes(self) -> bytes:
        """A self-contained, pickle-free form; equal rosters give equal bytes."""
        head = json.dumps(
            [[t.name, list(t.shape), [[s.kind, s.dtype] for s in t.states]] for t in self.tensors],
            separators=(",", ":"),
        ).encode()
        sizes = np.array([len(head), len(self)], dtype="<i8").tobytes()
        columns = (self.tensor[:, None], self.start, self.stop)
        body = np.concatenate(columns, axis=1).astype("<i8").tobytes()
        return sizes + head + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Roster:
        """The inverse of :meth:`to_bytes`; raises ``ValueError`` on anything else."""
        if len(data) < _HEADER_BYTES:
            raise ValueError(f"a roster has at least {_HEADER_BYTES} bytes, got {len(data)}")
        head_bytes, rows = (int(x) for x in np.frombuffer(data[:_HEADER_BYTES], dtype="<i8"))
        try:
            tensors = tuple(
                LogicalTensor(
                    name,
                    tuple(shape),
                    tuple(State(StateKind(kind), dtype) for kind, dtype in states),
                )
                for name, shape, states in json.loads(
                    data[_HEADER_BYTES : _HEADER_BYTES + head_bytes]
                )
            )
        except TypeError as error:
            raise ValueError("the JSON part is no list of logical tensors") from error
        body = np.frombuffer(data[_HEADER_BYTES + head_bytes :], dtype="<i8").astype(np.int64)
        dims = max((len(t.shape) for t in tensors), default=0)
        if body.size != rows * (1 + 2 * dims):
            raise ValueError(f"roster of {rows} rows and {dims} dims has {body.size} numbers")
        table = body.reshape(rows, 1 + 2 * dims)
        return cls(tensors, table[:, 0].copy(), table[:, 1 : 1 + dims], table[:, 1 + dims :])


class RosterBuilder:
    """Collects fragments in slot order and makes a :class:`Roster` of them."""

    def __init__(self) -> None:
        self._tensors: dict[str, LogicalTensor] = {}
        self._rows: list[tuple[str, Region]] = []

    def add(self, tensor: LogicalTensor, region: Region) -> int:
        """Append a fragment; returns its slot.

        Raises ``ValueError`` where the region is not inside the tensor or the name was used with
        another shape or other states.
        """
        known = self._tensors.setdefault(tensor.name, tensor)
        if known != tensor:
            raise ValueError(f"logical tensor {tensor.name!r} described twice: {known}, {tensor}")
        if region.ndim != len(tensor.shape) or not Region.whole(tensor.shape).contains(region):
            raise ValueError(f"{region} is not inside {tensor.name!r} of shape {tensor.shape}")
        self._rows.append((tensor.name, region))
        return len(self._rows) - 1

    def build(self) -> Roster:
        tensors = tuple(self._tensors[name] for name in sorted(self._tensors))
        index = {tensor.name: i for i, tensor in enumerate(tensors)}
        dims = max((len(t.shape) for t in tensors), default=0)
        rows = len(self._rows)
        start = np.zeros((rows, dims), dtype=np.int64)
        stop = np.ones((rows, dims), dtype=np.int64)
        for slot, (_, region) in enumerate(self._rows):
            start[slot, : region.ndim] = region.start
            stop[slot, : region.ndim] = region.stop
        tensor = np.array([index[name] for name, _ in self._rows], dtype=np.int64)
        return Roster(tensors, tensor, start, stop)


@dataclass(frozen=True, slots=True, eq=False)
class KindRows:
    """Fragments of distinct rosters, in order of kind and slot.

    ``kind``, ``slot``, ``tensor`` [n], ``start``, ``stop`` [n, D]; the slots of a kind are 0, 1, ….
    """

    kind: IntArray
    slot: IntArray
    tensor: IntArray
    start: IntArray
    stop: IntArray

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, eq=False)
class RosterSet:
    """The rosters of all ranks of one layout, over one common list of logical tensors.

    Ranks whose rosters are equal, replicas of each other, are of one *kind*, and what they hold is
    kept once: ``rows`` are those of the kinds, ``kind_of_rank`` [num_ranks] says which rank is of
    which.
    """

    tensors: tuple[LogicalTensor, ...]
    kind_of_rank: IntArray
    rows: KindRows

    @classmethod
    def merge(
        cls, rosters: Sequence[Roster], tensors: Sequence[LogicalTensor] | None = None
    ) -> RosterSet:
        """All rosters together, rank = position in ``rosters``.

        ``tensors`` fixes the common list (sorted by name), so that two roster sets of one plan
        index alike; by default it is the union. Raises ``ValueError`` where ranks describe a
        logical tensor differently.
        """
        if tensors is None:
            tensors = union_of_tensors(rosters)
        index = {t.name: i for i, t in enumerate(tensors)}
        dims = max((len(t.shape) for t in tensors), default=0)
        kind_of_rank: list[int] = []
        kinds: dict[bytes, int] = {}  # by content
        known: dict[int, int] = {}  # by identity, which spares most of the work
        tables: list[IntArray] = []
        for rank, roster in enumerate(rosters):
            if id(roster) not in known:
                table = _common_table(roster, rank, tensors, index, dims)
                known[id(roster)] = kinds.setdefault(table.tobytes(), len(kinds))
                if len(kinds) > len(tables):
                    tables.append(table)
            kind_of_rank.append(known[id(roster)])
        sizes = np.array([len(table) for table in tables], dtype=np.int64)
        whole = np.concatenate(tables) if tables else np.zeros((0, 1 + 2 * dims), dtype=np.int64)
        slot, kind = ranges(np.zeros(len(sizes), dtype=np.int64), sizes)
        rows = KindRows(kind, slot, whole[:, 0], whole[:, 1 : 1 + dims], whole[:, 1 + dims :])
        return cls(tuple(tensors), np.array(kind_of_rank, dtype=np.int64), rows)

    @property
    def num_ranks(self) -> int:
        return len(self.kind_of_rank)

    @property
    def num_kinds(self) -> int:
        """How many distinct rosters there are."""
        return int(self.kind_of_rank.max(initial=-1)) + 1

    @cached_property
    def rows_of_kind(self) -> IntArray:
        """Where in ``rows`` those of each kind begin, and the end, [num_kinds + 1]."""
        return np.searchsorted(self.rows.kind, np.arange(self.num_kinds + 1))

    @property
    def num_rows(self) -> IntArray:
        """Fragments of each rank, [num_ranks]."""
        return np.diff(self.rows_of_kind)[self.kind_of_rank]

    @property
    def element_bytes(self) -> IntArray:
        """Bytes of one element (all states) of each logical tensor, [len(tensors)]."""
        return np.array([t.element_bytes for t in self.tensors], dtype=np.int64)

    @cached_property
    def row_bytes(self) -> IntArray:
        """Bytes (all states) of each of ``rows``."""
        return volumes(self.rows.start, self.rows.stop) * self.element_bytes[self.rows.tensor]

    def rows_of(self, rank: int) -> slice:
        """Where in ``rows`` the fragments of one rank are."""
        kind = int(self.kind_of_rank[rank])
        return slice(int(self.rows_of_kind[kind]), int(self.rows_of_kind[kind + 1]))

    def permuted(self, process_of_rank: Sequence[int] | IntArray) -> RosterSet:
        """The same by process: process ``process_of_rank[r]`` has the roster of rank r.

        For plans between processes whose ranks change; rows are shared. Raises ``ValueError`` where
        that is no permutation of all ranks.
        """
        order = np.array(process_of_rank, dtype=np.int64)
        if not np.array_equal(np.sort(order), np.arange(self.num_ranks)):
            raise ValueError(
                f"process_of_rank must name each of {self.num_ranks} processes once, got "
                f"{order.tolist()}"
            )
        kind_of_process = np.empty_like(self.kind_of_rank)
        kind_of_process[order] = self.kind_of_rank
        return RosterSet(self.tensors, kind_of_process, self.rows)

    def part(self, chosen: BoolArray, tensors: IntArray) -> RosterSet:
        """The fragments in the ``chosen`` rows alone; slots count anew, in the same order.

        ``tensors`` numbers, ascending, the logical tensors that the part is over, which must be
        those of the chosen rows or more.
        """
        rows = self.rows
        before = np.cumsum(chosen) - chosen  # chosen rows of all kinds before each
        first = np.append(before, chosen.sum())[self.rows_of_kind[:-1]]
        kind = rows.kind[chosen]
        return RosterSet(
            tuple(self.tensors[number] for number in tensors.tolist()),
            self.kind_of_rank,
            KindRows(
                kind,
                before[chosen] - first[kind],
                np.searchsorted(tensors, rows.tensor[chosen]),
                rows.start[chosen],
                rows.stop[chosen],
            ),
        )

    def digest(self) -> str:
        """Hex digest of everything in it, equal where equal; worked out once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        columns = (self.rows.tensor[:, None], self.rows.start, self.rows.stop)
        table = np.ascontiguousarray(np.concatenate(columns, axis=1), dtype="<i8")
        kinds = [
            hashlib.sha256(table[a:b].tobytes()).digest()
            for a, b in itertools.pairwise(self.rows_of_kind.tolist())
        ]
        state = hashlib.sha256(repr((self.tensors, self.num_ranks)).encode())
        for kind in self.kind_of_rank.tolist():
            state.update(kinds[kind])
        return state.hexdigest()


def _common_table(
    roster: Roster,
    rank: int,
    tensors: Sequence[LogicalTensor],
    index: dict[str, int],
    dims: int,
) -> IntArray:
    """Tensor, start and stop of each fragment in the common list's terms, [n, 1 + 2 · dims]."""
    for t in roster.tensors:
        if t.name not in index or tensors[index[t.name]] != t:
            raise ValueError(f"logical tensor {t.name!r} of rank {rank} is not the common one")
    n, d = roster.start.shape
    table = np.zeros((n, 1 + 2 * dims), dtype=np.int64)
    if n:
        table[:, 0] = np.array([index[t.name] for t in roster.tensors])[roster.tensor]
    table[:, 1 : 1 + d] = roster.start
    table[:, 1 + dims :] = 1
    table[:, 1 + dims : 1 + dims + d] = roster.stop
    return table


def union_of_tensors(rosters: Sequence[Roster]) -> tuple[LogicalTensor, ...]:
    """Every logical tensor of ``rosters``, sorted by name.

    Raises ``ValueError`` naming the tensor and both descriptions where two rosters disagree.
    """
    known: dict[str, LogicalTensor] = {}
    for roster in rosters:
        for tensor in roster.tensors:
            if known.setdefault(tensor.name, tensor) != tensor:
                raise ValueError(
                    f"logical tensor {tensor.name!r} differs between ranks or layouts: "
                    f"{known[tensor.name]} and {tensor}"
                )
    return tuple(known[name] for name in sorted(known))
