"""Two emulated hosts for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.hosts.emulated import CannotEmulate, Network, network


@pytest.fixture
def two_hosts(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Behind links of so many megabits a second as the parameter says.

    The name of the second leads nowhere, as a fresh Debian has it.
    """
    names, known = ["host-a", "host-b"], ["host-a"]
    with contextlib.ExitStack() as stack:
        try:
            net = stack.enter_context(network(names, megabits=request.param, known=known))
        except CannotEmulate as reason:
            pytest.skip(f"no hosts can be emulated here: {reason}")
        yield net
