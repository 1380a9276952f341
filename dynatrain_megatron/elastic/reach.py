"""Which of this host's addresses gloo tells other processes to connect to.

Gloo takes the interface that GLOO_SOCKET_IFNAME names, else the address of the host's own name.
Many systems give that name a loopback address, or none, and gloo then can be reached from this host
only. A process that meets the others at a store of another address is to be reached there as well.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct

from dynatrain_megatron.elastic.store import StoreAddress

logger = logging.getLogger(__name__)

INTERFACE = "GLOO_SOCKET_IFNAME"

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_NAME_BYTES = 16


def be_reached(store: StoreAddress) -> None:
    """Before any group is made: let gloo use the interface that leads to ``store``, if it must.

    Left alone where the user names an interface, where the host's own name leads to an address
    that others can reach, and where the store itself is within this host. Local.
    """
    if os.environ.get(INTERFACE):
        return
    here = _source_address(store)
    if here is None or is_loopback(here):
        return
    by_name = _address_by_name()
    if by_name is not None and not is_loopback(by_name):
        return
    interface = interface_of(here)
    if interface is None:
        return
    os.environ[INTERFACE] = interface
    found = "no address" if by_name is None else by_name
    logger.info(
        "%s=%s (%s), which leads to the store at %s: the name of this host, %s, gives %s",
        INTERFACE,
        interface,
        here,
        store,
        socket.gethostname(),
        found,
    )


def is_loopback(address: str) -> bool:
    """Whether an IP address is one that only this host itself can reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address as its first; None where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s16x", name.encode()[: _NAME_BYTES - 1])
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8]) == address:
                return name
    return None


def _source_address(store: StoreAddress) -> str | None:
    """This host's address on the way to ``store``; nothing is sent."""
    try:
        family, _, _, _, where = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _address_by_name() -> str | None:
    """The address that gloo takes for this host's name: the first that can be listened on."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, _, _, _, where in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listening:
                listening.bind(where)
        except OSError:
            continue
        return str(where[0])
    return None
