"""Nodes and speeds from hosts, devices and files; for each mistake one message that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynatrain_megatron.config import DynaTrainConfig
from dynatrain_megatron.errors import ConfigError
from dynatrain_megatron.planner import Speeds, Topology, read_topology_file

HOSTS = ("gpu-a1", "gpu-a1", "gpu-a2", "gpu-b1")
FOUND = Topology.from_hosts(HOSTS).with_devices([150.0] * 4, [(25.0,)] * 4)


def over(tmp_path: Path, text: str, hosts: tuple[str, ...] = HOSTS) -> Topology:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    found = FOUND if hosts == HOSTS else Topology.from_hosts(hosts)
    return read_topology_file(str(path)).over(found, hosts)


# ------------------------------------------------------------------ found out


def test_hosts_are_nodes() -> None:
    assert Topology.from_hosts(HOSTS).node == (0, 0, 1, 2)


def test_devices_say_how_fast_links_are() -> None:
    plain = Topology((0, 0, 1, 1))
    found = plain.with_devices([300.0, 300.0, 150.0, 300.0], [(50.0, 25.0)] * 3 + [(50.0,)])
    assert found == Topology((0, 0, 1, 1), 1, Speeds(near_gb_s=150, far_gb_s=25))
    assert plain.with_devices([300.0] * 4, [(50.0, 50.0)] * 4).node_width is None
    # What one rank cannot read nobody counts on.
    assert plain.with_devices([300.0, None, 300.0, 300.0], [(50.0,)] * 3 + [()]) == plain
    assert Topology(()).with_devices([], []) == Topology(())


# ------------------------------------------------------------------ files that are right


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("{}", (0, 0, 1, 2)),
        ("ranks_per_node: 2", (0, 0, 1, 1)),
        ("nodes: {a: {hosts: gpu-a*}, b: {hosts: [gpu-b1]}}", (0, 0, 0, 1)),
        ("nodes: {b: {hosts: ['x', '*-b?']}, a: {hosts: '*-a?'}}", (1, 1, 1, 0)),
        ("nodes: {a: {ranks: [0, 3]}, b: {ranks: 1-2}}", (0, 1, 1, 0)),
        ("nodes: {1: {ranks: 0}, 2: {ranks: 1-3}}", (0, 1, 1, 1)),
    ],
)
def test_nodes_of_a_file(tmp_path: Path, text: str, node: tuple[int, ...]) -> None:
    assert over(tmp_path, text) == Topology(node, FOUND.node_width, FOUND.speeds)


def test_what_a_file_leaves_out_is_as_found(tmp_path: Path) -> None:
    found = over(tmp_path, "node_width: 3\nspeeds: {far_gb_s: 20, operation_s: 2e-5}")
    assert found == Topology(FOUND.node, 3, Speeds(2e-5, near_gb_s=150, far_gb_s=20))


def test_the_example_in_the_docs_is_right(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "topology.md").read_text()
    for text in docs.split("```yaml\n")[1:]:
        path = tmp_path / "example.yaml"
        path.write_text(text.partition("```")[0])
        assert read_topology_file(str(path)).path


# ------------------------------------------------------------------ what is wrong

PER_NODE = "a whole number of at least 1"
RANKS = "a list of ranks such as [0, 1, 2, 3], or a span such as 0-3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "has [1] at its top; it must have keys: nodes, ranks_per_node, node_width, speeds"),
        ("a: {", "is no YAML that can be read"),
        ("node_width: ${nothing}", "is no YAML that can be read"),
        ("speeds: {}\nspeeds: {}", "is no YAML that can be read"),
        ("nodewidth: 2", "key 'nodewidth' is unknown (did you mean 'node_width'?); got 2; keys:"),
        ("speeds: {near: 2}", "key 'speeds.near' is unknown (did you mean 'near_gb_s'?); got 2"),
        ("nodes: {a: {host: x}}", "key 'nodes.a.host' is unknown (did you mean 'hosts'?); got x"),
        ("node_width: 0", f"node_width=0 is not allowed; node_width must be {PER_NODE}"),
        ("node_width: true", f"node_width=True is not allowed; node_width must be {PER_NODE}"),
        ("ranks_per_node: 1.5", "ranks_per_node=1.5 is not allowed; ranks_per_node must be a"),
        ("speeds: 3", "speeds=3 is not allowed; speeds must be a mapping with any of operation_s"),
        ("speeds: {near_gb_s: 0}", "speeds.near_gb_s=0 is not allowed; speeds.near_gb_s must be a"),
        ("speeds: {far_gb_s: -1}", "speeds.far_gb_s=-1 is not allowed"),
        ("speeds: {far_gb_s: .inf}", "speeds.far_gb_s=inf is not allowed"),
        ("speeds: {far_gb_s: fast}", "must be a number above 0 (GB/s)"),
        ("speeds: {operation_s: true}", "must be a number above 0 (seconds)"),
        ("nodes: []", "nodes=[] is not allowed; nodes must be a mapping such as"),
        ("nodes: {a: {}}", "nodes.a={} is not allowed; nodes.a must be {hosts: [patterns]} or"),
        ("nodes: {a: {hosts: []}}", "nodes.a.hosts=[] is not allowed; nodes.a.hosts must be a"),
        ("nodes: {a: {hosts: [1]}}", "nodes.a.hosts=[1] is not allowed"),
        ("nodes: {a: {ranks: [0, x]}}", f"nodes.a.ranks=[0, 'x'] is not allowed; nodes.a.ranks "
         f"must be {RANKS}"),
        ("nodes: {a: {ranks: 3-1}}", "nodes.a.ranks=3-1 is not allowed"),
        ("nodes: {a: {ranks: 0-99999999}}", "nodes.a.ranks=0-99999999 is not allowed"),
        ("nodes: {a: {ranks: [-1]}}", "nodes.a.ranks=[-1] is not allowed"),
        ("nodes: {a: {ranks: [0, 0]}}", "must be a list that has each rank once"),
        ("nodes: {a: {ranks: 0-2}, b: {ranks: [2, 3]}}",
         "nodes.b.ranks=2 is not allowed; nodes.b.ranks must be without ranks of node a, which "
         "has 2"),
        ("nodes: {a: {ranks: 0-2}, b: {hosts: x}}", "nodes.b must be by hosts or by ranks, like a"),
        ("nodes: {a: {ranks: 0-3}}\nranks_per_node: 4", "must be left out where ranks_per_node is"),
        # Held against ranks and hosts.
        ("ranks_per_node: 3", "ranks_per_node=3 must divide the 4 ranks"),
        ("nodes: {a: {ranks: 0-4}}", "nodes.a.ranks lists rank 4, but the ranks are 0 to 3"),
        ("nodes: {a: {ranks: 0-1}, b: {ranks: 3}}", "rank 2 on host 'gpu-a2' must be in one of the "
         "nodes a, b; it is in none"),
        ("nodes: {a: {hosts: gpu-a*}}", "rank 3 on host 'gpu-b1' must be in one of the nodes a; "
         "it is in none"),
        ("nodes: {a: {hosts: gpu-*}, b: {hosts: gpu-b*}}", "rank 3 on host 'gpu-b1' must be in one "
         "of the nodes a, b; it is in a and b"),
    ],
)  # fmt: skip
def test_a_mistake_names_key_value_and_rule(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        over(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(f"topology={tmp_path / 'cluster.yaml'}") and "\n" not in said
    assert message in said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"cannot be read: {reason}"):
            read_topology_file(str(path))


def test_a_run_with_a_wrong_file_does_not_begin(tmp_path: Path) -> None:
    from dynatrain_megatron.plugin.session import Session

    path = tmp_path / "cluster.yaml"
    path.write_text("node_width: 0")
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match="node_width=0 is not allowed"):
        Session(DynaTrainConfig(topology=str(path), run_dir=str(run_dir)))
    assert not run_dir.exists()
