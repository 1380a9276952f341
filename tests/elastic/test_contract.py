"""Torch is as the worlds need it, and a torch that is not is refused in clear words."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dynatrain_megatron.elastic import contract, records
from dynatrain_megatron.errors import HostMismatch


@pytest.mark.host
def test_this_torch_is_as_worlds_need_it() -> None:
    contract.check()


class Without:
    """A module or class that lacks the name at the end of a path."""

    def __init__(self, inner: Any, path: list[str]) -> None:
        self.inner, self.path = inner, path

    def __getattr__(self, name: str) -> Any:
        if [name] == self.path:
            raise AttributeError(name)
        value = getattr(self.inner, name)
        return Without(value, self.path[1:]) if name == self.path[0] else value


@pytest.mark.host
@pytest.mark.parametrize("entry", contract.NAMES, ids=lambda entry: entry.name)
def test_a_missing_name_is_refused_with_its_reason(
    entry: contract.TorchName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "torch", Without(torch, entry.name.split(".")))
    with pytest.raises(HostMismatch, match=re.escape(f"{entry.name} ({entry.reason})")) as caught:
        contract.check()
    assert "install torch 2.11 to 2.14" in str(caught.value)


@pytest.mark.host
def test_what_a_later_torch_may_add_to_its_record_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(c10d._World, "pg_novelty", property(lambda self: {}), raising=False)
    with pytest.raises(HostMismatch, match="keeps pg_novelty too"):
        contract.check()


@pytest.mark.host
@pytest.mark.parametrize("name", ["pg_coalesce_state", "comms"])
def test_state_that_all_worlds_would_share_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c10d._World, name, property(lambda self, common={}: common))
    with pytest.raises(HostMismatch, match=f"shares {name}"):
        contract.check()


@pytest.mark.host
def test_a_table_that_torch_gave_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(c10d._World, "pg_to_tag")
    with pytest.raises(HostMismatch, match="keeps no pg_to_tag"):
        contract.check()


@pytest.mark.host
def test_records_share_nothing() -> None:
    one, other = records.Record(100), records.Record(200)
    for name in contract.TABLES:
        assert getattr(one, name) == {} and getattr(one, name) is not getattr(other, name)
    assert (one.group_count, other.group_count) == (100, 200)
    assert vars(c10d._World()).keys() <= vars(one).keys()


def test_only_the_listed_internals_are_used() -> None:
    """Private names of torch in the package's sources are those of the contract."""
    room = Path(contract.__file__).parent
    used: set[str] = set()
    for source in room.glob("*.py"):
        if source.name != "contract.py":
            text = source.read_text()
            used |= set(re.findall(r"\b(?:c10d|_c10d|group|dist|module)\.(_\w+)", text))
    listed = {entry.name.rpartition(".")[2] for entry in contract.NAMES}
    assert used == {name for name in listed if name.startswith("_")}


def test_a_thread_sees_the_record_it_entered_and_others_see_the_one_in_force() -> None:
    before, group = records.in_force(), object()
    record = records.Record(700)
    record.default_pg = group  # type: ignore[assignment]
    seen: list[Any] = []
    try:
        with records.entered(record):
            assert dist.group.WORLD is group and dist.is_initialized()
            thread = threading.Thread(target=lambda: seen.append(dist.group.WORLD))
            thread.start()
            thread.join()
            c10d._world.group_count += 1
        assert seen == [before.default_pg] and dist.group.WORLD is before.default_pg
        assert record.group_count == 701
    finally:
        record.default_pg = None
