"""Exact accounting of tensor storages, and giving them back."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind ``tensors``, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return list(storages.values())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def release(tensors: Iterable[torch.Tensor]) -> int:
    """Free the storages behind ``tensors`` though they are still referenced; returns the bytes.

    The tensors and all their views survive as objects without memory: reading one afterwards is an
    error of the caller. Megatron's own frame keeps references to a model it handed to ``train``,
    so dropping ours would free nothing. Memory that NumPy has looked at, as Megatron's check of
    weight hashes does on a CPU, cannot be taken away; it goes with the last reference to it.
    """
    freed = 0
    for storage in distinct_storages(tensors):
        if storage.resizable():
            freed += storage.nbytes()
            storage.resize_(0)
    return freed


class Dropped:
    """Storages whose contents nobody needs for a while, given back to the allocator.

    Tensors and views stay as they are, without memory, until :meth:`restore`.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._sizes = [(s, s.nbytes()) for s in distinct_storages(tensors) if s.resizable()]
        self.bytes = sum(size for _, size in self._sizes)
        for storage, _ in self._sizes:
            storage.resize_(0)

    def restore(self, *, zero: bool = True) -> None:
        """Give each storage its old size again, filled with zeros or with nothing in particular."""
        for storage, size in self._sizes:
            storage.resize_(size)
            if zero:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
