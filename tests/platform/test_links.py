"""What is read of NVLink, PCIe and rails, from texts as the driver and the kernel print them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynatrain_megatron.platform import links
from dynatrain_megatron.platform.links import DeviceLinks, nvlink_gb_s, pcie_gb_s, rails_gb_s

UUID = "GPU-00000000-1111-2222-3333-444444444444"
STATUS = f"""GPU 0: NVIDIA A100-SXM4-80GB (UUID: {UUID})
\t Link 0: 25 GB/s
\t Link 1: 25.5 GB/s
\t Link 2: <inactive>
"""


def port(root: Path, name: str, rate: str, state: str) -> None:
    folder = root / name / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "rate").write_text(f"{rate}\n")
    (folder / "state").write_text(f"{state}\n")


def pci(root: Path, speed: str, width: str) -> None:
    folder = root / "0000:4f:00.0"
    folder.mkdir(parents=True)
    (folder / "max_link_speed").write_text(f"{speed}\n")
    (folder / "max_link_width").write_text(f"{width}\n")


def test_nvlink() -> None:
    assert nvlink_gb_s(STATUS) == 50.5
    assert nvlink_gb_s("") is nvlink_gb_s("\t Link 0: <inactive>\n") is None


def test_rails(tmp_path: Path) -> None:
    assert rails_gb_s(tmp_path / "none") == ()
    port(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE")
    port(tmp_path, "mlx5_1", "200 Gb/sec (4X HDR)", "4: ACTIVE")
    port(tmp_path, "mlx5_2", "400 Gb/sec (4X NDR)", "1: DOWN")
    (tmp_path / "mlx5_3" / "ports" / "1").mkdir(parents=True)
    assert rails_gb_s(tmp_path) == (25.0, 50.0)


def test_pcie(tmp_path: Path) -> None:
    assert pcie_gb_s("00000000:4F:00.0", tmp_path) is None
    pci(tmp_path, "32.0 GT/s PCIe", "16")
    assert pcie_gb_s("00000000:4F:00.0", tmp_path) == pytest.approx(63.0, abs=0.1)
    assert pcie_gb_s("", tmp_path) is None


@pytest.mark.parametrize("nvlink", [True, False])
def test_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvlink: bool) -> None:
    pci(tmp_path / "pci", "32.0 GT/s PCIe", "16")
    port(tmp_path / "ib", "mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE")
    monkeypatch.setattr(links, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(links, "INFINIBAND", tmp_path / "ib")
    program = tmp_path / "nvidia-smi"
    (tmp_path / "status").write_text(STATUS if nvlink else "")
    program.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *{UUID}*) ;; *) exit 1 ;; esac\n'
        f'case "$1" in nvlink) cat {tmp_path}/status ;; *) echo 00000000:4F:00.0 ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    near = 50.5 if nvlink else pytest.approx(63.0, abs=0.1)
    assert links.device_links(UUID) == DeviceLinks(near, (50.0,))
    assert links.device_links("GPU-other").near_gb_s is None


def test_without_the_driver_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(links, "INFINIBAND", tmp_path)
    assert links.device_links(UUID) == DeviceLinks()
