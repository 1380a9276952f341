"""Exact accounting of tensor storages, and giving them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind ``tensors``, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return list(storages.values())


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of the distinct storages behind ``tensors``, by identity."""
    return {storage._cdata: storage.nbytes() for storage in distinct_storages(tensors)}


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Free the storages behind ``tensors`` though they are still referenced.

    The tensors and all their views survive as objects without memory: reading one afterwards is an
    error of the caller. Megatron's own frame keeps references to a model it handed to ``train``,
    so dropping ours would free nothing. Memory that NumPy has looked at, as Megatron's check of
    weight hashes does on a CPU, cannot be taken away; it goes with the last reference to it.
    """
    free(distinct_storages(tensors))


def free(storages: Iterable[torch.UntypedStorage]) -> None:
    """The same for storages."""
    for storage in storages:
        if storage.resizable():
            storage.resize_(0)


def allocate(storage: torch.UntypedStorage, nbytes: int, *, zeros: bool) -> None:
    """Give a storage its memory, if it has none; ``zeros`` fills it with them."""
    storage.resize_(nbytes)
    if zeros:
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


class Dropped:
    """Storages whose contents nobody needs for a while, given back to the allocator.

    Tensors and views stay as they are, without memory, until :meth:`restore`. ``sizes`` has the
    bytes of those that have none as it is, by identity.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], sizes: Mapping[int, int] | None = None
    ) -> None:
        self.storages = [s for s in distinct_storages(tensors) if s.resizable()]
        known = {} if sizes is None else sizes
        self._nbytes = {s._cdata: known.get(s._cdata, s.nbytes()) for s in self.storages}
        for storage in self.storages:
            storage.resize_(0)

    @property
    def bytes(self) -> int:
        """What they take when they are all there."""
        return sum(self._nbytes.values())

    def nbytes(self, storage: torch.UntypedStorage) -> int:
        """What a storage takes, if it is one of them when it is there."""
        return self._nbytes.get(storage._cdata, storage.nbytes())

    def restore(self, *, zeros: bool = True) -> None:
        """Give each storage its old size again, filled with zeros unless told not to."""
        for storage in self.storages:
            self.restore_one(storage, zeros=zeros)

    def restore_one(self, storage: torch.UntypedStorage, *, zeros: bool) -> None:
        """The same for one of them."""
        allocate(storage, self.nbytes(storage), zeros=zeros)


class Ledger:
    """The memory of all storages that a switch knows of, measured whenever some come or go.

    It counts what the storages have, not what they should have, so that it can be compared with a
    plan.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.watch(tensors)
        self._before = self._peak = self.measure()

    @property
    def peak_extra_bytes(self) -> int:
        """The most there was on top of that; not less than zero."""
        return self._peak - self._before

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages behind ``tensors`` too."""
        for storage in distinct_storages(tensors):
            self._storages.setdefault(storage._cdata, storage)

    def measure(self) -> int:
        """Bytes of all storages now."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def mark(self, besides: int = 0) -> None:
        """Take down what there is now, and ``besides`` in memory that is not watched."""
        self._peak = max(self._peak, self.measure() + besides)
