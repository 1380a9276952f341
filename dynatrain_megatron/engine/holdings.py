"""The storages of one layout on this rank, by what becomes of them in a switch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dynatrain_megatron.engine.fragments import Fragments
from dynatrain_megatron.engine.memory import Dropped, allocate, distinct_storages
from dynatrain_megatron.planner.stages import SideMemory
from dynatrain_megatron.vps.boxes import IntArray


class Holdings:
    """What is moved (``storages``, in which ``fragments`` lie), rebuilt, set aside, or stays.

    Storages that are ``missing`` their memory count as if they had it; those that cannot be resized
    stay: nobody can take their memory away.
    """

    def __init__(
        self,
        fragments: Fragments,
        *,
        gradients: Iterable[torch.Tensor],
        rebuilt: Iterable[torch.Tensor],
        everything: Iterable[torch.Tensor],
        missing: Dropped | None = None,
    ) -> None:
        self.fragments = fragments
        nbytes = torch.UntypedStorage.nbytes if missing is None else missing.nbytes
        views = [view for views in fragments.views for view in views]
        self.storages = _resizable(views)
        self._nbytes = [nbytes(storage) for storage in self.storages]
        number = {storage._cdata: i for i, storage in enumerate(self.storages)}
        slots = np.repeat(np.arange(len(fragments.views)), [len(v) for v in fragments.views])
        place = [number.get(view.untyped_storage()._cdata, -1) for view in views]
        self._slot_of, self._place_of = slots, np.array(place, dtype=np.int64)
        covered = np.zeros(len(self.storages), dtype=np.int64)
        known = self._place_of >= 0
        np.add.at(
            covered,
            self._place_of[known],
            np.array([view.nbytes for view in views], dtype=np.int64)[known],
        )
        self._covered = covered
        self.rebuilt = _resizable(rebuilt)
        sizes = {s._cdata: nbytes(s) for s in distinct_storages(everything)}
        self._gradient_bytes = sum(nbytes(s) for s in _resizable(gradients))
        self._nbytes_rebuilt = [nbytes(storage) for storage in self.rebuilt]
        self._rebuilt_bytes = sum(self._nbytes_rebuilt)
        moved = sum(self._nbytes)
        self._other_bytes = sum(sizes.values()) - moved - self._gradient_bytes - self._rebuilt_bytes
        self._largest = max(sizes.values(), default=0)

    def stages(self, stage_of_slot: IntArray, *, last: bool) -> IntArray:
        """The first stage, or the ``last``, in which each of the storages has a fragment."""
        known = self._place_of >= 0
        stage, place = stage_of_slot[self._slot_of[known]], self._place_of[known]
        found = np.full(len(self.storages), -1 if last else np.iinfo(np.int64).max)
        (np.maximum if last else np.minimum).at(found, place, stage)
        return found

    def memory(self, stage: IntArray) -> SideMemory:
        """What all this takes, given the :meth:`stages` of the storages."""
        return SideMemory(
            np.array(self._nbytes, dtype=np.int64),
            stage,
            self._gradient_bytes,
            self._rebuilt_bytes,
            self._other_bytes,
            self._largest,
        )

    def allocate(self, number: int) -> None:
        """Give a storage its memory, with zeros where some bytes are of no fragment."""
        gaps = int(self._covered[number]) < self._nbytes[number]
        allocate(self.storages[number], self._nbytes[number], zeros=gaps)

    def allocate_rebuilt(self) -> None:
        """Give what is made anew from what is moved its memory, with zeros."""
        for storage, nbytes in zip(self.rebuilt, self._nbytes_rebuilt, strict=True):
            allocate(storage, nbytes, zeros=True)


def _resizable(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [storage for storage in distinct_storages(tensors) if storage.resizable()]
