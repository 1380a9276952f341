"""What every test run needs first: the platform before anything of Megatron, and steady timing."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from dynatrain_megatron import platform

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
