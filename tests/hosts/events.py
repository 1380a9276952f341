"""What events tell of links between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def across(event: dict[str, Any], nodes: Sequence[int]) -> int:
    """Bytes that went from one node to another; ``nodes`` [num_ranks] by rank."""
    return sum(
        count
        for source, row in enumerate(event["bytes_matrix"])
        for target, count in enumerate(row)
        if nodes[source] != nodes[target]
    )
