"""Which groups are reused and ended: the same on every process, whatever each has seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.elastic.groups import GroupCache, GroupKey, History, after, reusable
from dynatrain_megatron.elastic.maker import options_text
from dynatrain_megatron.errors import WorldError


def key(members: str, purpose: str = "", index: int = 0) -> GroupKey:
    return GroupKey(tuple(members), "gloo", "", purpose, index)


A, B, C = (key("abcd"), key("ab")), (key("badc"), key("cd")), (key("abcd"), key("cd"))


def test_the_latest_worlds_stay_and_what_they_do_not_need_goes() -> None:
    history = History()
    told = []
    for world in (A, B, A, C):
        change = after(history, world, present="abcd", keep=2)
        history = change.history
        told.append((history.worlds, change.ended))
    assert told == [
        ((A,), ()),
        ((B, A), ()),
        ((A, B), ()),
        ((C, A), (key("badc"),)),  # B's other group is C's too
    ]


def test_a_group_with_a_lost_member_goes_from_every_world() -> None:
    history = after(History(), A, present="abcd", keep=3).history
    change = after(history, (key("abd"), key("ab")), present="abd", keep=3)
    assert change.ended == (key("abcd"),)
    assert change.history.worlds == ((key("abd"), key("ab")), (key("ab"),))


def test_keys_tell_apart_all_that_makes_a_group_unfit() -> None:
    one = key("ab")
    others = [
        key("ba"),
        GroupKey(tuple("ab"), "nccl"),
        GroupKey(tuple("ab"), "gloo", "is_high_priority_stream=True"),
        key("ab", "TENSOR"),
        key("ab", index=1),
    ]
    history = after(History(), (one,), present="ab", keep=1).history
    assert [reusable(history, other) for other in (one, *others)] == [True] + [False] * 5


def test_options_are_equal_as_text_where_they_are_equal() -> None:
    def options(**changes: Any) -> SimpleNamespace:
        config = SimpleNamespace(min_ctas=changes.pop("min_ctas", 1), _private=object())
        return SimpleNamespace(is_high_priority_stream=False, config=config, other=[], **changes)

    assert options_text(None) == ""
    assert options_text(options()) == options_text(options()) != ""
    assert options_text(options()) != options_text(options(min_ctas=2))
    assert options_text(options(group_name="7")) == options_text(options(group_name="8"))


def test_a_process_that_lost_track_is_told_so() -> None:
    cache = GroupCache(history=after(History(), A, present="abcd", keep=1).history)
    with pytest.raises(WorldError, match="needs the job's history"):
        cache.find(key("ab"), "a")
    found = cache.find(key("ab"), "d")  # not in it, and knows that nobody makes it
    assert found is not None and found.held is None
    assert cache.find(key("ad"), "a") is None


class Member:
    """A process of the model job below; it holds a number for each group, equal on its members."""

    def __init__(self, uid: str, keep: int, history: History) -> None:
        self.uid = uid
        self.cache = GroupCache(keep, history)
        self.alive: dict[GroupKey, Any] = {}

    def build(self, world: tuple[GroupKey, ...], serial: int) -> dict[GroupKey, Any]:
        """Reuse or make the world's groups; returns those that were made."""
        made: dict[GroupKey, Any] = {}
        for place, asked in enumerate(world):
            found = self.cache.find(asked, self.uid)
            if found is None and self.uid in asked.members:
                made[asked] = self.alive[asked] = (serial, place)
        return made

    def end(self, groups: list[Any]) -> None:
        for group in groups:
            self.alive = {k: v for k, v in self.alive.items() if v != group}


Switch = tuple[list[str], list[list[int]], int]


@st.composite
def switches(draw: st.DrawFn) -> Switch:
    """A world's processes in order, its groups as places in that order, and who is lost after."""
    order = draw(st.permutations("abcde"))[: draw(st.integers(1, 5))]
    places = st.lists(st.integers(0, len(order) - 1), min_size=1, max_size=3, unique=True)
    return list(order), draw(st.lists(places, max_size=4)), draw(st.integers(0, 3))


@given(st.integers(1, 3), st.lists(switches(), min_size=1, max_size=12))
def test_members_agree_and_hold_no_more_than_the_latest_worlds_need(
    keep: int, plan: list[Switch]
) -> None:
    """Processes join with the history of one that is there, leave, and come back as others."""
    born: dict[str, int] = {}
    members: dict[str, Member] = {}
    for serial, (order, groups, _) in enumerate(plan):
        shared = next((members[n].cache.history for n in order if n in members), History())
        for name in [n for n in members if n not in order]:
            del members[name]  # it left: as a new process it has another uid
        for name in order:
            if name not in members:
                born[name] = born.get(name, 0) + 1
                members[name] = Member(f"{name}{born[name]}", keep, shared)
        uids = [members[name].uid for name in order]
        asked = [GroupKey(tuple(uids), "gloo")]
        for places in groups:
            one = GroupKey(tuple(uids[p] for p in sorted(places)), "gloo", purpose="x")
            while one in asked:
                one = GroupKey(one.members, "gloo", purpose="x", index=one.index + 1)
            asked.append(one)
        world = tuple(asked)
        made = {m.uid: m.build(world, serial) for m in members.values()}
        for one in world:
            held = {m.alive[one] for m in members.values() if m.uid in one.members}
            assert len(held) == 1, "members of one group hold different ones"
        for m in members.values():
            m.end(m.cache.commit(world, made[m.uid], present=uids))
        histories = {m.cache.history for m in members.values()}
        assert len(histories) == 1
        (history,) = histories
        assert history.worlds[0] == world and len(history.worlds) <= keep
        for m in members.values():
            assert set(m.alive) == {k for k in history.all_keys() if m.uid in k.members}
            assert len(m.cache) == len(m.alive)


def test_a_parked_process_ends_what_the_others_ended_meanwhile() -> None:
    there, away = Member("a", 2, History()), Member("b", 2, History())
    both, alone = (key("ab"), key("ab", "x")), (key("a"),)
    for m in (there, away):
        m.end(m.cache.commit(both, m.build(both, 0), present="ab"))
    for serial, world in enumerate((alone, (key("a"), key("a", "y"))), start=1):
        there.end(there.cache.commit(world, there.build(world, serial), present="ab"))
    assert not there.alive.keys() & set(both) and set(away.alive) == set(both)
    away.end(away.cache.catch_up(there.cache.history))
    assert away.alive == {} and len(away.cache) == 0
