"""No schedule lets ranks wait for each other for ever; the simulator finds those that do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner.schedule import Links, Messages
from tests.planner.links import KINDS, PAIRWISE, all_pairs, links, make_links, place, random_links
from tests.planner.simulator import (
    Deadlock,
    Drain,
    Meet,
    Mismatch,
    Operation,
    Post,
    Program,
    programs,
    simulate,
)


def programs_of(num_ranks: int, links: Links, messages: Messages, **stages: Any) -> list[Program]:
    """What each rank does, its messages in the order of plans."""
    link, part, window = messages.of_links(np.arange(len(links)))
    turn = (links.dst - links.src) % num_ranks
    order = np.lexsort((part, links.src[link], turn[link], window))
    link, window = link[order], window[order]
    message = part[order] * len(links) + link
    return programs(num_ranks, message, links.src[link], links.dst[link], window, **stages)


def stages_of(messages: Messages, seed: int) -> list[int]:
    """Some windows at which a memory stage begins."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, messages.num_windows + 1, draw.integers(0, 4)).tolist()


# ------------------------------------------------------------------ what must not happen


@pytest.mark.parametrize("kind", EngineSchedule)
def test_every_number_of_ranks_finishes(kind: EngineSchedule) -> None:
    for num_ranks in range(2, 65):
        sparse = random_links(num_ranks, num_ranks)
        messages = place(kind, num_ranks, sparse, 300, 4)
        stages = stages_of(messages, num_ranks)
        simulate(programs_of(num_ranks, sparse, messages, drains=stages), seed=num_ranks)
        simulate(programs_of(num_ranks, sparse, messages, meets=stages), buffers=num_ranks % 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8, 17, 32, 33])
def test_everyone_to_everyone_finishes(kind: EngineSchedule, num_ranks: int) -> None:
    pairs = all_pairs(num_ranks)
    every = make_links(pairs, pairs.sum(axis=1) + 1, np.full(len(pairs), 4))
    messages = place(kind, num_ranks, every, 1_000, 16)
    simulate(programs_of(num_ranks, every, messages), slots=16)


@settings(max_examples=100, deadline=None)
@given(
    links(),
    st.sampled_from(EngineSchedule),
    st.sampled_from([200, 2_000, 1 << 28]),
    st.sampled_from([1, 2, 3, 8, 256]),
    st.sampled_from([0, 1, 5]),
    st.booleans(),
    st.integers(0, 1 << 16),
)
def test_all_schedules_finish_in_any_order_of_events(
    drawn: tuple[int, Links],
    kind: EngineSchedule,
    staging_bytes: int,
    window_ops: int,
    buffers: int,
    together: bool,
    seed: int,
) -> None:
    """Whoever goes first, with as few slots and buffers as the bounds ask for."""
    num_ranks, links = drawn
    messages = place(kind, num_ranks, links, staging_bytes, window_ops)
    stages = {"meets" if together else "drains": stages_of(messages, seed)}
    todo = programs_of(num_ranks, links, messages, **stages)
    simulate(todo, buffers=buffers, slots=window_ops, seed=seed)


@pytest.mark.parametrize("kind", PAIRWISE)
def test_two_slots_are_enough_where_a_rank_has_one_peer(kind: EngineSchedule) -> None:
    for num_ranks in (4, 7, 16):
        links = random_links(num_ranks, 3)
        simulate(programs_of(num_ranks, links, place(kind, num_ranks, links, 300, 256)), slots=2)


def test_ranks_with_nothing_to_send_take_part() -> None:
    links = make_links(np.array([[1, 5], [5, 1]]), np.array([9, 9]), np.array([8, 8]))
    for kind in KINDS:
        messages = place(kind, 8, links, 64, 2)
        todo = programs_of(8, links, messages, meets=[0, 2, messages.num_windows])
        assert todo[0] == [Meet()] * 3
        simulate(todo)
        assert programs_of(8, links, messages)[0] == []


# ------------------------------------------------------------------ the simulator can fail


