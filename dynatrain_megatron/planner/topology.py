"""Where ranks are and how fast their links, as far as plans and predictions need it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a rank takes to move state: seconds an operation, and GB/s each way by kind of link.

    ``near_gb_s`` between ranks of a node, ``far_gb_s`` from one rank to another node. The defaults
    are gloo's between processes of one host.
    """

    operation_s: float = 75e-6
    near_gb_s: float = 1.5
    far_gb_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Topology:
    """``node[r]`` is the node of rank r; ranks of one node reach each other faster.

    ``node_width`` is how many ranks' sending the link out of a node carries at once; None where
    every rank has a way out of its own. ``speeds`` are for predictions and for choices of schedule.
    """

    node: tuple[int, ...]
    node_width: int | None = None
    speeds: Speeds = Speeds()

    @classmethod
    def single_node(cls, num_ranks: int) -> Topology:
        return cls((0,) * num_ranks)

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> Topology:
        """One node for each distinct host name, in order of first appearance."""
        order = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
        return cls(tuple(order[host] for host in hosts))

    def with_devices(
        self, near_gb_s: Sequence[float | None], rails_gb_s: Sequence[Sequence[float]]
    ) -> Topology:
        """The same with speeds that ranks read of their devices, the slowest of each kind.

        ``near_gb_s`` [num_ranks] to other devices of a rank's node, ``rails_gb_s`` of each way out
        of it. A kind that some rank could not read stays as it is.
        """
        speeds, width = self.speeds, self.node_width
        near = [speed for speed in near_gb_s if speed is not None]
        if near and len(near) == len(near_gb_s):
            speeds = dataclasses.replace(speeds, near_gb_s=min(near))
        if rails_gb_s and all(rails_gb_s):
            speeds = dataclasses.replace(speeds, far_gb_s=min(map(min, rails_gb_s)))
            rails = min(map(len, rails_gb_s))
            width = rails if rails < max(Counter(self.node).values()) else None
        return Topology(self.node, width, speeds)

    @classmethod
    def of_nodes(cls, num_ranks: int, ranks_per_node: int) -> Topology:
        """Ranks dealt to nodes in order."""
        return cls(tuple(rank // ranks_per_node for rank in range(num_ranks)))
