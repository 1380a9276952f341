"""What ``dynatrain doctor`` looks at, one function for each topic; each returns what it found.

Nothing is changed and nothing is left behind, but that :func:`host_names` imports Megatron and so
installs the platform in this process; the devices have to be looked at before.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.metadata
import importlib.util
import os
import resource
import runpy
import shutil
import signal
import socket
import sys
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dynatrain_megatron import __version__
from dynatrain_megatron.elastic.store import StoreAddress, store_errors
from dynatrain_megatron.errors import DynaTrainError, WorldError


class Status(StrEnum):
    """How a finding counts."""

    ok = "ok"
    note = "note"  # something does not work, and jobs may well do without it
    fail = "fail"  # no job can run, or change its layout


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what was found, what depends on it, and what mends it."""

    topic: str
    name: str
    status: Status
    found: str
    ability: str = ""
    """What works with it and does not without; empty where that is nothing by itself."""
    fix: str = ""


# From and below: what the tests have run on. pyproject.toml says the same; a test compares.
TORCH_RELEASES = ((2, 11), (2, 15))
MEGATRON_FROM = (0, 18)
PYTHON_FROM = (3, 12)

_DEFAULT_PORT = 29500  # torchrun's
_ENOUGH_FILES = 4096
_STORE_TIMEOUT_S = 5.0

# Packages that bring something: name to import, what for, how to get it.
_LIBRARIES = (
    ("psutil", "save torch_dist checkpoints", "pip install psutil"),
    ("tensorboard", "log to TensorBoard", "pip install tensorboard"),
    ("einops", "several optimizer instances", "pip install einops"),
    ("matplotlib", "draw reports", "pip install 'dynatrain-megatron[report]'"),
    ("wandb", "log to Weights & Biases", "pip install wandb"),
)


def versions() -> Iterator[Finding]:
    """Versions of Python, of this package and of what it cannot do without."""
    topic = "versions"
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(
        topic,
        "Python",
        Status.ok if sys.version_info[:2] >= PYTHON_FROM else Status.fail,
        python,
        fix="" if sys.version_info[:2] >= PYTHON_FROM else "use Python 3.12 or newer",
    )
    yield Finding(topic, "dynatrain-megatron", Status.ok, __version__)
    low, below = TORCH_RELEASES
    wanted = f"torch {_text(low)} or newer, below {_text(below)}"
    yield _version(topic, "torch", wanted, low, below)
    wanted = f"megatron-core {_text(MEGATRON_FROM)} or newer"
    yield _megatron(topic, wanted)
    for package in ("hydra-core", "numpy", "rich"):
        yield _version(topic, package, package)


def _version(
    topic: str,
    package: str,
    wanted: str,
    low: tuple[int, ...] = (),
    below: tuple[int, ...] | None = None,
) -> Finding:
    fix = f"pip install '{package}' ({wanted})" if low else f"pip install {package}"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(topic, package, Status.fail, "not installed", fix=fix)
    release = _release(found)
    if release < low or (below is not None and release >= below):
        return Finding(topic, package, Status.fail, f"{found}; this needs {wanted}", fix=fix)
    return Finding(topic, package, Status.ok, found)


