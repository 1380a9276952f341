"""What the system tells of a GPU's links: NVLink, PCIe and the ways out of the node (rails).

Rates as built, GB/s each way. Whatever cannot be read is left out: a topology file can say it.
Local to the calling process; nothing here is a collective.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
PCI_DEVICES = Path("/sys/bus/pci/devices")

_TIMEOUT_S = 20
_NVLINK = re.compile(r"^\s*Link \d+: ([\d.]+) GB/s", re.MULTILINE)
_RATE = re.compile(r"([\d.]+) Gb/sec")
_TRANSFERS = re.compile(r"([\d.]+) GT/s")
_ENCODED = 128 / 130  # of PCIe from its third generation on


@dataclass(frozen=True, slots=True)
class DeviceLinks:
    """``near_gb_s`` to other devices of the node, None where it cannot be read; and each rail."""

    near_gb_s: float | None = None
    rails_gb_s: tuple[float, ...] = ()


def device_links(uuid: str) -> DeviceLinks:
    """Of the GPU with this UUID (``GPU-…``); NVLink counts where it has some, else PCIe."""
    near = nvlink_gb_s(_nvidia_smi("nvlink", "--status", "--id", uuid))
    if near is None:
        query = ("--query-gpu=pci.bus_id", "--format=csv,noheader", "--id", uuid)
        near = pcie_gb_s(_nvidia_smi(*query).strip(), PCI_DEVICES)
    return DeviceLinks(near, rails_gb_s(INFINIBAND))


def nvlink_gb_s(status: str) -> float | None:
    """The sum over active links in what ``nvidia-smi nvlink --status`` prints of one GPU."""
    rates = [float(rate) for rate in _NVLINK.findall(status)]
    return sum(rates) if rates else None


def pcie_gb_s(bus_id: str, devices: Path) -> float | None:
    """Of the device with a bus id such as ``00000000:4F:00.0``, by its entry in ``devices``.

    The most it can do, since an idle GPU runs its link slower.
    """
    domain, _, rest = bus_id.lower().partition(":")
    folder = devices / f"{domain[-4:]}:{rest}"
    speed = _TRANSFERS.match(_read(folder / "max_link_speed"))
    width = _read(folder / "max_link_width")
    if speed is None or not width.isdigit():
        return None
    return float(speed[1]) * int(width) / 8 * _ENCODED


def rails_gb_s(devices: Path) -> tuple[float, ...]:
    """Rates of the active InfiniBand and RoCE ports under ``devices``, ascending."""
    found = []
    for port in devices.glob("*/ports/*"):
        rate = _RATE.match(_read(port / "rate"))
        if rate is not None and _read(port / "state").endswith("ACTIVE"):
            found.append(float(rate[1]) / 8)
    return tuple(sorted(found))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it is missing, fails or hangs."""
    try:
        run = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""
