"""What every test run needs first: the platform before anything of Megatron, and steady timing."""

import signal
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import settings

from dynatrain_megatron import platform
from tests import support as table

# Some tests import Megatron themselves, in whatever order they are collected.
platform.install("auto")

# Machines that run tests are shared: how long one example takes says nothing about the code.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, and ends new processes, as at a terminal.

    A shell ignores it for what it runs in the background, and processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


_FOUND = pytest.StashKey[dict[str, table.Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-support",
        action="store_true",
        help="record what the tests find in docs/support.json and docs/support.md",
    )
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="bring pictures and tables in docs/ up to date that are made of something else",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FOUND] = {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = session.config.stash[_FOUND]
    if found and session.config.getoption("--write-support"):
        table.write(found)


@pytest.fixture
def support(
    request: pytest.FixtureRequest,
) -> Callable[[str, table.How, Iterable[tuple[str, str]]], None]:
    """Say at the end of a test what it has shown: a name, how, and pairs of layouts."""

    def add(name: str, how: table.How, pairs: Iterable[tuple[str, str]] = ()) -> None:
        row = table.row(how, request.node.nodeid.partition("[")[0], pairs)
        request.config.stash[_FOUND][name] = row
        if not request.config.getoption("--write-support"):
            recorded = table.load().get(name)
            assert recorded == row, f"stale row {name!r}: run this test with --write-support"

    return add
