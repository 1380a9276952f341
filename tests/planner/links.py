"""Random links, and what makers of windows are held against."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.planner import Topology
from dynatrain_megatron.planner.schedule import WINDOWS_UNDER_WAY, Links, Messages, staged
from dynatrain_megatron.planner.windows import place_messages
from dynatrain_megatron.vps.boxes import IntArray

KINDS = [kind for kind in EngineSchedule if kind is not EngineSchedule.auto]
PAIRWISE = [EngineSchedule.xor, EngineSchedule.ring]


def make_links(pairs: IntArray, numel: IntArray, element_bytes: IntArray) -> Links:
    """Links of pairs [n, 2], sorted."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    pairs, numel, size = pairs[order], numel[order], element_bytes[order]
    return Links(pairs[:, 0], pairs[:, 1], numel, numel * size, size)


def all_pairs(num_ranks: int) -> IntArray:
    pairs = np.indices((num_ranks, num_ranks)).reshape(2, -1).T
    return pairs[pairs[:, 0] != pairs[:, 1]]


def random_links(num_ranks: int, seed: int, *, most: int = 8) -> Links:
    """Some pairs of ranks, streams of up to ``most`` elements of several sizes."""
    draw = np.random.default_rng(seed)
    pairs = all_pairs(num_ranks)
    share = draw.choice(
        [0.0, 1 / num_ranks, 4 / num_ranks, 16 / num_ranks], p=[0.05, 0.45, 0.35, 0.15]
    )
    busy = draw.random(num_ranks) < draw.choice([0.3, 0.8, 1.0])  # the others have nothing
    chosen = pairs[(draw.random(len(pairs)) < share) & busy[pairs].all(axis=1)]
    numel = draw.integers(1, most + 1, len(chosen)) ** draw.integers(1, 3)
    return make_links(chosen, numel, draw.choice([1, 2, 12, 100], len(chosen)))


@st.composite
def links(draw: st.DrawFn, max_ranks: int = 64) -> tuple[int, Links]:
    num_ranks = draw(st.integers(2, max_ranks))
    return num_ranks, random_links(num_ranks, draw(st.integers(0, 1 << 32)))


def place(
    kind: EngineSchedule, num_ranks: int, links: Links, staging_bytes: int, window_ops: int
) -> Messages:
    topology = Topology.of_nodes(num_ranks, 8)
    return place_messages(
        links, topology, kind, staging_bytes=staging_bytes, window_ops=window_ops
    ).messages


def assert_bounded(
    links: Links, messages: Messages, num_ranks: int, staging_bytes: int, window_ops: int
) -> None:
    """Everything in one message each; no window of a rank beyond its bounds."""
    link, part, window = messages.of_links(np.arange(len(links)))
    numel = links.parts(link, part, messages.steps)
    assert (numel > 0).all()
    assert (np.bincount(link, numel, len(links)) == links.numel).all()
    assert set(window.tolist()) == set(range(messages.num_windows))
    by_window = [np.stack((*one, one[0] * 0 + at)) for at, one in enumerate(messages.by_window())]
    assert len(by_window) == messages.num_windows
    found = np.concatenate([np.zeros((3, 0), dtype=np.int64), *by_window], axis=1)
    expected = np.stack((link, part, window))
    assert np.array_equal(*(one[:, np.lexsort(one)] for one in (found, expected)))
    cell = np.concatenate([window * num_ranks + end[link] for end in (links.src, links.dst)])
    _, cell, ops = np.unique(cell, return_inverse=True, return_counts=True)
    assert ops.max(initial=0) <= window_ops
    held = np.bincount(cell, np.tile(staged(numel * links.element_bytes[link]), 2))
    too_much = np.isin(cell, np.nonzero(held > max(1, staging_bytes // WINDOWS_UNDER_WAY))[0])
    assert (ops[cell[too_much]] == 1).all()
    assert (np.tile(numel, 2)[too_much] == 1).all()
