"""The store apart: its address, its clients, and its process."""

from __future__ import annotations

import gc
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dynatrain_megatron.cli import main
from dynatrain_megatron.elastic import connections, store
from dynatrain_megatron.elastic.store import JobStore, StoreAddress, StoreServer
from dynatrain_megatron.errors import ConfigError, WorldError
from tests.ranks import _free_port


@pytest.mark.parametrize("text", ["node7:29500", "10.0.0.1:1", "[fe80::1]:65535"])
def test_addresses_are_printed_as_they_are_read(text: str) -> None:
    assert str(StoreAddress.parse(text)) == text


@pytest.mark.parametrize("text", ["", "node7", ":29500", "node7:", "node7:x", "a:0", "a:65536"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        StoreAddress.parse(text)


def test_each_thread_has_its_own_client() -> None:
    server = StoreServer("127.0.0.1")
    clients = JobStore(server.address, "job", timeout_s=5)
    assert clients.here() is clients.here()
    others: list[object] = []
    thread = threading.Thread(target=lambda: others.append(clients.here()))
    thread.start()
    clients.here().set("key", "value")
    thread.join()
    assert others[0] is not clients.here()


def test_a_wait_in_one_thread_holds_up_no_other() -> None:
    """One client for both would: it carries one operation at a time."""
    server = StoreServer("127.0.0.1")
    clients = JobStore(server.address, "job", timeout_s=10)
    thread = threading.Thread(target=lambda: clients.here().wait(["late"]))
    thread.start()
    for number in range(100):
        clients.here().set("late" if number == 99 else "early", "")
    thread.join(5)
    assert not thread.is_alive()


def test_jobs_of_one_store_share_nothing_but_the_ids_of_worlds() -> None:
    server = StoreServer("127.0.0.1")
    one, other = (JobStore(server.address, name, timeout_s=5) for name in ("one", "other"))
    one.here().set("key", "1")
    assert not other.here().check(["key"])
    assert [*one.new_world_ids(2), *other.new_world_ids(1), *one.new_world_ids(1)] == [1, 2, 3, 4]


def test_a_connection_that_broke_while_idle_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same store only: another one at its address knows nothing of the job."""
    monkeypatch.setattr(store, "_IDLE_S", 0.0)
    monkeypatch.setattr(store, "_ATTEMPT_S", 1.0)
    server = StoreServer("127.0.0.1")
    job = JobStore(server.address, "job", timeout_s=5)
    job.here().set("status", "{}")

    def cut() -> None:
        port = f":{server.address.port}"
        for _, ends, connection in connections._connections():
            if any(end.endswith(port) for end in ends):
                connection.shutdown(socket.SHUT_RDWR)

    cut()
    assert job.here().get("status") == b"{}"
    port = server.address.port
    cut()
    del server
    gc.collect()
    with pytest.raises(WorldError, match=f"no store answers at 127.0.0.1:{port} within"):
        job.here()
    server = StoreServer("127.0.0.1", port)
    with pytest.raises(WorldError, match="is another one now"):
        job.here()


def test_no_store_is_said_in_one_line() -> None:
    address = StoreAddress("127.0.0.1", _free_port())
    with pytest.raises(WorldError, match=f"^no store answers at {address} within 0.2 s: [^\\n]*$"):
        address.connect(timeout_s=0.2)


def test_a_taken_port_and_a_strange_host_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    server = StoreServer("127.0.0.1")
    port = str(server.address.port)
    assert main(["store", "--host", "127.0.0.1", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    assert main(["store", "--host", "192.0.2.1"]) == 2
    assert "cannot listen on 192.0.2.1:0" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["store", "--port", "99999"])
    assert caught.value.code == 2
    assert "'99999' is not a port" in capsys.readouterr().err


def test_the_command_serves_until_sigterm() -> None:
    command = [sys.executable, "-m", "dynatrain_megatron.cli", "store", "--json"]
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            assert process.stdout is not None
            address = StoreAddress.parse(json.loads(process.stdout.readline())["address"])
            one, other = (address.connect(timeout_s=5) for _ in range(2))
            one.set("key", "value")
            assert other.get("key") == b"value"
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
