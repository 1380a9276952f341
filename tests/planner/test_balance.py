"""Who sends: everything from a nearest holder, and the busiest as little as can be.

What can be is worked out by a linear program over all choices (:mod:`planner.bound`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Plan, PlanOptions, Speeds, Topology, make_plan
from dynatrain_megatron.planner.balance import Classes, share_out
from dynatrain_megatron.planner.bound import Load, least_load, load_of
from dynatrain_megatron.planner.checks import lower_bound_bytes
from dynatrain_megatron.shapes import Model, make_rosters
from dynatrain_megatron.vps import RosterBuilder, RosterSet
from tests.layout.every import layouts
from tests.planner.worlds import Case, bytes_of, layout_case
from tests.shapes.test_rosters import TINY, TINY_MOE, TINY_SHARED, TINY_TIED

NUM_TRANSITIONS = 60
WORLDS = (8, 12, 16, 24, 32)


@st.composite
def classes(draw: st.DrawFn, num_ranks: int = 8) -> Classes:
    """Any candidates and amounts."""
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks)
    candidates = [sorted(one) for one in draw(st.lists(ranks, min_size=1, max_size=6))]
    number = len(candidates)
    return Classes(
        np.cumsum([0, *map(len, candidates)]),
        np.concatenate(candidates),
        np.array(draw(st.lists(st.integers(0, 1000), min_size=number, max_size=number))),
        np.array(draw(st.lists(st.booleans(), min_size=number, max_size=number))),
    )


def owners(chosen: Classes) -> np.ndarray:
    return np.repeat(np.arange(len(chosen)), np.diff(chosen.first))


@settings(max_examples=150, deadline=None)
@given(
    classes(), st.lists(st.integers(0, 500), min_size=8, max_size=8), st.sampled_from([1, 2, None])
)
def test_all_is_shared_out(chosen: Classes, load: list[int], width: int | None) -> None:
    topology = Topology.of_nodes(8, 2)
    topology = dataclasses.replace(topology, node_width=width)
    amount = share_out(chosen, np.array(load), np.zeros(4, dtype=np.int64), topology)
    assert (amount >= 0).all()
    assert np.bincount(owners(chosen), amount, len(chosen)).tolist() == chosen.nbytes.tolist()


@settings(max_examples=150, deadline=None)
@given(classes(), st.lists(st.integers(0, 500), min_size=8, max_size=8))
def test_nothing_is_sent_by_one_that_is_busier_than_another_candidate(
    chosen: Classes, load: list[int]
) -> None:
    topology = Topology.of_nodes(8, 2)
    amount = share_out(chosen, np.array(load), np.zeros(4, dtype=np.int64), topology)
    total = np.array(load) + np.bincount(chosen.rank, amount, 8)
    # Whole bytes: over a chain of classes they may add up to one a class.
    for number in range(len(chosen)):
        own = slice(chosen.first[number], chosen.first[number + 1])
        sends = amount[own] > 0
        if sends.any():
            least = total[chosen.rank[own]].min()
            assert total[chosen.rank[own][sends]].max() <= least + len(chosen)


def test_a_class_is_poured_level() -> None:
    three = Classes(
        np.array([0, 3]), np.array([0, 1, 2]), np.array([3]), np.zeros(1, dtype=np.bool_)
    )
    one = Topology.single_node(4)
    out = np.zeros(1, dtype=np.int64)
    assert share_out(three, np.array([3, 1, 2, 1]), out, one).tolist() == [0, 2, 1]


@pytest.mark.parametrize(("width", "sent"), [(None, [4, 4, 4]), (2, [4, 4, 4]), (1, [3, 3, 6])])
def test_a_nodes_way_out_counts(width: int | None, sent: list[int]) -> None:
    # Ranks 0 and 1 share a node, rank 2 has one of its own; rank 3 wants it all.
    topology = Topology((0, 0, 1, 2), width)
    chosen = Classes(
        np.array([0, 3]), np.array([0, 1, 2]), np.array([12]), np.ones(1, dtype=np.bool_)
    )
    assert (
        share_out(chosen, np.zeros(4, np.int64), np.zeros(3, np.int64), topology).tolist() == sent
    )


# ------------------------------------------------------------------ against the best there is


class Transition(NamedTuple):
    """Two layouts of a model, where its states are replicated."""

    kind: str
    source: str
    target: str
    before: RosterSet
    after: RosterSet
    topology: Topology


def transitions(seed: int) -> Iterator[Transition]:
    """Any of them, without end."""
    draw = random.Random(seed)
    while True:
        kind = draw.choice(["plain optimizer", "weights only", "optimizer instances"])
        model = draw.choice([TINY, TINY_TIED, TINY_MOE, TINY_SHARED])
        one, other = (any_layout(draw, model, kind) for _ in range(2))
        # Sometimes a rank more than both need; often more or fewer in the one than in the other.
        size = max(one.world, other.world) + draw.choice([0, 0, 1])
        before, after = (
            make_rosters(model, layout, weights_only=kind == "weights only", num_ranks=size)
            for layout in (one, other)
        )
        node = [rank // draw.choice([4, 8]) for rank in range(size)]
        if draw.random() < 0.3:
            draw.shuffle(node)
        topology = dataclasses.replace(
            Topology.from_hosts([str(n) for n in node]), node_width=draw.choice([None, 1, 2, 4])
        )
        topology = dataclasses.replace(topology, speeds=Speeds(operation_s=0))  # these are small
        yield Transition(kind, str(one), str(other), before, after, topology)


def any_layout(draw: random.Random, model: Model, kind: str) -> ParallelLayout:
    axes = ("tp", "pp", "dp") if model.experts is None else ("tp", "pp", "dp", "ep")
    while True:
        layout = draw.choice(layouts(draw.choice(WORLDS), axes))
        if any(8 % size for size in (layout.tp, layout.pp, layout.ep)):
            continue
        if kind != "optimizer instances":
            return dataclasses.replace(layout, dist_opt=kind == "weights only")
        if layout.dp % 2 == layout.expert_dp % 2 == 0:
            return dataclasses.replace(layout, instances=2)


def judged(seed: int, *, relay: bool) -> Iterator[tuple[str, Transition, Plan, Load, Load]]:
    """(name, transition, its plan, its load, the least load) of those where much has a choice."""
    options = PlanOptions(relay=relay)
    found = 0
    for one in transitions(seed):
        best, choice = least_load(one.before, one.after, one.topology, relay=relay)
        if choice < 0.05:  # nearly all has one holder
            continue
        plan = make_plan(one.before, one.after, one.topology, options, rank=0)
        name = f"{one.kind}: {one.source} -> {one.target} on {one.topology}"
        yield name, one, plan, load_of(plan, one.topology), best
        found += 1
        if found == NUM_TRANSITIONS:
            return


def test_the_busiest_sends_little_more_than_it_must() -> None:
    pytest.importorskip("scipy", reason="the best possible is found by a linear program")
    gaps: dict[str, float] = {}
    for name, one, plan, have, best in judged(0, relay=False):
        gaps[name] = have.sending / best.sending
        if one.topology.node_width is None:  # then there is nothing but the senders
            assert have.sender / best.sender <= 1.001, name
        need = [lower_bound_bytes(one.before, one.after, r) for r in range(plan.num_ranks)]
        assert plan.max_recv_bytes == max(need), name  # receivers have no choice
    assert {one.split(":")[0] for one in gaps} == {
        "plain optimizer", "weights only", "optimizer instances"
    }  # fmt: skip
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] <= 1.01, worst
    assert sum(gaps.values()) / len(gaps) <= 1.002


def test_with_relays_the_busiest_has_little_more_to_do_than_it_must() -> None:
    pytest.importorskip("scipy", reason="the best possible is found by a linear program")
    gaps: dict[str, float] = {}
    num_relayed = 0
    for name, _, plan, have, best in judged(1, relay=True):
        gaps[name] = have.time / best.time
        num_relayed += len(plan.passes) > 1
    assert num_relayed >= NUM_TRANSITIONS // 4
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] <= 1.05, worst
    assert sum(gaps.values()) / len(gaps) <= 1.02


def test_the_bound_itself() -> None:
    pytest.importorskip("scipy")
    # Ranks 0 to 3 hold everything, rank 4 wants it.
    layout = ParallelLayout(dp=5, dist_opt=False)
    whole, nothing = layout_case(layout, layout).before[0], RosterBuilder().build()
    nbytes = bytes_of(whole)
    case = Case((whole,) * 4 + (nothing,), (nothing,) * 4 + (whole,))
    for node, width, time in (
        ((0, 0, 1, 1, 2), None, nbytes / 4),
        ((0, 0, 1, 1, 2), 1, nbytes / 2),
        ((0, 0, 0, 1, 2), 1, nbytes / 2),
        ((0, 0, 0, 1, 0), 1, nbytes / 3),
    ):
        best, choice = least_load(case.source, case.target, Topology(node, width))
        assert best.sending == pytest.approx(time)
        assert choice == 1
