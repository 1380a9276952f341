"""Checksums of messages: two numbers that are equal where both ends have the same bytes.

A message is a stream of bytes in row-major order, whatever its strides at either end. Each end
reads it once, where it lies. Short ones in host memory get a CRC-32. All others are a table of rows
of 1,024 words of 64 bits, whose rows and columns are summed modulo 2**64 while some of its rows are
in the processor's cache; plain sums take hardly longer than reading::

    word  word  word  ..  | row sum        first number:   sum over r of w[r] * f(row sum)
    word  word  word  ..  | row sum        second number:  sum over c of w[c] * f(column sum)
    ------------------------------
    column sums

Weights are odd and f is one to one. So a change within one word is always seen, any single flipped
bit among them. Other changes are missed by chance, once in 2**64, or where they cancel each other
in every row and in every column, for which four words at the least must match.
"""

from __future__ import annotations

import ctypes
import functools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from dynatrain_megatron.engine.parcels import Parcel
from dynatrain_megatron.engine.transport import Message, Transport, as_bytes
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner.schedule import Schedule
from dynatrain_megatron.vps.boxes import scatter
from dynatrain_megatron.vps.tensors import LogicalTensor

_WORD_BYTES = 8
_COLUMNS = 1024
_ROW_BYTES = _COLUMNS * _WORD_BYTES
_BLOCK_BYTES = 1 << 19  # of rows that are summed both ways while they are in the cache
_PART_BYTES = 1 << 18  # of what is gathered, at a time
_SHORT_BYTES = 1 << 18  # up to here a CRC-32 takes less time than so many small calls
_SHOWN = 3
_LAST_SHIFT = 31
_SCATTER = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def checksum(message: torch.Tensor) -> torch.Tensor:
    """The checksum of a tensor's bytes, [2], on its device, where it may be still under way."""
    if message.device.type == "cpu" and message.nbytes <= _SHORT_BYTES:
        lies = message.contiguous()
        data = (ctypes.c_char * lies.nbytes).from_address(lies.data_ptr())
        return torch.tensor([zlib.crc32(data), 0])
    device = message.device
    rows = torch.empty(-(-message.nbytes // _ROW_BYTES), dtype=torch.int64, device=device)
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=device)
    first = 0
    for block in _blocks(message):
        torch.sum(block, 1, out=rows[first : first + len(block)])
        columns += block.sum(0)
        first += len(block)
    return torch.stack([_mixed(rows), _mixed(columns)])


def _mixed(sums: torch.Tensor) -> torch.Tensor:
    """One number for a vector: whichever of its numbers changes, it does."""
    weights = _weights(len(sums), sums.device)
    if sums.device.type != "cpu":
        return (_scattered(sums) * weights).sum()
    # The same on the host, where NumPy takes a fraction of the time for so few numbers.
    numbers = sums.numpy().view(np.uint64)
    for shift, factor in _SCATTER:
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor % (1 << 64))
    numbers ^= numbers >> np.uint64(_LAST_SHIFT)
    numbers *= weights.numpy().view(np.uint64)
    return torch.from_numpy(numbers.sum(keepdims=True).view(np.int64))[0]