def rank_programs(*ranks: list[str | Drain | Meet]) -> list[Program]:
    """Programs of a few ranks; a window is written as messages ``SRC-DST:NUMBER``."""
    found: list[Program] = []
    for rank, steps in enumerate(ranks):
        program: Program = []
        for step in steps:
            if not isinstance(step, str):
                program.append(step)
                continue
            ends = []
            for text in step.split():
                pair, _, number = text.partition(":")
                src, dst = map(int, pair.split("-"))
                ends.append(Operation(int(number), src, dst, src == rank))
            program.append(Post(tuple(sorted(ends, key=lambda one: one.sending))))
        found.append(program)
    return found


CROSSED = rank_programs(["0-1:0", "0-1:1", "1-0:2"], ["1-0:2", "1-0:3", "0-1:0"])


def test_windows_in_crossed_order_deadlock() -> None:
    """Both wait for a message that the other will post only after its own."""
    with pytest.raises(Deadlock, match="2 ranks"):
        simulate(CROSSED)
    # Neighbouring windows are under way together: those may be crossed.
    simulate(rank_programs(["0-1:0", "1-0:1"], ["1-0:1", "0-1:0"]))
    with pytest.raises(Deadlock):
        simulate(rank_programs(["0-1:0", Drain(), "1-0:1"], ["1-0:1", Drain(), "0-1:0"]))


def test_buffers_hide_a_crossed_order_until_they_are_full() -> None:
    crossed = ["0-1:0 0-1:1", Drain(), "1-0:2 1-0:3"], ["1-0:2 1-0:3", Drain(), "0-1:0 0-1:1"]
    todo = rank_programs(*crossed)
    simulate(todo, buffers=2)
    for buffers in (0, 1):
        with pytest.raises(Deadlock):
            simulate(todo, buffers=buffers)


def test_three_ranks_in_a_circle_deadlock() -> None:
    circle = rank_programs(
        ["0-1:0", Drain(), "2-0:2"], ["1-2:1", Drain(), "0-1:0"], ["2-0:2", Drain(), "1-2:1"]
    )
    with pytest.raises(Deadlock, match="3 ranks"):
        simulate(circle)


def test_a_stage_that_not_all_ranks_come_to_deadlocks() -> None:
    with pytest.raises(Deadlock):
        simulate(rank_programs([Meet(), "0-1:0"], ["0-1:0", Meet()]))


def test_messages_in_another_order_at_the_other_end_are_found() -> None:
    with pytest.raises(Mismatch):
        simulate(rank_programs(["0-1:0", "0-1:1"], ["0-1:1", "0-1:0"]))


def test_more_operations_than_slots_deadlock() -> None:
    """As where a group of operations is cut: everyone receives before anyone sends."""
    both = rank_programs(["0-1:0 1-0:1"], ["0-1:0 1-0:1"])
    simulate(both, slots=2)
    with pytest.raises(Deadlock):
        simulate(both, slots=1)


@pytest.mark.parametrize("kind", PAIRWISE)
@pytest.mark.parametrize("num_ranks", [8, 9, 64])
def test_a_window_that_differs_at_its_ends_deadlocks(kind: EngineSchedule, num_ranks: int) -> None:
    """Ranks with odd numbers count the rounds backwards."""
    pairs = all_pairs(num_ranks)
    one = np.ones(len(pairs), dtype=np.int64)
    every = make_links(pairs, one, one)
    messages = place(kind, num_ranks, every, 1 << 20, 256)
    simulate(programs_of(num_ranks, every, messages))
    wrong = dataclasses.replace(messages, window=messages.num_windows - 1 - messages.window)
    right, backwards = (programs_of(num_ranks, every, one) for one in (messages, wrong))
    simulate(backwards)  # the same at both ends, it is a schedule like any other
    mixed = [both[rank % 2] for rank, both in enumerate(zip(right, backwards, strict=True))]
    with pytest.raises(Deadlock):
        simulate(mixed)
