"""Memory, rebuilding and worlds of one switch, by hand where that can be done."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dynatrain_megatron.ahead.cases import Case, read_layout, topology_of
from dynatrain_megatron.ahead.estimate import Estimate, bytes_matrix, estimate
from dynatrain_megatron.ahead.memory import Memory, too_much
from dynatrain_megatron.ahead.network import Network
from dynatrain_megatron.ahead.rebuild import Local, rebuild
from dynatrain_megatron.config import compose_ahead
from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import PlanOptions, Speeds, Topology, read_topology_file
from dynatrain_megatron.shapes import Model
from dynatrain_megatron.shapes.models import Experts

TINY = Model(num_layers=8, hidden=64, ffn=128, heads=8, groups=4, head=8, vocab=1024)
MOE = dataclasses.replace(TINY, experts=Experts(count=8, ffn=48))


def case(source: str, target: str, per_node: int = 4, **more: object) -> Case:
    one, two = (ParallelLayout.parse(text) for text in (source, target))
    topology = Topology.of_nodes(max(one.world, two.world), per_node)
    return Case(TINY, one, two, topology, PlanOptions(**more))  # type: ignore[arg-type]


def test_memory_by_hand() -> None:
    found = estimate(case("tp2", "dp2")).memory
    # Cut by two; norms are whole on both: 12 bytes of state, 4 of gradient and 2 of parameter.
    norms = 64 * (2 * 8 + 1)
    assert found.before == 18 * ((TINY.numel - norms) // 2 + norms)
    # The other layout: half of the state, all gradients and parameters; shards are padded.
    assert found.after == pytest.approx(12 * TINY.numel / 2 + 6 * TINY.numel, rel=1e-3)
    assert found.kept > found.before and found.freed <= found.kept


def test_what_is_too_much() -> None:
    memory = Memory(before=10, after=20, kept=40, freed=30, stages=3)
    assert too_much(memory, 30) == too_much(memory, 99) == ""
    for limit, told in ((29, "stage by stage"), (19, "after the switch"), (9, "before the switch")):
        assert told in too_much(memory, limit)


@pytest.mark.parametrize("layout", ["dp8", "tp2-dp4-ep4-etp1-sp", "pp2-dp4-ep2"])
def test_all_parameters_are_somewhere(layout: str) -> None:
    parsed = ParallelLayout.parse(layout)
    local = Local.of(MOE, parsed, parsed.world + 1)
    copies = parsed.dp * parsed.cp
    norms = 64 * (2 * 8 + 1) + 8 * 8 * 64  # and routers: whole on every rank
    experts = 8 * 8 * 3 * 64 * 48 if parsed.ep > 1 else 0
    dense = MOE.numel - experts + norms * (parsed.tp - 1)
    assert local.dense.sum() == copies * dense
    assert local.expert.sum() == parsed.expert_dp * experts
    assert local.numel[-1] == 0


@pytest.mark.parametrize(
    ("nodes", "width", "gb_s"),
    [
        ((0, 0, 0, 0), None, 100),
        ((0, 0, 1, 1), None, 20),  # two ranks of the group in a node, a ring each
        ((0, 0, 1, 1), 1, 10),
        ((0, 1, 2, 3), 1, 10),
    ],
)
def test_rebuilding_by_hand(nodes: tuple[int, ...], width: int | None, gb_s: float) -> None:
    layout = ParallelLayout.parse("dp4")
    topology = Topology(nodes, width, Speeds(0.0, 100.0, 10.0))
    found = rebuild(Local.of(TINY, layout, 4), layout, Network(topology, 0.5))
    lacking = 2 * TINY.numel * 3 // 4
    assert found.nbytes == 4 * lacking
    assert found.seconds == pytest.approx(lacking / (gb_s * 1e9 * 0.5))
    plain = ParallelLayout.parse("dp4-noopt")
    assert rebuild(Local.of(TINY, plain, 4), plain, Network(topology)).nbytes == 0


def test_the_matrix_is_of_ranks_or_of_nodes() -> None:
    found = estimate(case("tp2-dp4", "pp2-dp4"))
    ranks, unit = bytes_matrix(found, 8)
    nodes, other = bytes_matrix(found, 7)
    assert (unit, other, ranks.shape, nodes.shape) == ("rank", "node", (8, 8), (2, 2))
    assert ranks.sum() == nodes.sum() == found.plan.moved_bytes + found.plan.retained_bytes
    assert nodes[0, 1] + nodes[1, 0] == found.between
    assert np.array_equal(nodes, ranks.reshape(2, 4, 2, 4).sum(axis=(1, 3)))


def test_large_worlds_go_without_windows_and_find_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look() -> Estimate:
        return estimate(case("tp2-dp8", "pp4-dp4", staging_bytes=1 << 16))

    fine = look()
    monkeypatch.setattr("dynatrain_megatron.ahead.estimate.WHOLE_UP_TO", 8)
    coarse = look()
    assert fine.by_message and not coarse.by_message and fine.plan.num_windows > 1
    kept = {"simulated_s", "memory"}
    a, b = ({k: v for k, v in one.as_json().items() if k not in kept} for one in (fine, coarse))
    assert a == b
    assert coarse.wire_s <= fine.wire_s
    assert coarse.wire_s >= sum(outcome.least_s for outcome in coarse.wire) * (1 - 1e-6)


@pytest.mark.parametrize(
    ("wanted", "base", "text"),
    [
        ("tp2-pp2", "dp8", "tp2-pp2-dp2"),
        ("tp2-pp2-dp4", "dp8", "tp2-pp2-dp4"),
        ({"tp": 2}, "tp4-pp2-dp2", "tp2-pp2-dp4"),
        ({"dp": 1}, "tp4-pp2-dp2", "tp4-pp2"),
        ({"world": 32}, "tp4-pp2-dp2", "tp4-pp2-dp4"),
        ("tp2-pp2", None, "tp2-pp2"),
        ({"tp": 2, "world": 8}, None, "tp2-dp4"),
    ],
)
def test_the_world_of_a_layout(wanted: object, base: str | None, text: str) -> None:
    start = None if base is None else ParallelLayout.parse(base)
    assert str(read_layout(wanted, start)) == text


def test_a_world_that_does_not_divide() -> None:
    with pytest.raises(LayoutError, match="must divide"):
        read_layout({"tp": 3}, ParallelLayout.parse("dp8"))


def test_a_topology_over_any_number_of_ranks() -> None:
    file = read_topology_file(compose_ahead(["topology=a800_4nic"]).config.topology)
    for ranks, nodes in ((4, 1), (8, 1), (12, 2), (128, 16)):
        topology = topology_of(file, ranks)
        assert (len(topology.node), len(set(topology.node)), topology.node_width) == (
            ranks, nodes, 4
        )  # fmt: skip
    by_ranks = read_topology_file({"nodes": {"a": {"ranks": "0-1"}, "b": {"ranks": [2]}}})
    assert topology_of(by_ranks, 3).node == (0, 0, 1)
