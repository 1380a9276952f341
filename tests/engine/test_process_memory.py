"""Rows of tensors, and reading them in another process: here, this one."""

from __future__ import annotations

import ctypes
import errno
import os

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dynatrain_megatron.engine import process_memory
from dynatrain_megatron.engine.rows import NUM_NUMBERS, Rows
from dynatrain_megatron.engine.spans import Spans


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Cuts of a tensor of distinct elements, in any order of dims."""
    shape = draw(st.lists(st.integers(1, 5), max_size=5))
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int64]))
    whole = torch.arange(int(np.prod(shape)), dtype=torch.int64).to(dtype).reshape(shape)
    if draw(st.booleans()):
        whole = whole.permute(draw(st.permutations(range(len(shape)))))
    cut = []
    for size in whole.shape:
        start = draw(st.integers(0, size - 1))
        step = draw(st.sampled_from([1, 1, 1, 2]))
        cut.append(slice(start, draw(st.integers(start + 1, size)), step))
    return whole[tuple(cut)]


def content(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).numpy().tobytes()


@given(views())
@settings(max_examples=150)
def test_rows_are_the_tensors_bytes_in_row_major_order(view: torch.Tensor) -> None:
    rows = Rows.of(view)
    spans = rows.spans()
    assert b"".join(ctypes.string_at(int(a), int(n)) for a, n in spans) == content(view)
    assert len(spans) == 1 or not view.is_contiguous()
    assert len(rows.numbers()) == NUM_NUMBERS
    assert Rows.from_numbers(rows.numbers()) == rows


@given(views(), st.data())
@settings(max_examples=150)
def test_what_is_read_fills_spans_of_any_other_shape(
    there: torch.Tensor, data: st.DataObject
) -> None:
    """Calls of few spans, so that their bounds fall anywhere within the spans of either side."""
    expected = content(there)
    room = torch.zeros(3 * len(expected), dtype=torch.uint8)
    # Another cut of as many bytes, with gaps between.
    spans, at, left = [], 0, len(expected)
    while left:
        size = data.draw(st.integers(1, left))
        spans.append((room.data_ptr() + at, size))
        at, left = at + size + data.draw(st.integers(0, 2)), left - size
    here = np.array(spans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynatrain_megatron.engine.spans.MOST_SPANS", data.draw(st.integers(1, 4)))
        process_memory.read(os.getpid(), here, Rows.of(there).spans())
    assert b"".join(ctypes.string_at(int(a), int(n)) for a, n in here) == expected


def test_many_rows_and_large_ones() -> None:
    table = torch.arange(6000 * 64, dtype=torch.int32).view(6000, 64)
    got = torch.zeros(6000, 16, dtype=torch.int32)
    process_memory.read(os.getpid(), Rows.of(got).spans(), Rows.of(table[:, 8:24]).spans())
    assert torch.equal(got, table[:, 8:24])


def test_a_call_that_ends_early_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does above 2 GiB."""
    real, most = process_memory._readv, 1000
    calls = []

    def short(pid: int, here: np.ndarray, there: np.ndarray) -> int:
        calls.append(int(here[:, 1].sum()))
        assert calls[-1] == there[:, 1].sum()
        parts = [Spans(side) for side in (here, there)]
        return real(pid, *(side.between(0, min(most, calls[-1])) for side in parts))

    monkeypatch.setattr(process_memory, "_readv", short)
    source, got = torch.arange(4096, dtype=torch.int16), torch.zeros(4096, dtype=torch.int16)
    process_memory.read(
        os.getpid(), Rows.of(got.view(64, 64)).spans(), Rows.of(source.view(2, -1)).spans()
    )
    assert torch.equal(got, source) and len(calls) == 9


def test_errors_are_the_kernels() -> None:
    memory, got = (torch.zeros(64, dtype=torch.uint8) for _ in range(2))
    here = np.array([[got.data_ptr(), 64]])
    there = np.array([[memory.data_ptr(), 32], [0, 32]])  # readable, then nothing
    with pytest.raises(OSError) as caught:
        process_memory.read(os.getpid(), here, there)
    assert caught.value.errno == errno.EFAULT
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        process_memory.read(pid, here, np.array([[memory.data_ptr(), 64]]))
