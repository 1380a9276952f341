"""Hosts emulated on this one: network namespaces on a bridge, each with a name and a slow link.

::

    here, HEAD ──┬── rate-limited ── host-a
                 └── rate-limited ── host-b

They share kernel, processes and files with this machine, and nothing of the network. ``Host.run``
starts a command on one; ``Host.enter`` moves a forked process there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMESPACES = Path("/run/netns")
_FILES = Path("/etc/netns")  # what lies here in a folder of its name is a namespace's own /etc
_NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


class CannotEmulate(Exception):
    """Namespaces cannot be made here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Host:
    """An emulated host."""

    name: str
    namespace: str
    address: str

    def run(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command there."""
        inside = ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _NAMED)
        return subprocess.Popen([*inside, self.name, *command], text=True, **options)

    def enter(self) -> None:
        """Move this thread, and those it starts from now on, there."""
        namespace = os.open(_NAMESPACES / self.namespace, os.O_RDONLY)
        os.setns(namespace, os.CLONE_NEWNET)
        os.close(namespace)
        os.unshare(os.CLONE_NEWUTS)
        socket.sethostname(self.name)


@dataclass(frozen=True, slots=True)
class Network:
    """All hosts, and the address under which they reach this machine."""

    head: str
    hosts: tuple[Host, ...]


@contextlib.contextmanager
def network(names: Sequence[str], *, megabits: int, known: Sequence[str]) -> Iterator[Network]:
    """Hosts of these names, each behind a link of that rate; raises :class:`CannotEmulate`.

    The names ``known`` lead to their hosts' addresses everywhere. Any other leads to a loopback
    address on its own host, as many systems have it, and nowhere elsewhere.
    """
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise CannotEmulate(f"there is no {tool} here")
    if os.geteuid() != 0:
        raise CannotEmulate("network namespaces take root")
    key = f"{os.getpid() % 100000}"
    subnet, bridge = f"10.{os.getpid() % 199 + 40}.77", f"dtb{key}"
    hosts = tuple(
        Host(name, f"dt{key}-{number}", f"{subnet}.{number}")
        for number, name in enumerate(names, start=1)
    )
    lines = [f"{host.address} {host.name}" for host in hosts if host.name in known]
    with contextlib.ExitStack() as undo:
        _do("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(_undo, "ip", "link", "del", bridge)
        _do("ip", "address", "add", f"{subnet}.254/24", "dev", bridge)
        _do("ip", "link", "set", bridge, "up")
        for number, host in enumerate(hosts):
            inner, outer = f"dte{key}{number}", f"dto{key}{number}"
            _do("ip", "netns", "add", host.namespace)
            undo.callback(_undo, "ip", "netns", "del", host.namespace)
            _do("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
            undo.callback(_undo, "ip", "link", "del", outer)
            _do("ip", "link", "set", outer, "master", bridge, "up")
            _do("ip", "link", "set", inner, "netns", host.namespace)
            there = ("ip", "-n", host.namespace)
            _do(*there, "address", "add", f"{host.address}/24", "dev", inner)
            _do(*there, "link", "set", inner, "up")
            _do(*there, "link", "set", "lo", "up")
            limit = ("rate", f"{megabits}mbit", "burst", "128kb", "latency", "50ms")
            _do("tc", "-n", host.namespace, "qdisc", "add", "dev", inner, "root", "tbf", *limit)
            own = [] if host.name in known else [f"127.0.1.1 {host.name}"]
            folder = _FILES / host.namespace
            folder.mkdir(parents=True)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *own, *lines, ""]))
        yield Network(f"{subnet}.254", hosts)


def _do(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if ran.returncode:
        raise CannotEmulate(f"{' '.join(command)}: {ran.stderr.strip()}")


def _undo(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=30)