def _megatron(topic: str, wanted: str) -> Finding:
    """The Megatron that would be imported, which may be a checkout's and not the wheel's."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        fix = "pip install megatron-core, or put a Megatron-LM checkout on PYTHONPATH"
        return Finding(topic, "megatron-core", Status.fail, "not installed", fix=fix)
    folder = os.path.dirname(spec.origin)
    found = str(runpy.run_path(os.path.join(folder, "package_info.py"))["__version__"])
    if _release(found) < MEGATRON_FROM:
        fix = f"pip install '{wanted.replace(' or newer', '').replace(' ', '>=')}'"
        return Finding(topic, "megatron-core", Status.fail, f"{found}; {wanted}", fix=fix)
    return Finding(topic, "megatron-core", Status.ok, f"{found} in {folder}")


def devices() -> Iterator[Finding]:
    """GPUs, what joins them, and the libraries that make Megatron fast on them."""
    topic, ability = "devices", "train on GPUs"
    torch = _import("torch")
    if isinstance(torch, str):
        yield Finding(topic, "torch", Status.fail, torch, fix="install torch again")
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding(topic, "CUDA", Status.ok, f"{len(names)} × {names[0]}", ability)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Finding(topic, "NCCL", Status.ok, nccl)
    else:
        built = torch.version.cuda or "no CUDA"
        yield Finding(
            topic,
            "CUDA",
            Status.note,
            f"no device (torch {torch.__version__} is built for {built}): ranks run on CPU over "
            "gloo",
            ability,
            "install a driver that fits, and see that nvidia-smi lists the GPUs",
        )
    yield _transformer_engine(topic)
    yield _apex(topic)


def _transformer_engine(topic: str) -> Finding:
    ability, fix = "Transformer Engine layers", "pip install 'dynatrain-megatron[te]' on a GPU host"
    name = "Transformer Engine"
    if importlib.util.find_spec("transformer_engine") is None:
        found = "not installed: --transformer-impl local"
        return Finding(topic, name, Status.note, found, ability, fix)
    engine = _import("transformer_engine.pytorch")
    if isinstance(engine, str):
        return Finding(topic, name, Status.note, f"cannot be imported: {engine}", ability, fix)
    version = importlib.metadata.version("transformer_engine")
    return Finding(topic, name, Status.ok, version, ability)


def _apex(topic: str) -> Finding:
    ability, fix = "Apex optimizers", "build it from github.com/NVIDIA/apex, or do without"
    if importlib.util.find_spec("apex") is None:
        found = "not installed: Transformer Engine's Adam or torch's own"
        return Finding(topic, "Apex", Status.note, found, ability, fix)
    optimizers = _import("apex.optimizers")
    if isinstance(optimizers, str):
        found = f"is not NVIDIA's, or cannot be imported: {optimizers}"
        fix = f"pip uninstall apex (PyPI's is another package); {fix}"
        return Finding(topic, "Apex", Status.note, found, ability, fix)
    return Finding(topic, "Apex", Status.ok, "found", ability)


def host_names() -> Iterator[Finding]:
    """Whether Megatron and torch have what we hook into, replace and call; imports Megatron."""
    topic = "hooks"
    from dynatrain_megatron import platform
    from dynatrain_megatron.platform.versions import megatron_release

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of each library it does not find
            platform.install("auto")
            from dynatrain_megatron.plugin import contract

            release = megatron_release()
            table = [name for name in contract.table() if release in name.releases]
            problems = contract.problems(table, release)
    except (DynaTrainError, ImportError) as error:
        fix = "install versions that fit together (see above)"
        yield Finding(topic, "Megatron", Status.fail, str(error), "change the layout of a job", fix)
        return
    fix = (
        "install megatron-core 0.18.2 to 0.19.2 and torch 2.11 to 2.14, or a newer "
        "dynatrain-megatron"
    )
    vital = (contract.Use.attach, contract.Use.switch, contract.Use.repair, contract.Use.worlds)
    for use in contract.Use:
        names = [name for name in table if name.use is use]
        wrong = [problem for name, problem in problems.items() if name.use is use]
        if use is contract.Use.worlds and (problem := contract.worlds_problem()):
            wrong.append(problem)
        if not wrong:
            yield Finding(topic, use.name, Status.ok, f"all {len(names)} names fit", str(use))
            continue
        status = Status.fail if use in vital else Status.note
        yield Finding(topic, use.name, status, "; ".join(wrong), str(use), fix)


def libraries() -> Iterator[Finding]:
    """Packages that some features ask for."""
    for package, ability, fix in _LIBRARIES:
        if importlib.util.find_spec(package) is None:
            yield Finding("libraries", package, Status.note, "not installed", ability, fix)
        else:
            yield Finding("libraries", package, Status.ok, "found", ability)


def dataset_helpers() -> Iterator[Finding]:
    """Whether Megatron's dataset helpers are compiled, or can be: a checkout has them as source."""
    name, ability = "dataset helpers", "read datasets"
    try:
        compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    except ImportError:
        return  # no Megatron, which is told elsewhere
    if compiled:
        yield Finding("libraries", name, Status.ok, "compiled", ability)
        return
    lacking = [tool for tool in ("make", "g++") if shutil.which(tool) is None]
    if importlib.util.find_spec("pybind11") is None:
        lacking.append("pybind11")
    if lacking:
        found = f"not compiled, and {', '.join(lacking)} to compile them with is not here"
        fix = "pip install pybind11, and a C++ compiler and make from the system"
        yield Finding("libraries", name, Status.fail, found, ability, fix)
    else:
        yield Finding("libraries", name, Status.ok, "compiled at the first start", ability)


