"""Figures of a running job for Prometheus: what they are, as text, in a file and over HTTP."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe import scalars

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
EVERY_S = 5.0
_REQUEST_S = 5.0

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


class Figures:
    """What a process has seen of its job's switches, since it came; all ranks see the same."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._switches = self._refused = self._moved = self._peak = 0
        self._stalls_s = self._stall_s = 0.0
        self._seconds: dict[str, float] = {}

    def switched(
        self, seconds: Mapping[str, float], moved: int, peak_extra: int, stall_s: float
    ) -> None:
        """A switch was made: seconds by phase, bytes."""
        self._switches += 1
        self._moved += moved
        self._stalls_s += stall_s
        self._seconds, self._stall_s, self._peak = dict(seconds), stall_s, peak_extra

    def refused(self) -> None:
        """A switch was refused, or called off."""
        self._refused += 1

    def text(
        self, *, iteration: int, layout: ParallelLayout, waiting: int, leaving: int, switching: bool
    ) -> str:
        """All of it in Prometheus' text format; ``switching`` is whether a switch is announced."""
        degrees: list[Sample] = [
            ({"axis": tag.rpartition("/")[2]}, value)
            for tag, value in scalars.of_layout(layout).items()
        ]
        phases: list[Sample] = [({"phase": name}, value) for name, value in self._seconds.items()]
        parts = [
            self._gauge("iteration", "Last iteration trained.", iteration),
            self._gauge("layout_info", "Layout in force.", [({"layout": str(layout)}, 1)]),
            self._gauge("layout", "Degrees of the layout, and its ranks.", degrees),
            self._gauge("waiting_processes", "Processes that wait to join.", waiting),
            self._gauge("leaving_processes", "Processes that are to leave.", leaving),
            self._gauge("switch_announced", "Whether a switch is under way.", int(switching)),
            self._counter("switches", "Switches made.", self._switches),
            self._counter("switches_refused", "Refused or called off.", self._refused),
            self._counter("stall_seconds", "Time without a training step.", self._stalls_s),
            self._counter("moved_bytes", "Bytes moved between ranks.", self._moved),
        ]
        if self._switches:
            parts += [
                self._gauge("last_stall_seconds", "Stall of the last switch.", self._stall_s),
                self._gauge("last_phase_seconds", "Its phases.", phases),
                self._gauge("last_peak_extra_bytes", "Most memory a rank took.", self._peak),
            ]
        return "".join(parts)

    def _gauge(self, name: str, told: str, value: float | Sequence[Sample]) -> str:
        return self._metric(f"dynatrain_{name}", "gauge", told, value)

    def _counter(self, name: str, told: str, value: float) -> str:
        return self._metric(f"dynatrain_{name}_total", "counter", told, value)

    def _metric(self, name: str, kind: str, told: str, value: float | Sequence[Sample]) -> str:
        samples = value if isinstance(value, Sequence) else [({}, value)]
        lines = [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
        for labels, each in samples:
            inside = ",".join(
                f'{key}="{_escaped(text)}"' for key, text in {"run": self._run, **labels}.items()
            )
            lines.append(f"{name}{{{inside}}} {each}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Exporter:
    """Publishes a text again and again, on a thread: in a file, at a port, or both.

    ``render`` gives the text, or None where this process is not to publish: then the file goes and
    the port is free. What cannot be written or bound is a warning, once, and tried again.
    """

    def __init__(
        self, render: Callable[[], str | None], file: Path | None, host: str, port: int | None
    ) -> None:
        self._render = render
        self._file = file
        self._address = None if port is None else (host, port)
        self._server: _Server | None = None
        self._wrote = False
        self._warned: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish no more."""
        self._stopping.set()
        self._thread.join(2 * _REQUEST_S)

    def _run(self) -> None:
        while True:
            text = self._render()
            if text is None:
                self._withdraw()
            else:
                with self._warning(f"the port of control.metrics_port={self._address}"):
                    self._serve(text)
                with self._warning(f"control.metrics_file={self._file}"):
                    self._write(text)
            if self._stopping.wait(EVERY_S):
                self._withdraw()
                return

    def _serve(self, text: str) -> None:
        if self._address is None:
            return
        if self._server is None:
            self._server = _Server(self._address, _Handler)
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._server.text = text

    def _write(self, text: str) -> None:
        """Whoever reads the file sees all of a text, this one or the one before."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(self._file)
        self._wrote = True

    def _withdraw(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._wrote and self._file is not None:
            self._wrote = False
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if what not in self._warned:
                self._warned.add(what)
                logger.warning("%s cannot be had: %s; it is tried again", what, error)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    text = ""


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server_version, sys_version = "dynatrain", ""

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] in ("/metrics", "/")
        assert isinstance(self.server, _Server)
        body = self.server.text.encode() if found else b"see /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of each request."""
