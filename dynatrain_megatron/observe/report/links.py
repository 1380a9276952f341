"""What each link and rank carried in a switch, from who had the bytes to who needs them."""

from collections import Counter
from dataclasses import dataclass

from dynatrain_megatron.observe.report.read import Switch

MOST_LINKS = 8


@dataclass(frozen=True, slots=True)
class Loads:
    """Bytes of one switch: ``kept`` by their rank, moved within nodes and between them.

    Both are None where the nodes were not recorded. ``links`` are the busiest between nodes, (from,
    to, bytes), ``num_links`` is how many carried anything. ``sender`` and ``receiver`` are the
    busiest ranks, with their bytes, and ``mean_sent`` is what a rank sent on average.
    """

    kept: int
    within: int | None
    between: int | None
    links: tuple[tuple[int, int, int], ...]
    num_links: int
    sender: tuple[int, int]
    receiver: tuple[int, int]
    mean_sent: float


def loads_of(switch: Switch) -> Loads | None:
    """None where no matrix was recorded, or one that is not from ranks to the same ranks."""
    matrix = switch.matrix
    num_ranks = len(matrix)
    if not matrix or len(matrix[0]) != num_ranks:
        return None
    known = len(switch.nodes) == num_ranks
    nodes = switch.nodes if known else (0,) * num_ranks
    kept = within = 0
    links: Counter[tuple[int, int]] = Counter()
    sent, received = [0] * num_ranks, [0] * num_ranks
    for source, row in enumerate(matrix):
        for target, num_bytes in enumerate(row):
            if source == target:
                kept += num_bytes
                continue
            sent[source] += num_bytes
            received[target] += num_bytes
            if nodes[source] == nodes[target]:
                within += num_bytes
            elif num_bytes:
                links[nodes[source], nodes[target]] += num_bytes
    busiest = sorted(links.items(), key=lambda link: (-link[1], link[0]))
    return Loads(
        kept,
        within if known else None,
        sum(links.values()) if known else None,
        tuple((source, target, size) for (source, target), size in busiest[:MOST_LINKS]),
        len(links),
        _most(sent),
        _most(received),
        sum(sent) / num_ranks,
    )


def _most(of_ranks: list[int]) -> tuple[int, int]:
    """The first rank with the most, and how much that is."""
    most = max(of_ranks)
    return of_ranks.index(most), most
