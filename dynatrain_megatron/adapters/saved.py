"""Reading a Megatron ``torch_dist`` checkpoint as it lies on disk: no ranks, no model.

::

    iter_0000005/.metadata     key -> shape, dtype, chunks; and where each chunk lies
                 __0_0.distcp  chunks, each written by torch.save
                 metadata.json says that it is such a checkpoint

Nothing in it is executed: names of classes other than those that describe tensors become objects
without any behaviour.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynatrain_megatron.errors import CheckpointError
from dynatrain_megatron.vps.region import Region

_LATEST = "latest_checkpointed_iteration.txt"
_TRUSTED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of a checkpoint: its key, unsharded shape, dtype, and the regions it is cut in."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Region, ...]

    @property
    def numel(self) -> int:
        """Elements in its chunks, which may be fewer than its shape has."""
        return sum(chunk.numel for chunk in self.chunks)


class SavedCheckpoint:
    """A checkpoint's tensors by key; values are read chunk by chunk, none is kept.

    ``directory`` is one checkpoint, or a folder of them, of which the latest is meant. Raises
    :class:`CheckpointError` where it is no such checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = _one_checkpoint(directory)
        _check_format(self.directory)
        found = _read_metadata(self.directory / ".metadata")
        try:
            self.tensors, self._places = _described(found)
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.directory / '.metadata'} does not describe tensors: {error}"
            ) from error

    def chunks(self, tensor: SavedTensor) -> Iterator[tuple[Region, torch.Tensor]]:
        """Each region of a tensor and its values, [shape of the region]."""
        for chunk in tensor.chunks:
            name, offset, length = self._places[tensor.key, chunk.start]
            path = self.directory / name
            value = _load(path, offset, length, tensor.key)
            if tuple(value.shape) != chunk.shape or value.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{path}: {tensor.key} {chunk.start} has shape {tuple(value.shape)} and "
                    f"{value.dtype}, but .metadata says {chunk.shape} and {tensor.dtype}"
                )
            yield chunk, value


def _one_checkpoint(directory: Path) -> Path:
    latest = directory / _LATEST
    if (directory / ".metadata").is_file() or not latest.is_file():
        return directory
    text = latest.read_text(errors="replace").strip()
    if text != "release" and not (text.isascii() and text.isdecimal()):
        raise CheckpointError(f"{latest} holds {text[:40]!r}, which is no iteration")
    return directory / (text if text == "release" else f"iter_{int(text):07d}")


def _check_format(directory: Path) -> None:
    path = directory / "metadata.json"
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except OSError as error:
        raise CheckpointError(
            f"{directory} is no Megatron distributed checkpoint: {path.name}: {error.strerror}; "
            "give a folder such as CHECKPOINTS/iter_0000005"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} names no checkpoint format ({error})") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{directory} has format {backend!r}; only torch_dist can be read")


class _Inert:
    """Stands for an object of a class that is not trusted; does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Forget it."""

    def extend(self, values: object) -> None:
        """Forget them."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _TRUSTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _Inert


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


_Places = dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]


def _described(metadata: Any) -> tuple[dict[str, SavedTensor], _Places]:
    """The tensors of the metadata; and file, offset and length of each chunk."""
    places: _Places = {}
    for index, info in metadata.storage_data.items():
        if index.offset is not None:
            name = str(info.relative_path)
            if Path(name).name != name:
                raise ValueError(f"file {name!r} is not in the checkpoint's folder")
            at = tuple(int(x) for x in index.offset)
            places[str(index.fqn), at] = (name, int(info.offset), int(info.length))
    tensors: dict[str, SavedTensor] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        chunks: dict[tuple[int, ...], Region] = {}
        for chunk in entry.chunks:  # a replica may be named again
            start = tuple(int(x) for x in chunk.offsets)
            stop = tuple(a + int(n) for a, n in zip(start, chunk.sizes, strict=True))
            if 0 in chunk.sizes:
                continue
            chunks[start] = Region(start, stop)
            if (key, start) not in places:
                raise ValueError(f"{key} {start} lies in no file")
        shape = tuple(int(x) for x in entry.size)
        dtype = entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key} has no dtype")
        tensors[key] = SavedTensor(key, shape, dtype, tuple(chunks[at] for at in sorted(chunks)))
    return tensors, places


def _load(path: Path, offset: int, length: int, key: str) -> torch.Tensor:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except Exception as error:  # torch raises anything for data that are damaged
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path}: {key} at byte {offset} cannot be read: {reason}") from error
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{path}: {key} at byte {offset} is no tensor")
    return value
