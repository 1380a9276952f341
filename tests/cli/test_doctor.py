"""`dynatrain doctor`: what it finds here, and what it says where something is amiss."""

import errno
import json
import resource
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dynatrain_megatron.cli import doctor_checks as checks
from dynatrain_megatron.cli import main
from dynatrain_megatron.cli.doctor_checks import Finding, Status
from dynatrain_megatron.elastic.store import StoreAddress, StoreServer
from dynatrain_megatron.plugin import contract

ROOT = Path(__file__).parents[2]


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.host
def test_here_a_job_can_run_and_change_its_layout(capsys: pytest.CaptureFixture[str]) -> None:
    server = StoreServer("127.0.0.1")
    assert main(["doctor", "--json", "--store", str(server.address)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert "change the layout of a job" in found["works"]
    assert "join and leave through this store" in found["works"]
    assert set(found["works"]).isdisjoint(found["does_not_work"])
    topics = {finding["topic"] for finding in found["findings"]}
    assert topics == {*("versions", "devices", "hooks", "libraries", "machine", "store")}
    assert all(f["fix"] for f in found["findings"] if f["status"] != "ok")


@pytest.mark.host
def test_text_marks_what_fails_and_the_exit_code_tells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = contract.HostName("megatron.core.gone", contract.Use.switch, "went away")
    monkeypatch.setattr(contract, "CALLED", (*contract.CALLED, missing))
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "FAIL switch" in told and "megatron.core.gone is missing" in told
    assert "fix: install megatron-core 0.18.2 to 0.19.2" in told
    assert "1 of " in told and "checks failed" in told
    assert "\033" not in told


@pytest.mark.parametrize("address", ["nowhere", "host:", ":1", "host:0", "host:port", "h:70000"])
def test_what_is_no_address_is_wrong_usage(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--store", address]) == 2
    assert "a store's address is HOST:PORT" in capsys.readouterr().err


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_STORE_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (finding,) = checks.store(StoreAddress("127.0.0.1", port))
    assert finding.status is Status.fail
    assert f"no store answers at 127.0.0.1:{port} within 0.5 s" in finding.found
    assert f"dynatrain store --port {port}" in finding.fix


def test_ranges_are_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (low, below), core = checks.TORCH_RELEASES, checks.MEGATRON_FROM
    assert f"torch>={checks._text(low)},<{checks._text(below)}" in project["dependencies"]
    assert f"megatron-core>={checks._text(core)}" in project["dependencies"]
    assert project["requires-python"] == f">={checks._text(checks.PYTHON_FROM)}"


@pytest.mark.parametrize(
    ("found", "status"),
    [("2.10.0", "fail"), ("2.11.0+cu130", "ok"), ("2.14.1", "ok"), ("2.15.0a0", "fail")],
)
def test_versions_out_of_range_fail(
    found: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda _: found)
    finding = checks._version("versions", "torch", "torch so and so", *checks.TORCH_RELEASES)
    assert finding.status == status
    assert bool(finding.fix) == (status == "fail")


def test_a_package_that_is_not_there_is_told_with_the_command_that_brings_it() -> None:
    finding = checks._version("versions", "no-such-package", "no-such-package")
    assert (finding.status, finding.fix) == (Status.fail, "pip install no-such-package")


def test_a_machine_that_lets_processes_do_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(checks, "_read_a_child", forbidden)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        found = by_name(list(checks.machine()))
    assert found["shared memory"].found == "Operation not permitted"
    assert "--cap-add SYS_PTRACE" in found["shared memory"].fix
    assert "256 a process" in found["open files"].found and "1024" in found["open files"].fix
    port = next(finding for name, finding in found.items() if name.startswith("port "))
    assert (port.status, port.found) == (Status.note, "taken")


def test_a_checkout_without_compiled_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: dict[str, object] = {}
    monkeypatch.setattr(checks.importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(checks.shutil, "which", lambda tool: None)
    (finding,) = checks.dataset_helpers()
    assert finding.status is Status.fail and "pip install pybind11" in finding.fix
    specs["pybind11"] = object()
    monkeypatch.setattr(checks.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    (finding,) = checks.dataset_helpers()
    assert (finding.status, finding.found) == (Status.ok, "compiled at the first start")


@pytest.mark.parametrize("port", ["many", "-1", "99999999"])
def test_a_port_that_is_none_is_noted(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    assert checks._master_port().status is Status.note


def test_without_megatron_it_says_so_and_what_to_install() -> None:
    hide = (
        "import sys; from importlib.machinery import PathFinder\n"
        "class Hide(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        hidden = name.partition('.')[0] == 'megatron'\n"
        "        return None if hidden else super().find_spec(name, path, target)\n"
        "sys.meta_path = [Hide if f is PathFinder else f for f in sys.meta_path]\n"
        "from dynatrain_megatron.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", hide],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["megatron-core"]["found"] == "not installed"
    assert "pip install megatron-core" in found["megatron-core"]["fix"]
    assert "not installed" in found["Megatron"]["found"]
