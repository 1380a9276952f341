"""Memory that nobody has written to is not allocated: for building objects whose state comes later.

Inside an :class:`Unwritten` context a tensor that is made empty, or of zeros, gets a storage
without memory, and so does what is copied or converted from one. Views are taken of it, parameters
made, buffers laid out as ever. The memory comes when somebody reads or writes there in earnest, so
that nothing can be told from what would have been without the context::

    torch.empty(n)          no memory         torch.zeros(n)            no memory, reads as zeros
    empty[a:b], .view()     no memory         zeros[a:b].copy_(empty)   no memory
    empty.clone().float()   no memory         zeros[a:b].copy_(few)     no memory; few is remembered
                                              zeros.add_(1)             allocated, as zeros, first

What remains without memory afterwards is what the transfer has to fill. One thing is not kept: what
a storage without memory remembers is not in copies of it (a main parameter has no use for what a
norm begins with). Such a copy must be filled by the transfer too; reading it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dynatrain_megatron.engine.memory import Dropped
from dynatrain_megatron.errors import HostMismatch

_LEAST_BYTES = 1 << 10  # of a storage that is worth it

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_ZEROS = {
    _aten.zeros.default: _aten.empty.memory_format,
    _aten.zeros_like.default: _aten.empty_like.default,
    _aten.new_zeros.default: _aten.new_empty.default,
}
_REMEMBERED = 4  # at most this part of a storage is remembered without memory
_CLONES = {_aten.clone.default, _aten._to_copy.default}


class _Memory:
    """What a storage without memory would have, and ``later`` what was written to parts of it."""

    __slots__ = ("is_lost", "later", "later_bytes", "nbytes", "storage", "zeros")

    def __init__(self, storage: torch.UntypedStorage, *, zeros: bool, is_lost: bool) -> None:
        self.nbytes = storage.nbytes()
        self.zeros = zeros
        self.is_lost = is_lost
        self.later: list[tuple[torch.Tensor, torch.Size, tuple[int, ...], int | torch.SymInt]] = []
        self.later_bytes = 0
        self.storage: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def has_values(self) -> bool:
        """Whether somebody wrote something there, kept or not."""
        return self.is_lost or bool(self.later)

    def remember(self, to: torch.Tensor, value: torch.Tensor) -> bool:
        """Keep what is written, if it is little."""
        if self.later_bytes + to.nbytes > self.nbytes // _REMEMBERED:
            return False
        self.later_bytes += to.nbytes
        kept = value.to(to.dtype, copy=True)
        self.later.append((kept, to.size(), to.stride(), to.storage_offset()))
        return True

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Give the storage its memory, with what is in it."""
        storage.resize_(self.nbytes)
        if self.zeros:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        for value, size, stride, offset in self.later:
            place = torch.empty(0, dtype=value.dtype, device=storage.device)
            place.set_(storage, offset, size, stride).copy_(value)


class Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """May be entered several times; see the module's text. Works in the thread that enters it.

    ``most_bytes`` is the most memory that views took, for as long as they were made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._without: dict[int, _Memory] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _EMPTY or func in _ZEROS:
            return self._made(_ZEROS.get(func, func)(*args, **kwargs), zeros=func in _ZEROS)
        touched = self._touched((args, kwargs))
        if not touched:
            return func(*args, **kwargs)
        if func.is_view:
            return self._viewed(touched, lambda: func(*args, **kwargs))
        first = self._without[touched[0]._cdata]
        if func in _CLONES:
            form = {name: value for name, value in kwargs.items() if name != "non_blocking"}
            made = _aten.empty_like.default(*args, **form)
            return self._made(made, zeros=first.zeros, is_lost=first.has_values)
        if func is _aten.zero_.default and not first.has_values:
            first.zeros = True
            return args[0]
        if func is _aten.copy_.default and self._copied(*args[:2]):
            return args[0]
        for storage in touched:
            self._allocate(storage, may_be_lost=func.namespace == "c10d")
        return func(*args, **kwargs)

    def take(self, tensors: Iterable[torch.Tensor]) -> Dropped:
        """Hand over the storages of ``tensors``: they have memory from when the caller says so.

        Those that have some lose it and what is in it.
        """
        dropped = Dropped(tensors, {key: memory.nbytes for key, memory in self._without.items()})
        for storage in dropped.storages:
            self._without.pop(storage._cdata, None)
        return dropped

    def allocate_rest(self) -> None:
        """Give memory to all that is without, not taken, and still in use."""
        for key, memory in list(self._without.items()):
            if memory.storage.expired():
                del self._without[key]
            else:
                self._allocate(torch.UntypedStorage._new_with_weak_ptr(memory.storage.cdata))

    def _touched(self, values: Any) -> list[torch.UntypedStorage]:
        """The storages without memory among the tensors in ``values``, each once, in order."""
        found: dict[int, torch.UntypedStorage] = {}
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata in self._without:
                    found[storage._cdata] = storage
        return list(found.values())

    def _made(self, tensor: torch.Tensor, *, zeros: bool, is_lost: bool = False) -> torch.Tensor:
        storage = tensor.untyped_storage()
        least = 1 if is_lost else _LEAST_BYTES
        if storage.nbytes() < least or not storage.resizable():
            return tensor.zero_() if zeros else tensor
        self._without[storage._cdata] = _Memory(storage, zeros=zeros, is_lost=is_lost)
        storage.resize_(0)
        return tensor

    def _viewed(self, touched: list[torch.UntypedStorage], view: Callable[[], Any]) -> Any:
        """Views check that their storage is large enough, so it is, for as long as that takes."""
        sizes = [self._without[storage._cdata].nbytes for storage in touched]
        self.most_bytes = max(self.most_bytes, sum(sizes))
        for storage, nbytes in zip(touched, sizes, strict=True):
            storage.resize_(nbytes)
        made = view()
        for storage in touched:
            storage.resize_(0)
        return made

    def _allocate(self, storage: torch.UntypedStorage, *, may_be_lost: bool = False) -> None:
        memory = self._without.pop(storage._cdata)
        if memory.is_lost and not may_be_lost:
            raise HostMismatch(
                f"{memory.nbytes} bytes that Megatron made of parameters while it built a model "
                "are neither parameters nor optimizer state, and are used; their values are not "
                "known there. Such a module is not supported yet"
            )
        memory.fill(storage)

    def _copied(self, to: torch.Tensor, of: torch.Tensor) -> bool:
        """Whether a copy is done without memory: it brings nothing, or what can be remembered."""
        source = self._without.get(of.untyped_storage()._cdata)
        target = self._without.get(to.untyped_storage()._cdata)
        if source is None:
            return target is not None and target.remember(to, of.expand_as(to))
        if source.has_values:
            if target is not None:
                target.is_lost = True
            return target is not None
        if source.zeros and target is not None and not target.has_values:
            target.zeros = True
            return True
        return not source.zeros
