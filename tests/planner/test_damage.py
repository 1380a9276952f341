"""Plans and rosters damaged in random ways: what is wrong is always found, and named.

Whether a damaged plan is wrong is counted element by element: some damage changes nothing, such as
another holder of the same replica.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner import PlanOptions, Speeds, Topology
from dynatrain_megatron.planner.cache import PlanCache
from dynatrain_megatron.planner.checks import check_coverage, check_messages, check_nothing_lost
from dynatrain_megatron.planner.routes import Routes
from dynatrain_megatron.vps import Region, Roster, RosterBuilder, RosterSet
from dynatrain_megatron.vps.boxes import IntArray
from tests.planner.worlds import (
    Case,
    irregular_cases,
    mixed_cases,
    region_of,
    roster_of,
    shared_cases,
)

COLUMNS = ("tensor", "src", "dst", "src_slot", "dst_slot", "start", "stop")
CASES = st.one_of(mixed_cases(), irregular_cases(), shared_cases(5))
NAMED = re.compile(
    r"'.*' \[.*\) from rank -?\d+ to rank -?\d+( is outside its .* fragment| is sent on when .*"
    r"| and '.*' \[.*\) from rank \d+ to rank \d+ overlap in \[.*\))"
    r"|'.*' \[.*\) comes from no rank: slot \d+ of rank \d+ gets \d+ of \d+ elements"
    r"|tensor -?\d+ of none .*"
)


def passes_of(case: Case) -> list[Routes]:
    """All pieces of a sound plan, pass by pass, with relays where there can be any."""
    size = len(case.before)
    plan = case.plan(Topology((0,) * size, None, Speeds(operation_s=0)))
    return [each.schedule.pieces.and_also(each.schedule.retained) for each in plan.passes]


@st.composite
def damaged(draw: st.DrawFn, passes: list[Routes]) -> list[Routes]:
    """The same with one to three changes: a number, a lost, doubled or exchanged piece."""
    found = list(passes)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(found) - 1))
        routes = found[number]
        if not len(routes):
            continue
        piece = draw(st.integers(0, len(routes) - 1))
        kind = draw(st.sampled_from(["number", "number", "number", "lost", "doubled", "exchanged"]))
        index = np.arange(len(routes))
        if kind == "lost":
            found[number] = routes.take(index != piece)
        elif kind == "doubled":
            found[number] = routes.take(np.append(index, piece))
        elif kind == "exchanged":
            other = draw(st.integers(0, len(routes) - 1))
            name = draw(st.sampled_from(COLUMNS))
            column = getattr(routes, name).copy()
            column[[piece, other]] = column[[other, piece]]
            found[number] = dataclasses.replace(routes, **{name: column})
        else:
            name = draw(st.sampled_from(COLUMNS))
            column = getattr(routes, name).copy()
            at: tuple[int, ...] = (piece,)
            if column.ndim > 1:
                if not column.shape[1]:
                    continue
                at = (piece, draw(st.integers(0, column.shape[1] - 1)))
            column[at] += draw(st.sampled_from([-2, -1, 1, 2]))
            found[number] = dataclasses.replace(routes, **{name: column})
    return found


def is_sound(passes: list[Routes], source: RosterSet, target: RosterSet) -> bool:
    """Each target element is written once, from a fragment that has it by then; one by one."""
    dims = target.rows.start.shape[1]
    fragments = {side: fragments_of(side) for side in (source, target)}
    written = {
        place: np.zeros(one.stop - one.start, dtype=np.int64)
        for place, one in fragments[target].items()
    }
    for number, routes in enumerate(passes):
        given = target if number else source
        before = {place: count.copy() for place, count in written.items()}
        for i in range(len(routes)):
            start, stop = routes.start[i], routes.stop[i]
            ends = (
                (given, (int(routes.src[i]), int(routes.src_slot[i]))),
                (target, (int(routes.dst[i]), int(routes.dst_slot[i]))),
            )
            cuts = []
            for side, place in ends:
                one = fragments[side].get(place)
                if one is None or one.tensor != int(routes.tensor[i]):
                    return False
                _, low, high = one
                if (start < low).any() or (stop > high).any() or (start > stop).any():
                    return False
                cuts.append(
                    tuple(slice(int(start[d] - low[d]), int(stop[d] - low[d])) for d in range(dims))
                )
            if number and (before[ends[0][1]][cuts[0]] != 1).any():
                return False
            written[ends[1][1]][cuts[1]] += 1
    return all((count == 1).all() for count in written.values())


class Fragment(NamedTuple):
    """One row of a roster."""

    tensor: int
    start: IntArray
    stop: IntArray


def fragments_of(rosters: RosterSet) -> dict[tuple[int, int], Fragment]:
    """All fragments by rank and slot."""
    return {
        (rank, slot): Fragment(tensor, roster.start[slot], roster.stop[slot])
        for rank in range(rosters.num_ranks)
        for roster in [roster_of(rosters, rank)]
        for slot, tensor in enumerate(roster.tensor.tolist())
    }


def said_of(passes: list[Routes], case: Case, rank: int | None = None) -> str:
    first, *relays = passes
    try:
        check_coverage(first, case.source, case.target, rank, relays=relays)
    except TransitionError as error:
        return str(error)
    return ""


@settings(max_examples=125, deadline=None)
@given(CASES, st.data())
def test_a_damaged_plan_is_found_and_a_sound_one_is_not(case: Case, data: st.DataObject) -> None:
    passes = passes_of(case)
    assert is_sound(passes, case.source, case.target)
    assert said_of(passes, case) == ""
    changed = data.draw(damaged(passes))
    said = said_of(changed, case)
    assert (said == "") == is_sound(changed, case.source, case.target), said
    assert not said or NAMED.fullmatch(said.replace("\n", " ")), said


@settings(max_examples=40, deadline=None)
@given(CASES, st.data())
def test_what_is_wrong_is_found_by_a_rank_that_proves_its_own_part(
    case: Case, data: st.DataObject
) -> None:
    passes = passes_of(case)
    changed = data.draw(damaged(passes))
    own = [said_of(changed, case, rank) for rank in range(len(case.before))]
    assert any(own) == bool(said_of(changed, case))


def test_the_part_that_nobody_brings_is_named() -> None:
    case, routes = small_case()
    (lost,) = np.nonzero((routes.dst == 1) & (routes.start[:, 0] == 2))[0].tolist()
    kept = routes.take(np.arange(len(routes)) != lost)
    with pytest.raises(TransitionError, match=re.escape(
        "'table' [[2, 0], [4, 3]) comes from no rank: slot 0 of rank 1 gets 6 of 12 elements"
    )):  # fmt: skip
        check_coverage(kept, case.source, case.target)
    stop = routes.stop.copy()
    stop[lost, 1] = 2
    with pytest.raises(TransitionError, match=re.escape("'table' [[2, 2], [4, 3]) comes from no")):
        check_coverage(dataclasses.replace(routes, stop=stop), case.source, case.target)


def test_the_part_that_two_bring_is_named() -> None:
    case, routes = small_case()
    twice = routes.take(np.append(np.arange(len(routes)), len(routes) - 1))
    assert re.fullmatch(
        r"'table' (\[.*\)) from rank (\d) to rank (\d) and 'table' \1 from rank \2 to rank \3 "
        r"overlap in \1",
        said_of([twice], case),
    )


def small_case() -> tuple[Case, Routes]:
    """Rows 0 and 1 of a table are on rank 0, the others on rank 1; rank 1 wants them all."""
    from tests.planner.worlds import FLOAT32, LogicalTensor

    table = LogicalTensor("table", (4, 3), FLOAT32)
    before, after = ([RosterBuilder(), RosterBuilder()] for _ in range(2))
    before[0].add(table, Region((0, 0), (2, 3)))
    before[1].add(table, Region((2, 0), (4, 3)))
    after[1].add(table, Region.whole((4, 3)))
    case = Case(tuple(b.build() for b in before), tuple(b.build() for b in after))
    (routes,) = passes_of(case)
    return case, routes


@settings(max_examples=40, deadline=None)
@given(CASES, st.sampled_from([16, 1 << 20]), st.data())
def test_a_piece_in_no_message_or_in_another_is_found(
    case: Case, staging: int, data: st.DataObject
) -> None:
    schedule = case.plan(options=PlanOptions(staging_bytes=staging)).passes[0].schedule
    check_messages(schedule)
    if not len(schedule):
        return
    m = data.draw(st.integers(0, len(schedule) - 1))
    name = data.draw(st.sampled_from(["src", "dst", "first_piece"]))
    column = getattr(schedule, name).copy()
    column[m] += data.draw(st.sampled_from([-1, 1]))
    changed = dataclasses.replace(schedule, **{name: column})
    pieces, first = changed.pieces, changed.first_piece.tolist()
    carried = [(m, i) for m in range(len(changed)) for i in range(first[m], first[m + 1])]
    sound = [i for _, i in carried] == list(range(len(pieces))) and all(
        (changed.src[m], changed.dst[m]) == (pieces.src[i], pieces.dst[i]) for m, i in carried
    )
    try:
        check_messages(changed)
    except TransitionError as error:
        assert not sound, error
    else:
        assert sound


# ------------------------------------------------------------------ rosters


@st.composite
def damaged_rosters(draw: st.DrawFn, rosters: tuple[Roster, ...]) -> tuple[Roster, ...]:
    """One fragment is lost, or is cut short in one dim."""
    places = [(r, s) for r, roster in enumerate(rosters) for s in range(len(roster))]
    if not places:
        return rosters
    rank, slot = draw(st.sampled_from(places))
    found = list(rosters)
    builder = RosterBuilder()
    for own in range(len(rosters[rank])):
        region: Region | None = region_of(rosters[rank], own)
        assert region is not None
        if own == slot:
            dims = [d for d, n in enumerate(region.shape) if n > 1]
            if not dims or draw(st.booleans()):
                region = None
            else:
                dim = draw(st.sampled_from(dims))
                stop = list(region.stop)
                stop[dim] -= 1
                region = Region(region.start, tuple(stop))
        if region is not None:
            builder.add(rosters[rank].tensors[int(rosters[rank].tensor[own])], region)
    found[rank] = builder.build()
    return tuple(found)


def elements(rosters: RosterSet) -> set[tuple[str, tuple[int, ...]]]:
    """Every element that any rank holds, by tensor and position."""
    found: set[tuple[str, tuple[int, ...]]] = set()
    for number, start, stop in fragments_of(rosters).values():
        tensor = rosters.tensors[number]
        ndim = len(tensor.shape)
        for place in np.ndindex(tuple((stop - start)[:ndim].tolist())):
            at = tuple(int(a) + b for a, b in zip(start, place, strict=False))
            found.add((tensor.name, at))
    return found


@settings(max_examples=60, deadline=None)
@given(mixed_cases(), st.booleans(), st.data())
def test_a_damaged_roster_is_found_unless_another_rank_has_the_same(
    case: Case, in_source: bool, data: st.DataObject
) -> None:
    """What a job does first: nothing lost, and all that is wanted held by somebody."""
    side = case.before if in_source else case.after
    changed = data.draw(damaged_rosters(side))
    broken = Case(changed, case.after) if in_source else Case(case.before, changed)
    whole = elements(broken.source) == elements(broken.target)
    topology = Topology.single_node(len(side))
    try:
        PlanCache().plan(broken.source, broken.target, topology, PlanOptions())
    except TransitionError as error:
        assert not whole
        assert re.search(r"'.*' (has \d+ elements now and \d+ there|: rank)", str(error))
    else:
        assert whole


@settings(max_examples=40, deadline=None)
@given(mixed_cases(), st.data())
def test_what_is_lost_is_named(case: Case, data: st.DataObject) -> None:
    changed = Case(case.before, data.draw(damaged_rosters(case.after)))
    lost = elements(changed.source) - elements(changed.target)
    if not lost:
        return
    with pytest.raises(TransitionError) as caught:
        check_nothing_lost(changed.source, changed.target)
    found = re.search(
        r"of '(.*)' \[\[(.*)\], \[.*\]\) is held now and not there, by ranks \[\d",
        str(caught.value),
    )
    assert found is not None, str(caught.value)
    at = tuple(int(x) for x in found[2].split(",") if x)
    assert (found[1], at) in lost