def _scattered(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers without a pattern, one to one, so that signs that change together do not cancel.

    The end of splitmix64.
    """
    for shift, factor in _SCATTER:
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, _LAST_SHIFT)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros coming in."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


class MessageChecks:
    """The checksums of all that one rank sends and receives in one pass."""

    def __init__(self, tensors: Sequence[LogicalTensor], transport: Transport) -> None:
        self._tensors = tensors
        self._transport = transport
        self._sent: dict[int, list[torch.Tensor]] = {}
        self._arrived: dict[int, list[tuple[Parcel, torch.Tensor]]] = {}

    def sent(self, parcels: Iterable[tuple[Parcel, torch.Tensor]]) -> None:
        """Sum up what is sent of these parcels and the messages that carry them."""
        for parcel, message in parcels:
            if parcel.sending:
                self._sent.setdefault(parcel.peer, []).append(checksum(message))

    def arrived(self, parcels: Iterable[tuple[Parcel, torch.Tensor]]) -> None:
        """Sum up what has been received of them, where it has arrived."""
        for parcel, message in parcels:
            if not parcel.sending:
                found = (parcel, checksum(message))
                self._arrived.setdefault(parcel.peer, []).append(found)

    def compare(self, schedule: Schedule, *, timeout_s: float) -> None:
        """Every message has arrived as it was sent; collective, at the end of a pass.

        Raises :class:`TransitionError` on all ranks alike, naming ranks, windows and tensors. Sums
        go between ranks that exchanged messages, in the window of their first one: so this can no
        more deadlock than they can, nor take more operations at a time.
        """
        transport, rank = self._transport, self._transport.rank
        problems: list[str] = []
        for window in schedule.pairs_of(rank):
            ends = [
                (int(schedule.pieces.src[own[0]]), int(schedule.pieces.dst[own[0]]))
                for own in window
            ]
            sends: list[Message] = [
                (dst, torch.stack(self._sent[dst])) for src, dst in ends if src == rank
            ]
            receives: list[Message] = [
                (src, self._room(len(self._arrived[src]))) for src, dst in ends if dst == rank
            ]
            transport.exchange(sends, receives, timeout_s=timeout_s)
            for peer, told in receives:
                found = torch.stack([own for _, own in self._arrived[peer]])
                for i in torch.nonzero((found != told).any(1)).flatten().tolist():
                    problems.append(self._told(self._arrived[peer][i][0]))
        answers = transport.all_gather(_some(problems), timeout_s=timeout_s)
        wrong = [text for answer in answers for text in json.loads(answer)]
        if wrong:
            raise TransitionError("a message is not what was sent: " + "; ".join(wrong))

    def _room(self, count: int) -> torch.Tensor:
        return torch.empty((count, 2), dtype=torch.int64, device=self._transport.device)

    def _told(self, parcel: Parcel) -> str:
        names = dict.fromkeys(
            f"{self._tensors[tensor].name} {self._tensors[tensor].states[state].kind}"
            for tensor, state in parcel.states
        )
        return (
            f"from rank {parcel.peer} to rank {self._transport.rank} in window {parcel.window}, "
            f"{parcel.nbytes} bytes of {_listed(list(names))}"
        )


def _some(problems: list[str]) -> bytes:
    more = [f"{len(problems) - _SHOWN} more messages"] if len(problems) > _SHOWN else []
    return json.dumps(problems[:_SHOWN] + more).encode()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _blocks(message: torch.Tensor) -> Iterator[torch.Tensor]:
    """The message as words, [rows, 1024], in order; the last row ends with zeros."""
    offset = message.storage_offset() * message.element_size()
    if not message.is_contiguous() or offset % _WORD_BYTES:
        yield from _gathered(message)
        return
    flat = as_bytes(message)
    whole = len(flat) // _ROW_BYTES * _ROW_BYTES
    # On a GPU a kernel should have more to do.
    step = _BLOCK_BYTES if message.device.type == "cpu" else max(whole, 1)
    for first in range(0, whole, step):
        yield _as_words(flat[first : min(first + step, whole)])
    if whole < len(flat):
        yield _last_row(flat[whole:])


def _gathered(message: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same of a message that does not lie together, copied block by block."""
    room = torch.empty(_BLOCK_BYTES + _PART_BYTES, dtype=torch.uint8, device=message.device)
    used = 0
    for part in _parts(message, _PART_BYTES):
        room[used : used + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
        used += part.nbytes
        if used >= _BLOCK_BYTES:
            yield _as_words(room[:_BLOCK_BYTES])
            used -= _BLOCK_BYTES
            room[:used] = room[_BLOCK_BYTES : _BLOCK_BYTES + used]
    whole = used // _ROW_BYTES * _ROW_BYTES
    if whole:
        yield _as_words(room[:whole])
    if whole < used:
        yield _last_row(room[whole:used])


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int64).view(-1, _COLUMNS)


def _last_row(data: torch.Tensor) -> torch.Tensor:
    row = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=data.device)
    row[: len(data)] = data
    return _as_words(row)


def _parts(view: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Parts of a view, one after the other in row-major order, of at most so many bytes."""
    if view.nbytes <= most:
        yield view
        return
    step = most // (view.nbytes // view.shape[0])
    if step:
        yield from torch.split(view, step)
        return
    for part in view.unbind():
        yield from _parts(part, most)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers, [count], the first of always the same."""
    return _first_weights(max(_COLUMNS, 1 << (count - 1).bit_length()), device)[:count]


@functools.lru_cache(maxsize=32)
def _first_weights(count: int, device: torch.device) -> torch.Tensor:
    numbers = scatter(np.arange(count)) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
