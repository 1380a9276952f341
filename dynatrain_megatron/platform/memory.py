"""Memory figures of this process and this machine, from the kernel (bytes)."""

import ctypes
import os
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

# Written to clear_refs, this makes the kernel restart the peak from what is resident now.
_RESET_PEAK = "5"


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, shared pages included."""
    return _kib_field(_STATUS, "VmRSS")


def peak_resident_bytes() -> int:
    """The most :func:`resident_bytes` has been since the start or the last reset."""
    # The kernel brings the two counters up to date at different times.
    return max(_kib_field(_STATUS, "VmHWM"), _kib_field(_STATUS, "VmRSS"))


def reset_peak_resident() -> bool:
    """Restart the peak; False where the kernel does not allow it (the peak then only grows)."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def release_unused() -> None:
    """Ask the C library to give freed memory back, so that the figures show what is in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def machine_bytes() -> tuple[int, int]:
    """(free, total) memory of the machine, or of the container where that is less."""
    free = _kib_field(_MEMINFO, "MemAvailable")
    total = _kib_field(_MEMINFO, "MemTotal")
    limit = _cgroup_number("memory.max")
    if limit is not None and limit < total:
        used = _cgroup_number("memory.current") or 0
        free, total = min(free, max(limit - used, 0)), limit
    return free, total


def cpu_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _kib_field(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel's {path} has no line {key!r}, which the memory figures need")


def _cgroup_number(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
