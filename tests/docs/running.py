"""Runs the commands of a page as its reader would: in order, in a folder that looks like a clone.

A block of ``dynatrain`` commands alone runs in this process, which has imported everything; any
other in a shell. What a block starts in the background is ended with its page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dynatrain_megatron import cli
from tests.docs.commands import called
from tests.docs.pages import ROOT, Block, Page

LIMIT_S = 120.0
_CLONE = ("scripts", "benchmarks", "docs", "patches", "dynatrain_megatron")


class Failed(AssertionError):
    """A command of a page did not do what the page says."""


def make_clone(folder: Path) -> Path:
    """A folder in which the project's own paths lead to the project."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _CLONE:
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_page(page: Page, folder: Path) -> None:
    """Run all blocks of a page that say ``run``; raises :class:`Failed`."""
    with contextlib.ExitStack() as running:
        jobs: list[subprocess.Popen[bytes]] = []
        for block in page.commands:
            if not block.is_run:
                continue
            awaited = block.value("when")
            if awaited is not None:
                _wait_for(folder / awaited, block, folder, jobs)
            if "ended" in block.words:
                running.close()
            if "background" in block.words:
                jobs.append(running.enter_context(_background(block, folder)))
            else:
                _run(block, folder)


def _run(block: Block, folder: Path) -> None:
    commands = [] if re.search(r"[|<>&]", block.text) else called(block.text)
    if commands and all(command[0] == "dynatrain" for command in commands):
        code, told, said = 0, "", ""
        for command in commands:
            code, out, error = _here(list(command[1:]), folder)
            told, said = told + out, said + error
            if code:
                break
    else:
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
        code, told, said = ran.returncode, ran.stdout, ran.stderr
    wanted = int(block.value("exit") or 0)
    if code != wanted:
        raise Failed(f"{block}: exit code {code} instead of {wanted}\n{told}\n{said}")
    if block.output is not None and not fits(block.output, told + said):
        raise Failed(f"{block}: the page shows\n{block.output}\nand it is\n{told}{said}")


def _here(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, output and errors of ``dynatrain`` in this process."""
    out, error = io.StringIO(), io.StringIO()
    before, handler = os.getcwd(), signal.getsignal(signal.SIGTERM)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                code = cli.main(words)
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        os.chdir(before)
        signal.signal(signal.SIGTERM, handler)
    return code, out.getvalue(), error.getvalue()


@contextlib.contextmanager
def _background(block: Block, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job that runs while the rest of the page does, and is interrupted at its end."""
    with (folder / "background.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {block.text.lstrip()}"],
            cwd=folder, env=environment(), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
        if process.poll() not in (None, 0):
            raise Failed(f"{block}: ended with {process.returncode}\n{_log(folder)}")
    finally:
        # Its ranks have sessions of their own: torchrun ends them when it is told to end.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def _wait_for(path: Path, block: Block, folder: Path, jobs: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline or any(job.poll() is not None for job in jobs):
            raise Failed(f"{block}: {path} is not there\n{_log(folder)}")
        time.sleep(0.1)


def _log(folder: Path) -> str:
    return (folder / "background.log").read_text()[-4000:]


def fits(shown: str, told: str) -> bool:
    """Whether what is told is what is shown, in which ``…`` stands for anything."""
    wanted = "(?s:.*?)".join(re.escape(part.strip("\n")) for part in _lines(shown).split("…"))
    return re.fullmatch(rf"\s*{wanted}\s*", _lines(told)) is not None


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def environment() -> dict[str, str]:
    """A terminal in which the project's environment is active."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
