"""Where and by which command results came about; what benchmarks write beside their figures."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment(*packages: str) -> dict[str, Any]:
    """Processor, system, versions of Python and ``packages``, commit and command."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = {
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        }
        processor = ", ".join(sorted(names)) or processor
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
    ).stdout.strip()  # fmt: skip
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "commit": commit,
        "command": " ".join(["python", Path(sys.argv[0]).name, *_words(sys.argv[1:])]),
    }


def keep(file: Path, name: str, results: object, **more: object) -> None:
    """Put ``results`` under ``name`` into a file of results, beside those of other names."""
    content = json.loads(file.read_text()) if file.exists() else {}
    where = environment("torch", "megatron-core", "numpy")
    content[name] = {"environment": where | more, "results": results}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def _words(arguments: list[str]) -> list[str]:
    """The command line without this machine's own paths."""
    return ["PATH" if word.startswith("/") else word for word in arguments]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def filesystem(path: Path) -> str:
    """The kind of file system that ``path`` is on, such as tmpfs or ext4."""
    where, kind = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, found, *_ = line.split()
            if path.resolve().is_relative_to(mount) and len(mount) >= len(where):
                where, kind = mount, found
    return kind
