"""Memory that nobody has written to is not allocated: for building objects whose state comes later.

Inside an :class:`Unwritten` context a tensor that is made empty, or of zeros, gets a storage
without memory, and so does what is copied or converted from one. Views are taken of it, parameters
made, buffers laid out as ever. The memory comes when somebody reads or writes there in earnest, so
that nothing can be told from what would have been without the context::

    torch.empty(n)          no memory             torch.zeros(n)         no memory, reads as zeros
    empty[a:b], .view()     no memory             zeros[a:b].copy_(empty)   no memory
    empty.clone().float()   no memory             zeros.add_(1)          allocated, as zeros, first

What remains without memory afterwards is what the transfer has to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dynatrain_megatron.engine.memory import Dropped

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
_CLONES = {_aten.clone.default, _aten._to_copy.default}


class _Memory:
    """What a storage without memory would have."""

    __slots__ = ("nbytes", "storage", "zeros")

    def __init__(self, storage: torch.UntypedStorage, *, zeros: bool) -> None:
        self.nbytes = storage.nbytes()
        self.zeros = zeros
        self.storage: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # whose address is not used again meanwhile


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
        known = [self._without[storage._cdata] for storage in touched]
        if func in _CLONES:
            form = {name: value for name, value in kwargs.items() if name != "non_blocking"}
            return self._made(_aten.empty_like.default(*args, **form), zeros=known[0].zeros)
        if func is _aten.zero_.default:
            known[0].zeros = True
            return args[0]
        if func is _aten.copy_.default and self._is_idle_copy(*args[:2]):
            return args[0]
        for storage in touched:
            self._allocate(storage)
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

    def _made(self, tensor: torch.Tensor, *, zeros: bool) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() < _LEAST_BYTES or not storage.resizable():
            return tensor.zero_() if zeros else tensor
        self._without[storage._cdata] = _Memory(storage, zeros=zeros)
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

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        memory = self._without.pop(storage._cdata)
        storage.resize_(memory.nbytes)
        if memory.zeros:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()

    def _is_idle_copy(self, to: torch.Tensor, of: torch.Tensor) -> bool:
        """Whether a copy changes nothing that could be read: from where nothing was written."""
        source = self._without.get(of.untyped_storage()._cdata)
        if source is None:
            return False
        target = self._without.get(to.untyped_storage()._cdata)
        if source.zeros and target is not None:
            target.zeros = True
        return not source.zeros or target is not None
