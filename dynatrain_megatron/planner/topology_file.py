"""A topology as a user writes it: nodes, links and GB/s in a YAML file.

::

    nodes:                          # or ranks_per_node: 8; without both, hosts are nodes
      left:  {hosts: [gpu-a*]}      # patterns of host names
      right: {hosts: [gpu-b*, spare-1]}
    node_width: 4                   # ways out of a node, each of far_gb_s
    speeds: {near_gb_s: 180, far_gb_s: 22, operation_s: 20e-6}

Instead of ``hosts`` every node may have ``ranks``: [0, 1, 2, 3] or 0-3. What the file does not say
is as with ``topology=auto``. The file is read before ranks and hosts are known, and then held
against them: every mistake is one ConfigError that names the key, its value and the rule. Instead
of a file there may be a mapping with the same keys, as a preset of the group ``topology`` gives.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from dynatrain_megatron.errors import SHOWN_CHARS, ConfigError, did_you_mean, shown
from dynatrain_megatron.planner.topology import Speeds, Topology

_SPEEDS = tuple(field.name for field in dataclasses.fields(Speeds))
_KEYS = ("nodes", "ranks_per_node", "node_width", "speeds")
_SPAN = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_MOST_RANKS = 1 << 20  # guards against a slip such as 0-99999999
_MOST_SPEED = 1e100  # beyond, sums of times and bytes are no numbers any more


@dataclass(frozen=True, slots=True)
class NodeRule:
    """Who belongs to a node: ranks, or ranks on hosts whose name matches a pattern."""

    name: str
    hosts: tuple[str, ...] = ()
    ranks: frozenset[int] = frozenset()

    def has(self, rank: int, host: str) -> bool:
        return rank in self.ranks or any(fnmatchcase(host, pattern) for pattern in self.hosts)


@dataclass(frozen=True, slots=True)
class TopologyFile:
    """What a file says, checked as far as it can be without knowing ranks and hosts."""

    path: str
    nodes: tuple[NodeRule, ...] = ()
    ranks_per_node: int | None = None
    node_width: int | None = None
    speeds: tuple[tuple[str, float], ...] = ()

    def over(self, found: Topology, hosts: Sequence[str]) -> Topology:
        """``found`` with what the file says in its place; ``hosts`` [num_ranks] by rank.

        Raises ConfigError where a rank is in no node or in two, or is listed and does not exist.
        """
        return Topology(
            self._node_of_rank(found, hosts),
            found.node_width if self.node_width is None else self.node_width,
            dataclasses.replace(found.speeds, **dict(self.speeds)),
        )

    def _node_of_rank(self, found: Topology, hosts: Sequence[str]) -> tuple[int, ...]:
        if self.ranks_per_node is not None:
            if len(hosts) % self.ranks_per_node:
                self._refuse(
                    f"ranks_per_node={self.ranks_per_node} must divide the {len(hosts)} ranks"
                )
            return Topology.of_nodes(len(hosts), self.ranks_per_node).node
        if not self.nodes:
            return found.node
        for node in self.nodes:
            if beyond := sorted(rank for rank in node.ranks if rank >= len(hosts)):
                self._refuse(
                    f"nodes.{node.name}.ranks lists rank {beyond[0]}, but the ranks are 0 to "
                    f"{len(hosts) - 1}"
                )
        return tuple(self._node_of(rank, host) for rank, host in enumerate(hosts))

    def _node_of(self, rank: int, host: str) -> int:
        own = [number for number, node in enumerate(self.nodes) if node.has(rank, host)]
        if len(own) != 1:
            names = " and ".join(self.nodes[number].name for number in own) or "none"
            self._refuse(
                f"rank {rank} on host {host!r} must be in one of the nodes "
                f"{', '.join(node.name for node in self.nodes)}; it is in {names}"
            )
        return own[0]

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigError(f"topology={self.path}: {problem}")


def read_topology_file(source: str | Mapping[str, object]) -> TopologyFile:
    """Read and check a file, or a mapping; raises ConfigError for every mistake in it."""
    path = source if isinstance(source, str) else "{…}"
    content = _load(source) if isinstance(source, str) else source
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"topology={path} has {_shown(content)} at its top; it must have keys: "
            f"{', '.join(_KEYS)}"
        )
    reader = _Reader(path)
    reader.check_keys("", content, _KEYS)
    if "nodes" in content and "ranks_per_node" in content:
        reader.refuse("nodes", content["nodes"], "left out where ranks_per_node is given")
    return TopologyFile(
        path,
        reader.nodes(content["nodes"]) if "nodes" in content else (),
        reader.count("ranks_per_node", content),
        reader.count("node_width", content),
        reader.speeds(content.get("speeds", {})),
    )


def _load(path: str) -> object:
    from omegaconf import OmegaConf

    try:
        with Path(path).open(encoding="utf-8") as file:
            return OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except OSError as error:
        raise ConfigError(
            f"topology={path} cannot be read: {error.strerror}; topology must be auto or the path "
            "of a YAML file"
        ) from error
    except Exception as error:  # the YAML parser raises much besides its own exceptions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"topology={path} is no YAML that can be read: {_shown(reason)}"
        ) from error


def _shown(value: object) -> str:
    """A value or key as it was written."""
    is_plain = isinstance(value, str) and value.isprintable() and len(value) <= SHOWN_CHARS
    return str(value) if is_plain else shown(value)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checks values of one file."""

    path: str

    def refuse(self, key: str, value: object, rule: str) -> NoReturn:
        raise ConfigError(
            f"topology={self.path}: {_shown(key)}={_shown(value)} is not allowed; {_shown(key)} "
            f"must be {rule}"
        )

    def check_keys(
        self, where: str, content: Mapping[object, object], known: Sequence[str]
    ) -> None:
        for key, value in content.items():
            if key not in known:
                raise ConfigError(
                    f"topology={self.path}: key '{_shown(where)}{_shown(key)}' is unknown"
                    f"{did_you_mean(_shown(key), known)}; got {_shown(value)}; keys: "
                    f"{', '.join(known)}"
                )

    def count(self, key: str, content: Mapping[object, object]) -> int | None:
        value = content.get(key)
        if value is None:
            return None
        if type(value) is not int or not 1 <= value <= _MOST_RANKS:
            self.refuse(key, value, f"a whole number of at least 1, at most {_MOST_RANKS}")
        return value

    def speeds(self, value: object) -> tuple[tuple[str, float], ...]:
        if not isinstance(value, Mapping):
            self.refuse("speeds", value, f"a mapping with any of {', '.join(_SPEEDS)}")
        self.check_keys("speeds.", value, _SPEEDS)
        for name, speed in value.items():
            number = isinstance(speed, int | float) and not isinstance(speed, bool)
            if not (number and 0 < speed < _MOST_SPEED):
                unit = "seconds" if name == "operation_s" else "GB/s"
                self.refuse(f"speeds.{name}", speed, f"a number above 0 ({unit})")
        return tuple(sorted((name, float(speed)) for name, speed in value.items()))

    def nodes(self, value: object) -> tuple[NodeRule, ...]:
        if not isinstance(value, Mapping) or not value:
            self.refuse("nodes", value, "a mapping such as {a: {hosts: [gpu-a*]}, b: {ranks: 0-3}}")
        found = tuple(self.node(str(name), inner) for name, inner in value.items())
        owner: dict[int, str] = {}
        for node in found:
            if bool(node.ranks) != bool(found[0].ranks):
                key = f"nodes.{node.name}"
                self.refuse(key, value[node.name], f"by hosts or by ranks, like {found[0].name}")
            for rank in sorted(node.ranks):
                if rank in owner:
                    key = f"nodes.{node.name}.ranks"
                    self.refuse(key, rank, f"without ranks of node {owner[rank]}, which has {rank}")
                owner[rank] = node.name
        return found

    def node(self, name: str, value: object) -> NodeRule:
        key = f"nodes.{name}"
        if not isinstance(value, Mapping) or len(value) != 1:
            self.refuse(key, value, "{hosts: [patterns]} or {ranks: [numbers]}")
        self.check_keys(f"{key}.", value, ("hosts", "ranks"))
        if "ranks" in value:
            return NodeRule(name, ranks=frozenset(self.ranks(f"{key}.ranks", value["ranks"])))
        hosts = value["hosts"]
        patterns = hosts if isinstance(hosts, list) else [hosts]
        if not patterns or not all(isinstance(one, str) and one for one in patterns):
            self.refuse(f"{key}.hosts", hosts, "a pattern of host names such as gpu-a*, or a list")
        return NodeRule(name, tuple(patterns))

    def ranks(self, key: str, value: object) -> list[int]:
        rule = "a list of ranks such as [0, 1, 2, 3], or a span such as 0-3"
        span = _SPAN.fullmatch(value) if isinstance(value, str) else None
        if span is not None:
            low, high = map(int, span.groups())
            if not low <= high < _MOST_RANKS:
                self.refuse(key, value, rule)
            return list(range(low, high + 1))
        listed = value if isinstance(value, list) else [value]
        found = [rank for rank in listed if type(rank) is int and 0 <= rank < _MOST_RANKS]
        if not listed or len(found) < len(listed):
            self.refuse(key, value, rule)
        if len(set(found)) < len(found):
            self.refuse(key, value, "a list that has each rank once")
        return found
