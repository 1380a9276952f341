"""Whom and what rank 0 announces: from the processes there are, and the degrees there were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.plugin.leader import Capacity, _read_request, closest, wanted_world


def test_those_that_stay_come_first_then_those_that_wait() -> None:
    capacity = Capacity(("a", "b", "c"), frozenset("a"), ("d", "e"))
    assert capacity.take(3) == ("b", "c", "d")
    with pytest.raises(SwitchRefused, match="needs 5 processes; 4 can be had: 3 of the job, 1 of"):
        capacity.take(5)


@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 4, 6]),
    st.sampled_from([1, 2]),
    st.integers(1, 24),
)
def test_the_closest_layouts_are_parts_of_the_one_in_force(
    tp: int, pp: int, cp: int, world: int
) -> None:
    found = closest(ParallelLayout(tp=tp, pp=pp, cp=cp), world)
    own = {"tp": tp, "pp": pp, "cp": cp, "ep": 1, "world": world}
    assert (own in found) == (world % (tp * pp * cp) == 0)
    assert own not in found or found[0] == own
    assert {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "world": world} in found
    for wanted in found:
        assert world % (wanted["tp"] * wanted["pp"] * wanted["cp"]) == 0
        assert not any(own[axis] % wanted[axis] for axis in ("tp", "pp", "cp", "ep"))


def test_only_world_asks_for_other_ranks() -> None:
    assert wanted_world({"tp": 1, "world": 3}) == 3
    assert wanted_world({"tp": 1, "dp": 2}) is None and wanted_world("tp2-dp2") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "5", '{"rank": 1}', '{"world": 0}', '{"world": "2"}', '{"at": -1}'],
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(SwitchRefused):
        _read_request(text)
