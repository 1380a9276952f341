"""Predicted seconds: by hand where that can be done, and what every schedule must agree on."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner import Speeds, Topology
from dynatrain_megatron.planner.cost import (
    least_pairwise_seconds,
    predicted_pairwise_seconds,
    predicted_seconds,
)
from dynatrain_megatron.planner.rounds import ring_rounds, schedule_rounds, xor_rounds
from dynatrain_megatron.planner.schedule import Links, Messages
from dynatrain_megatron.planner.windows import place_messages
from tests.planner.links import KINDS, PAIRWISE, links, make_links

# 1 byte takes 1 ns near and 2 ns far, an operation 10 ns.
TOPOLOGY = Topology((0, 0, 1, 1), None, Speeds(10e-9, 1.0, 0.5))


def stream(*rows: tuple[int, int, int]) -> Links:
    """Links of (source, destination, bytes)."""
    table = np.array(rows)
    return make_links(table[:, :2], table[:, 2], np.ones(len(rows), dtype=np.int64))


def in_windows(links: Links, *windows: int) -> Messages:
    """Each link's whole stream in its window."""
    one = np.ones(len(links), dtype=np.int64)
    return Messages(links.numel, one, np.arange(len(links)), np.array(windows))


@pytest.mark.parametrize(
    ("rows", "windows", "expected_ns"),
    [
        ([(0, 1, 100)], [0], 110),
        ([(0, 2, 100)], [0], 210),
        ([(0, 1, 100), (1, 0, 70)], [0, 0], 120),  # both ways at once, two operations
        ([(0, 1, 100), (0, 2, 100)], [0, 0], 320),  # one wire
        ([(0, 1, 100), (2, 3, 300)], [0, 0], 310),  # others' wires
        ([(0, 1, 100), (0, 2, 100)], [1, 0], 320),
        # Rank 1 is busy with 2 for 2020 ns; 0 goes on with window 1 meanwhile, not with window 2.
        ([(0, 1, 100), (0, 3, 100), (1, 2, 1000)], [0, 1, 0], 2020),
        ([(0, 1, 100), (0, 3, 100), (1, 2, 1000), (3, 0, 100)], [0, 1, 0, 2], 2020 + 210),
    ],
)
def test_by_hand(rows: list[tuple[int, int, int]], windows: list[int], expected_ns: int) -> None:
    links = stream(*rows)
    assert predicted_seconds(links, in_windows(links, *windows), TOPOLOGY) == expected_ns / 1e9


def test_a_way_out_that_is_shared_takes_all_that_leaves_the_node() -> None:
    links = stream((0, 2, 100), (1, 3, 100))
    messages = in_windows(links, 0, 0)
    for width, expected_ns in ((None, 210), (2, 210), (1, 400)):
        topology = dataclasses.replace(TOPOLOGY, node_width=width)
        assert predicted_seconds(links, messages, topology) == expected_ns / 1e9
        assert least_pairwise_seconds(links, topology) == expected_ns / 1e9


def test_more_windows_take_more_operations() -> None:
    links = stream((0, 1, 1000))
    messages = Messages(np.array([100]), np.array([10]), np.array([-1]), np.zeros(0, np.int64))
    assert predicted_seconds(links, messages, TOPOLOGY) == 1100 / 1e9


topologies = st.builds(
    lambda per_node, width, operation_s: (per_node, width, Speeds(operation_s, 1.5, 0.4)),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([0.0, 1e-6]),
)


@settings(max_examples=50, deadline=None)
@given(links(32), topologies, st.sampled_from([300, 5_000, 1 << 28]), st.sampled_from([1, 2, 256]))
def test_auto_is_the_least_of_all_and_nothing_beats_its_bounds(
    drawn: tuple[int, Links],
    places: tuple[int, int | None, Speeds],
    staging_bytes: int,
    window_ops: int,
) -> None:
    (num_ranks, links), (per_node, width, speeds) = drawn, places
    nodes = Topology.of_nodes(num_ranks, per_node).node
    topology = Topology(nodes, width, speeds)
    auto, *others = (
        place_messages(links, topology, kind, staging_bytes=staging_bytes, window_ops=window_ops)
        for kind in (EngineSchedule.auto, *KINDS)
    )
    rounding_s = 1e-9 * (1 + len(auto.messages) + sum(len(one.messages) for one in others))
    least = min(other.predicted_s for other in others)
    assert auto.predicted_s <= least + rounding_s
    direct, *pairwise = others
    assert (auto.schedule is direct.schedule) or auto.predicted_s < direct.predicted_s
    bound = least_pairwise_seconds(links, topology)
    for windows in pairwise:
        assert windows.predicted_s >= bound - rounding_s
    wire = (
        np.where(np.array(nodes)[links.src] == np.array(nodes)[links.dst], 1 / 1.5, 1 / 0.4)
        * links.nbytes
    )
    for end in (links.src, links.dst):
        busiest = np.bincount(end, wire, num_ranks).max(initial=0) / 1e9
        assert all(other.predicted_s >= busiest - rounding_s for other in others)


@settings(max_examples=50, deadline=None)
@given(links(32), st.booleans(), st.sampled_from([500, 1 << 28]))
def test_rounds_at_once_are_rounds_window_by_window(
    drawn: tuple[int, Links], xor: bool, staging_bytes: int
) -> None:
    num_ranks, links = drawn
    topology = Topology.of_nodes(num_ranks, 4)
    topology = dataclasses.replace(topology, speeds=Speeds(100e-9, 1.0, 0.5))
    rounds = xor_rounds(links) if xor else ring_rounds(links, num_ranks)
    messages = schedule_rounds(links, rounds, staging_bytes=staging_bytes, window_ops=256)
    fast = predicted_pairwise_seconds(links, rounds, messages, topology)
    exact = predicted_seconds(links, messages, topology)
    if messages.count.max(initial=1) == 1:
        assert fast == exact
    else:  # the last window of a round counts as large as the others
        assert fast == pytest.approx(exact, rel=0.25)


def test_auto_takes_rounds_where_direct_waits() -> None:
    """With two messages at a time, what is placed greedily leaves ranks idle that rounds use."""
    tight, wide = set(), set()
    for seed in range(40):
        draw = np.random.default_rng(seed)
        num_ranks = int(draw.integers(3, 9))
        pairs = np.argwhere(~np.eye(num_ranks, dtype=bool) & (draw.random((num_ranks,) * 2) < 0.7))
        links = make_links(pairs, draw.integers(1, 50, len(pairs)), np.full(len(pairs), 1000))
        topology = Topology.single_node(num_ranks)
        for found, staging_bytes, window_ops in ((tight, 20_000, 2), (wide, 1 << 28, 256)):
            windows = place_messages(
                links,
                topology,
                EngineSchedule.auto,
                staging_bytes=staging_bytes,
                window_ops=window_ops,
            )
            found.add(windows.schedule)
    assert set(PAIRWISE) <= tight
    assert wide == {EngineSchedule.direct}
