"""Rosters: what is put in comes out, as columns and as bytes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynatrain_megatron.vps import LogicalTensor, Region, Roster, RosterBuilder, RosterSet
from tests.planner.worlds import region_of, roster_of
from tests.vps.strategies import STATES, logical_tensors, mask, regions, rosters

W = LogicalTensor("w", (4, 6), STATES[0])
B = LogicalTensor("b", (6,), STATES[1])
NOTHING = RosterBuilder().build()


def same(a: Roster, b: Roster) -> bool:
    return a.tensors == b.tensors and all(
        np.array_equal(getattr(a, column), getattr(b, column))
        for column in ("tensor", "start", "stop")
    )


@st.composite
def fragment_lists(draw: st.DrawFn) -> list[tuple[LogicalTensor, Region]]:
    tensors = draw(logical_tensors())
    chosen = draw(st.lists(st.sampled_from(tensors), max_size=8))
    return [(tensor, draw(regions(tensor.shape))) for tensor in chosen]


@settings(max_examples=500, deadline=None)
@given(fragment_lists())
def test_slots_keep_what_was_added(fragments: list[tuple[LogicalTensor, Region]]) -> None:
    builder = RosterBuilder()
    assert [builder.add(*fragment) for fragment in fragments] == list(range(len(fragments)))
    roster = builder.build()
    assert len(roster) == len(fragments)
    for slot, (tensor, region) in enumerate(fragments):
        assert roster.tensors[int(roster.tensor[slot])] == tensor
        assert region_of(roster, slot) == region
    # Padding is [0, 1), so that products over all dims are the number of elements.
    volumes = (roster.stop - roster.start).prod(axis=1)
    assert volumes.tolist() == [region.numel for _, region in fragments]
    assert [t.name for t in roster.tensors] == sorted({t.name for t, _ in fragments})
    assert RosterSet.merge([roster]).row_bytes.tolist() == [
        int(mask(tensor.shape, region).sum()) * sum(state.item_bytes for state in tensor.states)
        for tensor, region in fragments
    ]


@settings(max_examples=500, deadline=None)
@given(rosters())
@example(NOTHING)
def test_bytes_and_back(roster: Roster) -> None:
    data = roster.to_bytes()
    again = Roster.from_bytes(data)
    assert same(again, roster)
    assert again.to_bytes() == data
    assert again.tensor.dtype == again.start.dtype == again.stop.dtype == np.int64


@given(rosters(), st.data())
def test_bytes_cut_short_or_lengthened_are_refused(roster: Roster, data: st.DataObject) -> None:
    whole = roster.to_bytes()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for wrong in (cut, whole + b"\0", whole + b"\0" * 8):
        with pytest.raises(ValueError):
            Roster.from_bytes(wrong)


@settings(max_examples=300)
@given(st.binary(max_size=80))
@example((2).to_bytes(8, "little") + (0).to_bytes(8, "little") + b"15")
@example((4).to_bytes(8, "little") + (0).to_bytes(8, "little") + b"null")
@example((3).to_bytes(8, "little") + (0).to_bytes(8, "little") + b"[1]")
@example((1).to_bytes(8, "little") + (0).to_bytes(8, "little") + b"\xff")
def test_other_bytes_are_a_roster_or_refused(data: bytes) -> None:
    try:
        roster = Roster.from_bytes(data)
    except ValueError:
        return
    assert roster.to_bytes() == data


def test_a_tensor_described_twice_is_refused() -> None:
    builder = RosterBuilder()
    builder.add(W, Region((0, 0), (1, 6)))
    for other in (dataclasses.replace(W, shape=(4, 7)), dataclasses.replace(W, states=STATES[1])):
        with pytest.raises(ValueError, match="'w' described twice"):
            builder.add(other, Region((0, 0), (1, 6)))


@pytest.mark.parametrize("region", [Region((0,), (1,)), Region((0, 0), (5, 1)), Region((), ())])
def test_a_region_outside_its_tensor_is_refused(region: Region) -> None:
    with pytest.raises(ValueError, match="is not inside 'w' of shape"):
        RosterBuilder().add(W, region)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_roster_set_is_its_rosters(data: st.DataObject) -> None:
    tensors = data.draw(logical_tensors())
    parts = data.draw(st.lists(rosters(tensors), min_size=1, max_size=4))
    merged = RosterSet.merge(parts)
    assert merged.num_ranks == len(parts)
    assert list(merged.tensors) == sorted(
        {t for part in parts for t in part.tensors}, key=lambda t: t.name
    )
    assert merged.num_rows.tolist() == [len(part) for part in parts]
    for rank, part in enumerate(parts):
        own = roster_of(merged, rank)
        assert merged.rows.slot[merged.rows_of(rank)].tolist() == list(range(len(part)))
        for slot in range(len(part)):
            tensor = own.tensors[int(own.tensor[slot])]
            assert tensor == part.tensors[int(part.tensor[slot])]
            assert region_of(own, slot) == region_of(part, slot)
    assert merged.element_bytes.tolist() == [t.element_bytes for t in merged.tensors]


def one(*fragments: tuple[LogicalTensor, Region]) -> Roster:
    builder = RosterBuilder()
    for fragment in fragments:
        builder.add(*fragment)
    return builder.build()


def test_ranks_may_have_different_tensors_and_dims() -> None:
    merged = RosterSet.merge(
        [one((B, Region((2,), (4,)))), NOTHING, one((W, Region((1, 0), (2, 6))))]
    )
    assert [t.name for t in merged.tensors] == ["b", "w"]
    assert merged.num_rows.tolist() == [1, 0, 1]
    assert merged.rows.start.tolist() == [[2, 0], [1, 0]]
    assert merged.rows.stop.tolist() == [[4, 1], [2, 6]]


def test_ranks_that_disagree_on_a_tensor_are_refused() -> None:
    other = dataclasses.replace(W, shape=(4, 7))
    parts = [one((W, Region((0, 0), (1, 6)))), one((other, Region((0, 0), (1, 6))))]
    with pytest.raises(ValueError, match="'w' differs between ranks or layouts"):
        RosterSet.merge(parts)
    with pytest.raises(ValueError, match="'w' of rank 1 is not the common one"):
        RosterSet.merge(parts, tensors=[W])
    with pytest.raises(ValueError, match="'w' of rank 0 is not the common one"):
        RosterSet.merge(parts, tensors=[B])


def test_the_digest_changes_with_every_part() -> None:
    base = [one((W, Region((0, 0), (2, 6))), (B, Region((0,), (3,)))), one((B, Region((3,), (6,))))]
    wider = dataclasses.replace(B, states=STATES[2])
    variants = [
        base,
        base[::-1],
        [*base, NOTHING],
        [base[0], one((B, Region((2,), (6,))))],
        [base[0], one((B, Region((3,), (5,))))],
        [one((B, Region((0,), (3,))), (W, Region((0, 0), (2, 6)))), base[1]],
        [
            one((W, Region((0, 0), (2, 6))), (wider, Region((0,), (3,)))),
            one((wider, Region((3,), (6,)))),
        ],
    ]
    digests = [RosterSet.merge(parts).digest() for parts in variants]
    assert len(set(digests)) == len(variants)
    again = [Roster.from_bytes(part.to_bytes()) for part in base]
    assert RosterSet.merge(again).digest() == digests[0]
