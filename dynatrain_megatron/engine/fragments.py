"""Fragments bound to memory: a roster, and for each of its rows the tensors that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dynatrain_megatron.vps.boxes import IntArray
from dynatrain_megatron.vps.region import Region
from dynatrain_megatron.vps.roster import Roster, RosterBuilder
from dynatrain_megatron.vps.tensors import LogicalTensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Fragments:
    """One rank's state: ``views[slot][k]`` is state k of the fragment in that roster row.

    Each view has exactly the shape of its region; it may be strided, and writing to it writes to
    the model or optimizer.
    """

    roster: Roster
    views: tuple[tuple[torch.Tensor, ...], ...]

    def piece(self, slot: int, start: IntArray, stop: IntArray) -> tuple[torch.Tensor, ...]:
        """Views of the sub-region ``[start, stop)`` (logical coordinates), one for each state.

        ``start`` and ``stop`` may be padded to more dims than this rank's own roster has.
        """
        dims = self.views[slot][0].dim()
        origin = self.roster.start[slot]
        cut = tuple(slice(int(start[d] - origin[d]), int(stop[d] - origin[d])) for d in range(dims))
        return tuple(view[cut] for view in self.views[slot])

    def part(self, slots: IntArray) -> Fragments:
        """The fragments in these slots alone, in that order."""
        return Fragments(self.roster.part(slots), tuple(self.views[i] for i in slots.tolist()))


class FragmentsBuilder:
    """Collects bound fragments in slot order."""

    def __init__(self) -> None:
        self._roster = RosterBuilder()
        self._views: list[tuple[torch.Tensor, ...]] = []

    def add(self, tensor: LogicalTensor, region: Region, views: Sequence[torch.Tensor]) -> None:
        """Append one fragment; ``views`` has one tensor of the region's shape for each state.

        Raises ``ValueError`` where a view's shape or dtype is not what was declared.
        """
        for view, state in zip(views, tensor.states, strict=True):
            dtype = dtype_name(view.dtype)
            if tuple(view.shape) != region.shape or dtype != state.dtype:
                raise ValueError(
                    f"{tensor.name!r} {state.kind}: expected {region.shape} {state.dtype}, "
                    f"got {tuple(view.shape)} {dtype}"
                )
        self._roster.add(tensor, region)
        self._views.append(tuple(view.detach() for view in views))

    def build(self) -> Fragments:
        return Fragments(self._roster.build(), tuple(self._views))


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a :class:`State` and ``ITEM_BYTES`` have for it."""
    return str(dtype).removeprefix("torch.")
