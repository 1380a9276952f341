"""Who watches whom, and who is silent."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dynatrain_megatron.elastic.beats import Beats, last_words, watched_by
from dynatrain_megatron.elastic.directory import Directory
from dynatrain_megatron.elastic.store import JobStore, StoreServer
from dynatrain_megatron.whereabouts import Place, to_text


@given(st.integers(1, 12), st.data())
def test_one_that_lives_watches_one_that_does_not(size: int, data: st.DataObject) -> None:
    uids = [f"p{n}" for n in range(size)]
    living = data.draw(st.sets(st.sampled_from(uids), min_size=1, max_size=size))
    watched = {uid for one in living for uid in watched_by(one, uids)}
    assert living == set(uids) or watched - living
    assert all(one not in watched_by(one, uids) for one in uids)


def test_silence_is_judged_by_change(monkeypatch: pytest.MonkeyPatch) -> None:
    server = StoreServer("127.0.0.1")
    directory = Directory(JobStore(server.address, "a job", timeout_s=5))
    beats, now = Beats(directory), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    directory.beat("a", to_text(1, Place("wire", since=98.0)))
    assert beats.silent(["a", "b"], 10) == []
    now += 11
    directory.beat("a", to_text(2, Place("wire", since=98.0)))
    assert beats.silent(["a", "b"], 10) == ["b"]
    assert [word.phase for word in last_words(directory, ["a", "b"])] == ["wire", ""]
    assert last_words(directory, ["a"])[0].seconds == 13.0
