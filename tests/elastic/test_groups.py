"""Which groups are reused and ended: the same on every process, whatever each has seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynatrain_megatron.adapters.built import BuiltCache
from dynatrain_megatron.elastic.groups import GroupKey, all_held, options_text


def key(members: str, purpose: str = "", index: int = 0) -> GroupKey:
    return GroupKey(tuple(members), "gloo", "", purpose, index)


def test_keys_tell_apart_all_that_makes_a_group_unfit() -> None:
    one = key("ab")
    others = [
        key("ba"),
        GroupKey(tuple("ab"), "nccl"),
        GroupKey(tuple("ab"), "gloo", "is_high_priority_stream=True"),
        key("ab", "TENSOR"),
        key("ab", index=1),
    ]
    held: Any = all_held([{one: "group"}])
    assert [other in held for other in (key("ab"), *others)] == [True] + [False] * 5


def test_options_are_equal_as_text_where_they_are_equal() -> None:
    def options(**changes: Any) -> SimpleNamespace:
        config = SimpleNamespace(min_ctas=changes.pop("min_ctas", 1), _private=object())
        return SimpleNamespace(is_high_priority_stream=False, config=config, other=[], **changes)

    assert options_text(None) == ""
    assert options_text(options()) == options_text(options()) != ""
    assert options_text(options()) != options_text(options(min_ctas=2))
    assert options_text(options(group_name="7")) == options_text(options(group_name="8"))


@dataclass
class Member:
    """A process of the model job below; a group is the switch it was made at, and its place."""

    uid: str
    dormant: BuiltCache
    alive: set[Any] = field(default_factory=set)
    built: Any = None

    def switch(self, asked: list[GroupKey], uids: tuple[str, ...], serial: int) -> None:
        """As ``hand_over`` does it, with groups alone."""
        layout = SimpleNamespace(processes=uids, groups=tuple(asked))
        if self.built is not None and self.built.key == hashable(layout):
            return  # a job that is in a layout does not switch to it
        woken = self.dormant.take(hashable(layout))
        held = {}
        going = self.dormant.giving_way(uids, self.built and self.built.key)
        known = all_held(each.world.held for each in going)
        for place, one in enumerate(asked):
            if woken is None and self.uid in one.members:
                held[one] = known.get(one, (serial, place))
        new = woken or SimpleNamespace(key=hashable(layout), world=SimpleNamespace(held=held))
        self.alive.update(new.world.held.values())
        ended, left = self.dormant.drop(uids), self.built
        if left is not None and set(left.key.processes) <= set(uids):
            ended += self.dormant.put(left)
        elif left is not None:
            ended.append(left)
        self.built = new
        assert woken is not None or [each for each in ended if each is not left] == going
        for gone in ended:
            self.alive -= set(gone.world.held.values()) - set(new.world.held.values())
        for each in self.dormant:  # a group is in one world, whose end is no loss to another
            assert set(each.world.held.values()).isdisjoint(new.world.held.values())


@dataclass(frozen=True)
class Layout:
    """What stands for a built layout's key."""

    processes: tuple[str, ...]
    groups: tuple[GroupKey, ...]


def hashable(layout: Any) -> Any:
    return Layout(layout.processes, layout.groups)


Switch = tuple[list[str], list[list[int]]]


@st.composite
def switches(draw: st.DrawFn) -> Switch:
    """A world's processes in order, and its groups as places in that order."""
    order = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
    places = st.lists(st.integers(0, len(order) - 1), min_size=1, max_size=3, unique=True)
    return list(order), draw(st.lists(places, max_size=3))


@given(st.integers(0, 3), st.lists(switches(), min_size=1, max_size=14))
def test_members_agree_and_hold_no_more_than_their_worlds_need(
    keep: int, plan: list[Switch]
) -> None:
    """Processes come with nothing, leave with nothing, and come back, under the same uid or not."""
    members: dict[str, Member] = {}
    for serial, (order, groups) in enumerate(plan):
        uids = tuple(order)
        for uid in [uid for uid in members if uid not in uids]:
            del members[uid]
        for uid in uids:
            members.setdefault(uid, Member(uid, BuiltCache(keep)))
        asked = [key("".join(uids))]
        for places in groups:
            one = key("".join(uids[p] for p in sorted(places)), "x")
            while one in asked:
                one = key("".join(one.members), "x", one.index + 1)
            asked.append(one)
        for member in members.values():
            member.switch(asked, uids, serial)
        for one in asked:
            held = {members[uid].built.world.held[one] for uid in one.members}
            assert len(held) == 1, "members of one group hold different ones"
        for member in members.values():
            worlds = [each.world for each in (*member.dormant, member.built)]
            needed = {held for world in worlds for held in world.held.values()}
            assert member.alive == needed
            assert len(member.dormant) <= keep
