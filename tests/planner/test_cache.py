"""What is kept between switches: the values used last, under keys that tell everything apart."""

import dataclasses
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.adapters.built import BuiltKey
from dynatrain_megatron.adapters.job import RostersKey
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Recent

KEYS = {
    "built": (
        BuiltKey(ParallelLayout(tp=2), ("a", "b"), "gloo", (("use_sharp", "False"),)),
        {
            "layout": ParallelLayout(tp=2, mbs=2),
            "processes": ("b", "a"),
            "backend": "nccl",
            "options": (("use_sharp", "True"),),
        },
    ),
    "rosters": (
        RostersKey(("a", "b"), ("c", "d")),
        {"source": ("b", "a"), "target": ("c", "e")},
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_field_changed_is_a_miss(name: str) -> None:
    key, changes = KEYS[name]
    assert set(changes) == {field.name for field in dataclasses.fields(key)}
    kept = Recent[Hashable, str](4)
    kept.put(key, "this one")
    assert kept.get(dataclasses.replace(key)) == "this one"
    for field, value in changes.items():
        assert kept.get(dataclasses.replace(key, **{field: value})) is None, field


@given(
    most=st.integers(0, 4),
    uses=st.lists(st.tuples(st.sampled_from(["get", "pop", "put"]), st.integers(0, 6))),
)
def test_the_values_used_last_stay(most: int, uses: list[tuple[str, int]]) -> None:
    kept, order = Recent[int, int](most), list[int]()  # the key used longest ago first
    for number, (use, key) in enumerate(uses):
        known = key in order
        if use == "put":
            gone = kept.put(key, key)
            order = [*(k for k in order if k != key), key]
            assert gone == order[: max(0, len(order) - most)], number
            order = order[len(gone) :]
        else:
            assert getattr(kept, use)(key) == (key if known else None), number
            rest = [k for k in order if k != key]
            order = [*rest, key] if known and use == "get" else rest
        assert list(kept) == order and len(kept) == len(order)
