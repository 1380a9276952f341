"""Objects built without memory: nothing can be told from what would have been with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dynatrain_megatron.engine.memory import distinct_storages, storage_sizes
from dynatrain_megatron.engine.unwritten import Unwritten
from dynatrain_megatron.errors import HostMismatch

N = 1 << 16


def test_what_nobody_writes_to_takes_no_memory_whatever_is_made_of_it() -> None:
    """As Megatron makes it: parameters in bf16, laid into a flat buffer, copied to main ones."""
    unwritten = Unwritten()
    with unwritten:
        weight, norm = torch.empty(256, 256), torch.empty(512).fill_(1)
        params = [torch.nn.Parameter(each.bfloat16()) for each in (weight, norm)]
        buffer = torch.zeros(2 * N, dtype=torch.bfloat16)
        grads = torch.zeros(2 * N)
        offset = 0
        for param in params:
            old, param.data = param.data, buffer[offset:][: param.numel()].view(param.shape)
            param.data.detach().copy_(old)
            param.expand_as(param).grad_fn.next_functions[0][0].register_hook(lambda *_: None)
            offset += param.numel()
        mains = [param.detach().view(-1)[3:].clone().float() for param in params]
        moments = [torch.zeros_like(main) for main in mains]
    held = [*params, buffer, grads, *mains, *moments]
    large = [tensor for tensor in held if tensor.nbytes >= 1 << 10]
    assert sum(storage_sizes(large).values()) == 0
    assert unwritten.most_bytes == buffer.nbytes  # of which views are made
    missing = unwritten.take(large)
    unwritten.allocate_rest()
    assert missing.bytes == 4 * N + 8 * N + 2 * sum(main.nbytes for main in mains)
    missing.restore()
    params[0].data.fill_(1)
    assert buffer.sum() == params[0].numel() and mains[0].shape == (N - 3,)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: torch.zeros(N), 0.0),
        (lambda: torch.zeros(N)[5:].clone(), 0.0),
        (lambda: torch.zeros(N).double().contiguous(), 0.0),
        (lambda: torch.zeros_like(torch.empty(N)), 0.0),
        (lambda: torch.empty(N).new_zeros(N), 0.0),
        (lambda: torch.empty(N).zero_(), 0.0),
        (lambda: torch.empty(N).fill_(3), 3.0),
        (lambda: torch.zeros(N).add_(2), 2.0),
        (lambda: torch.zeros(N) + 2, 2.0),
        (lambda: torch.ones(N).copy_(torch.zeros(N)), 0.0),
        (lambda: torch.empty(N).copy_(torch.zeros(N)), 0.0),
        (lambda: torch.ones(N).copy_(torch.full((N,), 2)), 2.0),
        (lambda: torch.nn.init.constant_(torch.empty(N), 4.0), 4.0),
        (lambda: torch.zeros(N).index_fill_(0, torch.arange(N), 7), 7.0),
    ],
)
def test_what_is_written_can_be_read(make: Callable[[], torch.Tensor], value: float) -> None:
    unwritten = Unwritten()
    with unwritten:
        made = make()
        inside = made.max().item(), made.min().item()
    unwritten.allocate_rest()
    assert inside == (value, value)
    assert made.eq(value).all() and made.untyped_storage().nbytes() >= made.nbytes


def test_writing_to_a_part_leaves_the_rest_zero() -> None:
    with Unwritten():
        whole = torch.zeros(N)
        whole[3:5] = 1
        half = torch.zeros(2, N)[1]
    assert whole.sum() == 2
    assert half.untyped_storage().nbytes() == 0


def test_what_is_written_to_parts_is_remembered_but_not_in_copies() -> None:
    """A copy that nobody fills must not be used."""
    unwritten = Unwritten()
    with unwritten:
        whole = torch.zeros(N)
        whole[3:7].view(2, 2).t().copy_(torch.tensor([[1, 2], [3, 4]]))
        whole[5:8].copy_(torch.tensor(9))
        assert whole.untyped_storage().nbytes() == 0
        copy = whole.clone()
        with pytest.raises(HostMismatch, match="made of parameters"):
            copy.sum()
        again = whole[:100].double()
    assert copy.untyped_storage().nbytes() == again.untyped_storage().nbytes() == 0
    with pytest.raises(HostMismatch, match="800 bytes"):
        unwritten.allocate_rest()
    del again
    unwritten.allocate_rest()
    assert whole[:10].tolist() == [0, 0, 0, 1, 3, 9, 9, 9, 0, 0] and whole[10:].sum() == 0


def test_the_rest_gets_its_memory_and_what_is_gone_does_not() -> None:
    unwritten = Unwritten()
    with unwritten:
        kept, taken, gone = torch.zeros(N), torch.empty(N), torch.empty(1 << 20)
    missing = unwritten.take([taken])
    del gone
    unwritten.allocate_rest()
    assert kept.sum() == 0 and kept.untyped_storage().nbytes() == kept.nbytes
    assert taken.untyped_storage().nbytes() == 0
    (storage,) = distinct_storages([taken])
    assert missing.nbytes(storage) == taken.nbytes


def test_small_tensors_are_as_ever() -> None:
    with Unwritten():
        step = torch.zeros(())
        assert step.item() == 0 and torch.zeros(3).tolist() == [0, 0, 0]
