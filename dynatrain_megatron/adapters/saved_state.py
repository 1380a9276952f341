"""Fingerprints of a saved checkpoint: those that the same state has in a running job.

A fully reshardable checkpoint holds what a switch moves, under Megatron's keys::

    decoder.x.weight                         the parameter, in the dtype it is computed with
    optimizer.state.fp32_param.decoder.x.w…  its main parameter (param: the distributed optimizer)
    optimizer.state.exp_avg.decoder.x.w…     a moment

Only the parameter beside a main parameter is not moved but rebuilt, and has no part in a job's
fingerprint. It shows whether the main parameter is the right one, of which it is the rounding: up
to megatron-core 0.19.2 Megatron saves parameters behind a padded bucket of a gradient buffer
shifted, moments alike, and the end of the last one as zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dynatrain_megatron.adapters.saved import SavedCheckpoint, SavedTensor
from dynatrain_megatron.engine.fingerprint import Piece, by_label, hash_pieces, whole
from dynatrain_megatron.engine.fragments import dtype_name
from dynatrain_megatron.errors import CheckpointError
from dynatrain_megatron.vps.region import Region, without
from dynatrain_megatron.vps.tensors import ITEM_BYTES, LogicalTensor, State, StateKind

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_KINDS = {
    "fp32_param": StateKind.MAIN_PARAM,
    "param": StateKind.MAIN_PARAM,
    "exp_avg": StateKind.EXP_AVG,
    "exp_avg_sq": StateKind.EXP_AVG_SQ,
    "momentum_buffer": StateKind.MOMENTUM_BUFFER,
}

_States = dict[StateKind, SavedTensor]


@dataclass(frozen=True, slots=True)
class Shifted:
    """A parameter whose saved main parameter is not what it was rounded from.

    ``zeros`` is how many elements at the end of one of its chunks are zero.
    """

    key: str
    zeros: int


@dataclass(slots=True)
class SavedState:
    """What a checkpoint's state comes to: fingerprints by label, and what is wrong with it.

    ``rounded`` are those of the parameters beside main parameters; a job's fingerprint has none of
    them. ``incomplete`` are keys of which elements are missing.
    """

    states: dict[str, str] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    shifted: list[Shifted] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """That of the whole, as a switch reports it."""
        return whole(self.states)


def fingerprint_saved(checkpoint: SavedCheckpoint) -> SavedState:
    """Read a checkpoint, one chunk at a time in memory.

    Raises :class:`CheckpointError` where its optimizer state is not cut as parameters are.
    """
    found = SavedState()
    optimizer = _optimizer_states(checkpoint)
    for key, tensor in sorted(checkpoint.tensors.items()):
        if _is_optimizer(key):
            continue
        states = optimizer.pop(key, {})
        _check_whole(tensor, found)
        _add(checkpoint, tensor, states, found)
    if optimizer:
        raise CheckpointError(
            f"{checkpoint.directory} has optimizer state of {sorted(optimizer)[0]}, and not the "
            "parameter"
        )
    return found


def _optimizer_states(checkpoint: SavedCheckpoint) -> dict[str, _States]:
    """The states of each parameter that is trained, by its key."""
    states: dict[str, _States] = {}
    for key, tensor in checkpoint.tensors.items():
        if not _is_optimizer(key):
            continue
        match = _OPTIMIZER.fullmatch(key)
        param = checkpoint.tensors.get(match[2]) if match else None
        if match is None or (param is not None and param.shape != tensor.shape):
            raise CheckpointError(
                f"{checkpoint.directory}: {key} is not cut as the parameters are; save with "
                "--dist-ckpt-optim-fully-reshardable and --ckpt-fully-parallel-save"
            )
        if match[1] not in _KINDS:
            raise CheckpointError(
                f"{checkpoint.directory}: {key} is of a kind that is not known; known are "
                f"{', '.join(_KINDS)}"
            )
        states.setdefault(match[2], {})[_KINDS[match[1]]] = tensor
    return states


def _is_optimizer(key: str) -> bool:
    return re.match(r"(chained_\d+\.)?optimizer\.", key) is not None


def _check_whole(tensor: SavedTensor, found: SavedState) -> None:
    if tensor.numel != math.prod(tensor.shape):
        found.incomplete.append(tensor.key)


def _add(
    checkpoint: SavedCheckpoint, tensor: SavedTensor, states: _States, found: SavedState
) -> None:
    """Hash a parameter or buffer and its optimizer state."""
    trained = next(iter(states.values())).chunks if states else ()
    for kind, state in states.items():
        if state.numel != sum(chunk.numel for chunk in trained):
            found.incomplete.append(state.key)
        found.states |= _hashed(checkpoint, state, tensor.key, kind, state.chunks)
    if states and StateKind.MAIN_PARAM not in states:  # a float32 parameter is its own
        found.states |= _hashed(checkpoint, tensor, tensor.key, StateKind.MAIN_PARAM, trained)
    elif states:
        main = states[StateKind.MAIN_PARAM]
        own = _hashed(checkpoint, tensor, tensor.key, StateKind.PARAM, trained)
        rounded = _hashed(
            checkpoint, main, tensor.key, StateKind.PARAM, trained, dtype=tensor.dtype
        )
        if tensor.dtype != main.dtype:
            found.rounded |= own
        if own != rounded:
            found.shifted.append(Shifted(tensor.key, _zeros_at_end(checkpoint, main)))
    rest = [part for chunk in tensor.chunks for part in without(chunk, trained)]
    if rest:
        found.states |= _hashed(checkpoint, tensor, tensor.key, StateKind.PARAM, rest)


def _hashed(
    checkpoint: SavedCheckpoint,
    tensor: SavedTensor,
    name: str,
    kind: StateKind,
    regions: Sequence[Region],
    *,
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """The fingerprint of what lies in ``regions``, which do not overlap; converted first."""
    kept = tensor.dtype if dtype is None else dtype
    kept_as = dtype_name(kept)
    if kept_as not in ITEM_BYTES:
        raise CheckpointError(f"{checkpoint.directory}: {tensor.key} has dtype {kept_as}")
    logical = LogicalTensor(name, tensor.shape, (State(kind, kept_as),))
    pieces = (
        Piece(0, part.start, (value.to(kept),))
        for part, value in _values(checkpoint, tensor, regions)
    )
    return by_label([logical], hash_pieces([logical], pieces))


def _values(
    checkpoint: SavedCheckpoint, tensor: SavedTensor, regions: Sequence[Region]
) -> Iterator[tuple[Region, torch.Tensor]]:
    """What of each chunk lies in ``regions``."""
    for chunk, value in checkpoint.chunks(tensor):
        for region in regions:
            common = chunk.intersect(region)
            if common is not None:
                inner = zip(common.start, common.stop, chunk.start, strict=True)
                yield common, value[tuple(slice(a - o, b - o) for a, b, o in inner)]


def _zeros_at_end(checkpoint: SavedCheckpoint, tensor: SavedTensor) -> int:
    """The most zeros with which one of its chunks ends, if anything but zeros is in it."""
    most = 0
    for _, value in checkpoint.chunks(tensor):
        used = torch.nonzero(value.reshape(-1))
        if len(used):
            most = max(most, value.numel() - 1 - int(used[-1]))
    return most