def machine() -> Iterator[Finding]:
    """What the system lets processes do: ports, names, files, each other's memory."""
    yield _loopback()
    yield _own_name()
    yield _master_port()
    yield _open_files()
    yield _tracing()


def _loopback() -> Finding:
    name, ability = "loopback", "ranks of one host find each other"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        fix = "allow connections on 127.0.0.1 (ip link set lo up; firewall)"
        return Finding("machine", name, Status.fail, _reason(error), ability, fix)
    return Finding("machine", name, Status.ok, "listens and connects", ability)


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        fix = "name this host in /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        found = f"{name} has no address: {_reason(error)}"
        return Finding("machine", "host name", Status.note, found, "several hosts", fix)
    if address.startswith("127.") or address == "::1":
        fix = "for several hosts set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        found = f"{name} is {address}, which other hosts cannot reach"
        return Finding("machine", "host name", Status.note, found, "several hosts", fix)
    return Finding("machine", "host name", Status.ok, f"{name} is {address}", "several hosts")


def _master_port() -> Finding:
    text = os.environ.get("MASTER_PORT", str(_DEFAULT_PORT))
    name = f"port {text}"
    fix = "give torchrun another one: --master-port, or --standalone"
    try:
        socket.create_server(("", int(text))).close()
    except (OSError, OverflowError, ValueError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        found = "taken" if taken else f"cannot be listened on: {_reason(error)}"
        return Finding("machine", name, Status.note, found, fix=fix)
    return Finding("machine", name, Status.ok, "free")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ability = "keep groups of layouts left"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return Finding("machine", "open files", Status.ok, f"{soft} a process", ability)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    fix = f"ulimit -n {_ENOUGH_FILES} (allowed: {most}), or elastic.cache_worlds=0"
    found = f"{soft} a process; each gloo group takes about five"
    return Finding("machine", "open files", Status.note, found, ability, fix)


def _tracing() -> Finding:
    """Try to read a child's memory as ranks of one host would each other's."""
    ability = "ranks of one host read each other's memory"
    try:
        _read_a_child()
    except OSError as error:
        fix = (
            "allow tracing: a container wants --cap-add SYS_PTRACE, Yama ptrace_scope 0 or 1; "
            "without it ranks share rings of memory"
        )
        return Finding("machine", "shared memory", Status.note, _reason(error), ability, fix)
    return Finding("machine", "shared memory", Status.ok, "process_vm_readv works", ability)


def _read_a_child() -> None:
    import numpy as np

    from dynatrain_megatron.engine import process_memory

    there = np.arange(16, dtype=np.int64)
    here = np.zeros_like(there)
    ready, tell = os.pipe()
    with warnings.catch_warnings():
        # Threads of libraries are no matter to a child that only waits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            process_memory.allow_reading()
            os.write(tell, b"r")
            signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)
        spans = [np.array([[side.ctypes.data, side.nbytes]]) for side in (here, there)]
        process_memory.read(child, spans[0], spans[1])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
    if not np.array_equal(here, there):
        raise OSError(errno.EIO, "what was read is not what the other process has")


def store(address: StoreAddress) -> Iterator[Finding]:
    """Whether the store at an address answers and keeps what it is given."""
    name, ability = f"store {address}", "join and leave through this store"
    key, value = f"dynatrain/doctor/{uuid.uuid4().hex}", "here"
    try:
        client = address.connect(timeout_s=_STORE_TIMEOUT_S)
        with store_errors(f"the store at {address} does not answer"):
            client.set(key, value)
            kept = client.get(key).decode() == value
            client.delete_key(key)
    except (ImportError, WorldError) as error:
        fix = (
            f"start one with: dynatrain store --port {address.port}; see that {address.host} is "
            "its host and no firewall is between"
        )
        yield Finding("store", name, Status.fail, str(error), ability, fix)
        return
    status = Status.ok if kept else Status.fail
    yield Finding("store", name, status, "answers" if kept else "loses what it is given", ability)


def _import(name: str) -> Any:
    """The module; a text, why, where it cannot be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except Exception as error:  # a library may raise anything while it looks for its parts
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _release(version: str) -> tuple[int, ...]:
    numbers = version.partition("+")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)
