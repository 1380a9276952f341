"""Storages counted once, and freed while still referenced."""

import torch

from dynatrain_megatron.engine.memory import Dropped, release, storage_sizes


def test_views_of_one_storage_are_counted_once() -> None:
    flat = torch.zeros(100)
    assert (
        sum(storage_sizes([flat, flat[10:20], flat.view(10, 10), torch.zeros(3)]).values()) == 412
    )


def test_release_frees_memory_that_others_still_refer_to() -> None:
    flat = torch.zeros(1 << 20)
    view, other = flat[5:], torch.ones(4)
    release([view])
    assert flat.untyped_storage().nbytes() == 0
    assert view.shape == (2**20 - 5,)  # the object survives
    assert torch.equal(other, torch.ones(4))


def test_release_leaves_alone_what_numpy_shares() -> None:
    shared, own = torch.ones(8), torch.ones(4)
    seen = shared.numpy()
    release([shared, own])
    assert seen.sum() == 8 and own.untyped_storage().nbytes() == 0


def test_dropped_storages_come_back_as_zeros_under_the_same_views() -> None:
    flat = torch.ones(1 << 20)
    view = flat[7:9]
    dropped = Dropped([flat, view])
    assert dropped.bytes == 4 << 20
    assert flat.untyped_storage().nbytes() == 0
    dropped.restore()
    assert flat.untyped_storage().nbytes() == 4 << 20
    assert view.tolist() == [0, 0]
    view += 3
    assert flat[7:9].tolist() == [3, 3] and flat.sum() == 6
