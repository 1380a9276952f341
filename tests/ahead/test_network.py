"""Messages on links: by hand where that can be done, and what must hold of any."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.ahead.network import Network, Traffic, fair_rates, run
from dynatrain_megatron.planner import Speeds, Topology

# Two nodes of two ranks; 1 GB takes 1 s in a node, 2 s out of it.
NODES = (0, 0, 1, 1)
GB = 10**9


def network(width: int | None = None, operation_s: float = 0.0, **more: float) -> Network:
    return Network(Topology(NODES, width, Speeds(operation_s, 1.0, 0.5)), **more)


def traffic(*rows: tuple[int, int, int, float]) -> Traffic:
    """Messages of (source, destination, window, GB)."""
    table = np.array(rows, dtype=float).reshape(-1, 4)
    src, dst, window = table[:, :3].astype(np.int64).T
    return Traffic(src, dst, window, np.rint(table[:, 3] * GB).astype(np.int64))


@pytest.mark.parametrize(
    ("rows", "width", "seconds"),
    [
        ([], None, 0),
        ([(0, 1, 0, 1)], None, 1),
        ([(0, 2, 0, 1)], None, 2),
        ([(0, 1, 0, 1), (1, 0, 0, 1)], None, 1),  # both ways at once
        ([(0, 1, 0, 1), (0, 2, 0, 1)], None, 2),  # each on a link of its own
        ([(0, 2, 0, 1), (1, 2, 0, 1)], None, 4),  # one way into rank 2
        ([(0, 2, 0, 1), (1, 3, 0, 1)], None, 2),
        ([(0, 2, 0, 1), (1, 3, 0, 1)], 1, 4),  # one way out for both
        ([(0, 2, 0, 1), (1, 3, 0, 1)], 2, 2),
        ([(0, 1, 0, 1), (0, 1, 1, 1)], None, 2),  # two windows at a time
        # Rank 0 begins window 2 when window 0 is done, after 2 s: rank 3's way in is free then.
        ([(0, 2, 0, 1), (0, 2, 1, 1), (0, 1, 2, 1)], None, 5),
        # The second window of 3 and 0 waits for 0's first, of 1 GB at half the rate.
        ([(0, 1, 0, 1), (0, 1, 1, 1), (3, 0, 2, 0.5)], None, 3),
    ],
)
def test_by_hand(
    rows: list[tuple[int, int, int, float]], width: int | None, seconds: float
) -> None:
    found = run(traffic(*rows), network(width))
    assert found.seconds == pytest.approx(seconds, rel=0.02)
    assert found.least_s <= found.seconds * (1 + 1e-6)


def test_a_short_message_leaves_its_share_to_the_long_one() -> None:
    # Half the rate each until the short one is done after 1 s; then all of it.
    found = run(traffic((0, 2, 0, 0.25), (0, 3, 0, 0.75)), network())
    assert found.seconds == pytest.approx(2, rel=0.02)


def test_what_is_added_to_bytes() -> None:
    rows = [(0, 1, 0, 1), (0, 2, 0, 1)]
    for more, seconds in (
        ({"efficiency": 0.5}, 4),
        ({"latency_s": 0.5}, 2.5),
        ({"operation_s": 0.25}, 2.5),  # two operations of rank 0 before its messages begin
        ({"node_gb_s": 0.1}, 10),
    ):
        assert run(traffic(*rows), network(**more)).seconds == pytest.approx(seconds, rel=0.02)


def test_the_busiest_link_is_named() -> None:
    assert run(traffic((0, 2, 0, 1), (1, 3, 0, 1)), network(1)).busiest == "ways out of node 0"
    assert run(traffic((3, 1, 0, 1)), network()).busiest == "rank 3 to other nodes"
    assert run(traffic((0, 1, 0, 1)), network(node_gb_s=0.1)).busiest == "inside of node 0"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 12))
def test_fair_rates_fill_links_and_nobody_could_have_more(
    seed: int, flows: int, links: int
) -> None:
    draw = np.random.default_rng(seed)
    capacity = np.append(draw.uniform(0.1, 10, links), np.inf)
    use = draw.integers(0, links, (flows, 4))
    use[:, 1:][draw.random((flows, 3)) < 0.5] = links  # the link without a limit
    # A link counts once for a flow.
    for row in use:
        row[1:][[x in row[:i] for i, x in enumerate(row[1:], 1)]] = links
    rate = fair_rates(use, capacity)
    load = np.bincount(use.ravel(), np.repeat(rate, 4), links + 1)
    assert (load[:-1] <= capacity[:-1] * (1 + 1e-6)).all() and (rate > 0).all()
    full = load >= capacity * (1 - 1e-6)
    for flow in range(flows):  # max-min: on some full link of its own nobody has more
        own = [link for link in use[flow] if full[link]]
        on = [(use == link).any(axis=1) for link in own]
        assert any(rate[members].max() <= rate[flow] * (1 + 1e-6) for members in on)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from([None, 1, 2]),
)
def test_any_traffic_ends_and_takes_no_less_than_its_busiest_link(
    seed: int, messages: int, windows: int, width: int | None
) -> None:
    draw = np.random.default_rng(seed)
    src = draw.integers(0, 4, messages)
    dst = (src + draw.integers(1, 4, messages)) % 4
    window = draw.integers(0, windows, messages)
    nbytes = draw.integers(1, GB, messages)
    found = run(Traffic(src, dst, window, nbytes), network(width))
    assert found.seconds >= found.least_s * (1 - 1e-6)
    assert found.seconds <= 2 * nbytes.sum() / GB * 4 + 1e-6
    again = run(Traffic(src, dst, window, nbytes), network(width))
    assert again == found
