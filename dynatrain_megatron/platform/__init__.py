"""The device platform of this process: CUDA as it is, or a CPU that stands in for it.

:func:`install` comes before everything of Megatron, because Megatron asks for CUDA while it is
imported. It also replaces the few names of Megatron that are faulty on a machine without
Transformer Engine and Apex (:mod:`.host`), on either platform.
"""

import importlib.util
import logging
import os
import sys

from dynatrain_megatron.errors import PlatformError
from dynatrain_megatron.platform.base import Platform
from dynatrain_megatron.platform.replace import Applied, apply
from dynatrain_megatron.platform.versions import megatron_release

__all__ = ["Platform", "current", "install", "uninstall"]

logger = logging.getLogger(__name__)

NAMES = ("auto", "cuda", "cpu")

# Set for ranks on CPU unless the user has set them.
CPU_ENVIRONMENT = {
    # Huge pages: receiving into fresh memory is four times faster. torch looks once, when the
    # first tensor is made; importing torch makes none.
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_NUM_THREADS": "1",  # there are as many ranks as cores, or more
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron insists on it for tensor parallel
}

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")

_current: Platform | None = None
_applied: list[Applied] = []


def install(name: str = "auto") -> Platform:
    """Choose the platform and put its replacements in force; not a collective.

    ``auto`` takes CUDA where torch finds a device and the CPU otherwise. A second call with the
    same name, or with ``auto``, returns what is installed.

    Raises:
        PlatformError: for an unknown name, another platform than the installed one, CUDA without
            a device, or a CPU platform that comes after Megatron.
        HostMismatch: if a name to be replaced does not exist; nothing is replaced then.
    """
    global _current
    if name not in NAMES:
        raise PlatformError(f"platform={name!r} is unknown; choose one of {', '.join(NAMES)}")
    if _current is not None:
        if name in ("auto", _current.name):
            return _current
        raise PlatformError(
            f"platform={name} was asked for after platform={_current.name} had been installed in "
            "this process; a process keeps its platform"
        )
    if name == "cpu" or (name == "auto" and not any(map(os.path.exists, _DEVICE_FILES))):
        _set_cpu_environment()
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu":
            logger.info("torch finds no CUDA device: ranks run on CPU, joined by gloo")
    platform = _install_cuda() if name == "cuda" else _install_cpu()
    _current = platform
    return platform


def current() -> Platform:
    """The installed platform.

    Raises:
        PlatformError: if none is installed.
    """
    if _current is None:
        raise PlatformError("no platform is installed; call dynatrain_megatron.platform.install()")
    return _current


def uninstall() -> None:
    """Put all original names back; for tests of the platform itself.

    What Megatron took over by name while it was imported stays replaced.
    """
    global _current
    while _applied:
        _applied.pop().undo()
    _current = None


def _install_cuda() -> Platform:
    from dynatrain_megatron.platform.cuda import CudaPlatform

    platform = CudaPlatform()
    _apply_host_table()
    return platform


def _install_cpu() -> Platform:
    early = [module for module in sys.modules if module.startswith("megatron.")]
    if early:
        raise PlatformError(
            f"the CPU platform must be installed before Megatron is imported, and {early[0]} is "
            "imported already; call dynatrain_megatron.platform.install() first"
        )
    _set_cpu_environment()
    from dynatrain_megatron.platform import cpu

    cpu.prepare()
    _applied.append(apply(cpu.CPU_TABLE))
    try:
        _apply_host_table()
    except BaseException:
        uninstall()
        raise
    return cpu.CpuPlatform()


def _apply_host_table() -> None:
    # Tools that only move tensors run without Megatron.
    if importlib.util.find_spec("megatron") is None:
        return
    from dynatrain_megatron.platform import host

    release = megatron_release()
    _applied.append(apply(row for row in host.HOST_TABLE if release in row.releases))


def _set_cpu_environment() -> None:
    """Set the defaults of :data:`CPU_ENVIRONMENT` that the user has not set."""
    torch = sys.modules.get("torch")
    for key, value in CPU_ENVIRONMENT.items():
        if key not in os.environ:
            os.environ[key] = value
            if key == "OMP_NUM_THREADS" and torch is not None:
                # torch has read it already.
                torch.set_num_threads(int(value))
