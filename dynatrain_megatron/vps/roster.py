"""Rosters: all fragments of one rank as columns, and the rosters of all ranks together.

Columns are NumPy arrays, so that a roster is cheap to exchange and to intersect::

    row  tensor  start        stop          the row number is the *slot*: where the rank
    0    0       (0, 0, 0)    (1, 64, 64)   stores the fragment is known to that rank alone
    1    0       (1, 0, 0)    (2, 64, 64)
    2    3       (0, 17, 1)   (40, 18, 1)   tensors of fewer dims are padded with [0, 1)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynatrain_megatron.vps.region import Region
from dynatrain_megatron.vps.tensors import LogicalTensor, State, StateKind

IntArray = NDArray[np.int64]

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

    def region(self, slot: int) -> Region:
        """The region of one fragment, with the dims of its logical tensor."""
        ndim = len(self.tensors[int(self.tensor[slot])].shape)
        return Region(
            tuple(int(x) for x in self.start[slot, :ndim]),
            tuple(int(x) for x in self.stop[slot, :ndim]),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the state the fragments hold."""
        element_bytes = np.array([t.element_bytes for t in self.tensors], dtype=np.int64)
        if not len(self):
            return 0
        return int((element_bytes[self.tensor] * (self.stop - self.start).prod(axis=1)).sum())

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
class RosterSet:
    """The rosters of all ranks of one layout, over one common list of logical tensors.

    ``rank``, ``slot``, ``tensor`` [n] and ``start``, ``stop`` [n, D], in order of rank and slot.
    """

    tensors: tuple[LogicalTensor, ...]
    num_ranks: int
    rank: IntArray
    slot: IntArray
    tensor: IntArray
    start: IntArray
    stop: IntArray

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
        rank, slot, tensor, start, stop = [], [], [], [], []
        for r, roster in enumerate(rosters):
            for t in roster.tensors:
                if t.name not in index or tensors[index[t.name]] != t:
                    raise ValueError(f"logical tensor {t.name!r} of rank {r} is not the common one")
            to_common = np.array([index[t.name] for t in roster.tensors], dtype=np.int64)
            n, d = roster.start.shape
            rank.append(np.full(n, r, dtype=np.int64))
            slot.append(np.arange(n, dtype=np.int64))
            tensor.append(to_common[roster.tensor] if n else np.zeros(0, dtype=np.int64))
            start.append(np.pad(roster.start, ((0, 0), (0, dims - d))))
            stop.append(np.pad(roster.stop, ((0, 0), (0, dims - d)), constant_values=1))
        return cls(
            tuple(tensors),
            len(rosters),
            np.concatenate(rank),
            np.concatenate(slot),
            np.concatenate(tensor),
            np.concatenate(start),
            np.concatenate(stop),
        )

    @property
    def numel(self) -> IntArray:
        """Elements of each fragment, [n]."""
        return (self.stop - self.start).prod(axis=1)

    @property
    def element_bytes(self) -> IntArray:
        """Bytes of one element (all states) of each logical tensor, [len(tensors)]."""
        return np.array([t.element_bytes for t in self.tensors], dtype=np.int64)

    def digest(self) -> str:
        """Hex digest of everything in it, equal where equal."""
        state = hashlib.sha256(repr((self.tensors, self.num_ranks)).encode())
        for column in (self.rank, self.slot, self.tensor, self.start, self.stop):
            state.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return state.hexdigest()


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
