"""Windows of every schedule: bounds, completeness, and the rounds that pair ranks off."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner import Topology
from dynatrain_megatron.planner.rounds import ring_rounds, xor_rounds
from dynatrain_megatron.planner.schedule import Links, Messages
from dynatrain_megatron.planner.windows import place_messages
from tests.planner.links import (
    KINDS,
    PAIRWISE,
    all_pairs,
    assert_bounded,
    links,
    make_links,
    place,
)

EVERY_COUNT = range(2, 65)


def dense(num_ranks: int) -> Links:
    """One element from every rank to every other."""
    pairs = all_pairs(num_ranks)
    one = np.ones(len(pairs), dtype=np.int64)
    return make_links(pairs, one, one)


def rounds_of(kind: EngineSchedule, links: Links, num_ranks: int) -> np.ndarray:
    return xor_rounds(links) if kind is EngineSchedule.xor else ring_rounds(links, num_ranks)


@pytest.mark.parametrize("kind", PAIRWISE)
def test_every_rank_meets_every_other_once_and_one_at_a_time(kind: EngineSchedule) -> None:
    for num_ranks in EVERY_COUNT:
        every = dense(num_ranks)
        round_ = rounds_of(kind, every, num_ranks)
        assert (round_ == round_[every.opposite()]).all()
        met = set(zip(every.src.tolist(), round_.tolist(), strict=True))
        assert len(met) == len(every), f"{num_ranks} ranks: two peers in one round"
        most = (1 << (num_ranks - 1).bit_length()) - 1
        ring = num_ranks - 1 if num_ranks % 2 == 0 else num_ranks
        expected = most if kind is EngineSchedule.xor else ring
        assert set(round_.tolist()) == set(range(expected))
        assert place(kind, num_ranks, every, 1 << 20, 256).num_windows == expected


def test_xor_pairs_a_rank_with_itself_xor_the_round() -> None:
    every = dense(24)
    assert (every.src ^ (xor_rounds(every) + 1) == every.dst).all()


@settings(max_examples=75, deadline=None)
@given(
    links(),
    st.sampled_from(KINDS),
    st.sampled_from([1, 40, 300, 2_000, 1 << 28]),
    st.sampled_from([1, 2, 3, 7, 256]),
)
def test_windows_are_bounded_and_complete(
    drawn: tuple[int, Links], kind: EngineSchedule, staging_bytes: int, window_ops: int
) -> None:
    num_ranks, links = drawn
    messages = place(kind, num_ranks, links, staging_bytes, window_ops)
    assert_bounded(links, messages, num_ranks, staging_bytes, window_ops)
    if kind in PAIRWISE:
        assert_in_rounds(links, messages, rounds_of(kind, links, num_ranks), num_ranks)


def assert_in_rounds(
    links: Links, messages: Messages, round_of_link: np.ndarray, num_ranks: int
) -> None:
    """Windows belong to one round each, in order, and to one pair of each rank."""
    link, _, window = messages.of_links(np.arange(len(links)))
    order = np.argsort(window, kind="stable")
    link, window = link[order], window[order]
    assert (np.diff(round_of_link[link]) >= 0).all()
    both = np.unique(np.stack((window, round_of_link[link])), axis=1)
    assert both.shape[1] == messages.num_windows
    for here, there in ((links.src, links.dst), (links.dst, links.src)):
        peers = np.unique(np.stack((window, here[link], there[link])), axis=1)
        assert np.unique(peers[:2], axis=1).shape == (2, peers.shape[1])


@pytest.mark.parametrize("kind", PAIRWISE)
def test_a_round_has_as_many_windows_as_its_largest_pair_needs(kind: EngineSchedule) -> None:
    pairs = np.array([[0, 1], [1, 0], [2, 3], [0, 2]])  # 0-1 and 2-3 meet at once with xor
    links = make_links(pairs, np.array([96, 32, 16, 64]), np.ones(4, dtype=np.int64))
    messages = place(kind, 4, links, 2 * 64, 256)
    rounds = rounds_of(kind, links, 4)
    counts = {
        (int(a), int(b)): int(n)
        for a, b, n in zip(links.src, links.dst, messages.count, strict=True)
    }
    assert counts == {(0, 1): 2, (1, 0): 2, (2, 3): 1, (0, 2): 1}
    widths = [messages.count[rounds == one].max() for one in np.unique(rounds)]
    assert messages.num_windows == sum(widths)


@pytest.mark.parametrize("kind", PAIRWISE)
@pytest.mark.parametrize("window_ops", [1, 2])
def test_both_ways_share_a_window_where_it_has_room_for_two(
    kind: EngineSchedule, window_ops: int
) -> None:
    links = make_links(np.array([[0, 1], [1, 0]]), np.array([5, 5]), np.array([4, 4]))
    messages = place(kind, 2, links, 1 << 20, window_ops)
    assert (len(messages), messages.num_windows) == (2, 3 - window_ops)


def test_nothing_to_move_is_no_window() -> None:
    nothing = make_links(np.zeros((0, 2), np.int64), *np.zeros((2, 0), np.int64))
    for kind in EngineSchedule:
        windows = place_messages(
            nothing, Topology.single_node(3), kind, staging_bytes=1, window_ops=1
        )
        assert (len(windows.messages), windows.messages.num_windows) == (0, 0)
        assert windows.predicted_s == 0
        assert windows.schedule is not EngineSchedule.auto
