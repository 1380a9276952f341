"""The store that processes of a job meet at: its address, clients, and a server of its own.

It holds small values by key (world ids, addresses, verdicts), no tensors. A client carries one
operation at a time and blocks in it, so every thread and every world has one of its own. The server
is torch's TCPStore: the job's own, which ends with the process that holds it, or one that runs in
a process apart (``dynatrain store``) and so outlives any rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from dynatrain_megatron.config import is_address
from dynatrain_megatron.errors import ConfigError, SwitchRefused, WorldError, shown

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

_EVERYWHERE = "0.0.0.0"
_ATTEMPT_S = 8.0  # a greeting that is lost is not waited for longer than that
_IDLE_S = 60.0  # a connection that carried nothing for longer is tried before it is relied on
_BACKLOG = 2048  # connections that may wait at once: all ranks come together


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a store listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Read ``HOST:PORT``; raises :class:`ConfigError` where that is something else."""
        if not is_address(text):
            raise ConfigError(f"a store's address is HOST:PORT, not {shown(text)}")
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    @classmethod
    def of_launch(cls) -> StoreAddress:
        """The store that this process's launcher gave it to find the others at.

        Raises :class:`WorldError` where the launcher's environment does not say where it is.
        """
        host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if not host or not port.isdecimal():
            raise WorldError(
                "MASTER_ADDR and MASTER_PORT do not say where this job's processes meet; start it "
                "by torchrun, or give elastic.store=HOST:PORT"
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        """The form that :meth:`parse` reads."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def connect(self, *, timeout_s: float) -> TCPStore:
        """A new client, which waits up to ``timeout_s`` here and in each operation.

        Raises :class:`WorldError` where no store answers.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        deadline = time.monotonic() + timeout_s
        with store_errors(f"no store answers at {self} within {timeout_s:g} s"):
            while True:
                began = time.monotonic()
                left = max(0.001, deadline - began)
                try:
                    client = TCPStore(
                        self.host,
                        self.port,
                        is_master=False,
                        wait_for_workers=False,
                        timeout=timedelta(seconds=min(left, _ATTEMPT_S)),
                    )
                except dist.DistError:
                    waited = time.monotonic() - began > 0.9 * _ATTEMPT_S
                    if waited and left > _ATTEMPT_S:  # what fails at once would fail again
                        continue
                    raise
                client.set_timeout(timedelta(seconds=timeout_s))
                return client


@dataclass(frozen=True, slots=True)
class StoreOwner:
    """With whom a job's store ends: at least one of ``processes`` has to live; none is needed where
    there are none.

    ``what`` ends with them, in words. They stay alive when they leave where ``parks``.
    """

    processes: tuple[str, ...] = ()
    what: str = ""
    parks: bool = False

    @classmethod
    def of_launch(
        cls, processes: Sequence[str], nodes: Sequence[str], *, parks: bool
    ) -> StoreOwner:
        """Of the store at MASTER_ADDR:MASTER_PORT; each of ``processes`` says its node, or nothing.

        ``nodes`` are what :func:`node_of_launch` says there.
        """
        of_first = tuple(uid for uid, node in zip(processes, nodes, strict=True) if node == "0")
        if all(nodes) and of_first:
            return cls(of_first, "torchrun's store on the first node of the launch", parks)
        return cls((processes[0],), "the store that the launch's rank 0 holds", parks)

    def lives_on(self, staying: Collection[str], parking: Collection[str] = ()) -> bool:
        """Whether the store does where these stay in the job, and those of ``parking`` wait."""
        living = {*staying, *(parking if self.parks else ())}
        return not self.processes or not living.isdisjoint(self.processes)

    @property
    def refusal(self) -> SwitchRefused:
        """Why the last of them cannot leave."""
        of = ", ".join(self.processes)
        return SwitchRefused(
            f"the last of the processes {of} would leave, and with it ends {self.what}, where the "
            "job's processes meet",
            "start the job with elastic.store=HOST:PORT of a `dynatrain store`, which ends with no "
            "process of the job",
        )


def node_of_launch() -> str:
    """The number of this process's node where torchrun holds the store that it gave; or nothing."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return os.environ.get("GROUP_RANK", "")


class JobStore:
    """The part of a store that belongs to one job: a client of its own for each thread that asks.

    ``job`` is a text that no other job has that uses the same store.
    """

    def __init__(self, address: StoreAddress, job: str, *, timeout_s: float) -> None:
        self.address = address
        self.job = job
        self._timeout_s = timeout_s
        self._here = threading.local()

    def here(self) -> Store:
        """This thread's client; made at the first call, dropped when the thread ends.

        Raises :class:`WorldError` where the store is out of reach.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        here, now = self._here, time.monotonic()
        client: Store | None = getattr(here, "client", None)
        if client is not None and now - here.used_at > _IDLE_S:
            try:
                client.check(["idle"])
            except dist.DistError:  # the connection is gone, and the store perhaps is not
                client = here.client = None
                here.was_lost = True
        if client is None:
            was_lost = getattr(here, "was_lost", False)
            limit_s = _ATTEMPT_S if was_lost else self._timeout_s
            whole = self.address.connect(timeout_s=min(limit_s, self._timeout_s))
            client = PrefixStore(f"dynatrain/{self.job}", whole)
            if was_lost and not client.check(["status"]):
                raise WorldError(f"the store at {self.address} is another one now")
            here.client = client
        here.used_at = now
        return client

    def new_world_ids(self, count: int) -> list[int]:
        """Ids that no world of any job of this store ever had."""
        last = self.address.connect(timeout_s=self._timeout_s).add("dynatrain/worlds", count)
        return list(range(last - count + 1, last + 1))


@contextlib.contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn what a store raises inside into a :class:`WorldError` that begins with ``what``, and
    what reading raises where somebody else has written there."""
    import torch.distributed as dist

    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        kind = type(error).__name__
        raise WorldError(
            f"{what}: the store does not hold what a job writes there ({kind}: {error})"
        ) from error
    except dist.DistError as error:
        raise WorldError(f"{what}: {str(error).partition(chr(10))[0]}") from error


class StoreServer:
    """A store in this process; it ends with this object."""

    def __init__(self, host: str = _EVERYWHERE, port: int = 0) -> None:
        """Listen on ``host``, on a free port where ``port`` is 0.

        Raises :class:`ConfigError` where the host is none of this machine or the port is taken.
        """
        from torch._C._distributed_c10d import TCPStore

        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(where)
                listening.listen(_BACKLOG)
                bound_port = listening.getsockname()[1]
                own = "127.0.0.1" if host == _EVERYWHERE else host
                self._store = TCPStore(
                    own,
                    bound_port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listening.detach(),
                )
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        name = socket.gethostname() if host == _EVERYWHERE else host
        self.address = StoreAddress(name, bound_port)
