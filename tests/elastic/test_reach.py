"""Which address gloo tells others: only what cannot be reached is replaced."""

from __future__ import annotations

import socket

import pytest

from dynatrain_megatron.elastic import reach
from dynatrain_megatron.elastic.store import StoreAddress

STORE = StoreAddress("192.0.2.7", 29500)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reach.INTERFACE, "")


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    *,
    leads: str | None,
    by_name: str | None,
    interface: str | None,
) -> str:
    """What gloo is told where these are the addresses found."""
    monkeypatch.setattr(reach, "_source_address", lambda store: leads)
    monkeypatch.setattr(reach, "_address_by_name", lambda: by_name)
    monkeypatch.setattr(reach, "interface_of", lambda address: interface)
    reach.be_reached(STORE)
    return reach.os.environ[reach.INTERFACE]


@pytest.mark.parametrize("by_name", ["127.0.1.1", "::1", None])
def test_a_name_that_leads_nowhere_is_replaced(
    monkeypatch: pytest.MonkeyPatch, by_name: str | None
) -> None:
    assert chosen(monkeypatch, leads="192.0.2.1", by_name=by_name, interface="eth1") == "eth1"


@pytest.mark.parametrize(
    ("leads", "by_name", "interface"),
    [
        ("127.0.0.1", "127.0.1.1", "lo"),  # the store is of this host
        ("192.0.2.1", "198.51.100.1", "eth1"),  # the name leads somewhere
        (None, "127.0.1.1", "eth1"),  # nothing leads to the store
        ("2001:db8::1", None, None),  # no interface is known by that address
    ],
)
def test_anything_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, leads: str | None, by_name: str, interface: str | None
) -> None:
    assert chosen(monkeypatch, leads=leads, by_name=by_name, interface=interface) == ""


def test_what_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reach.INTERFACE, "mine")
    assert chosen(monkeypatch, leads="192.0.2.1", by_name=None, interface="eth1") == "mine"


def test_this_hosts_own_addresses() -> None:
    assert reach.interface_of("127.0.0.1") == "lo"
    assert reach.interface_of("192.0.2.1") is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = StoreAddress(*server.getsockname())
        assert reach._source_address(address) == "127.0.0.1"
    assert reach._source_address(StoreAddress("no.such.host.invalid", 1)) is None
