"""What every test run needs first: the platform before anything of Megatron, and steady timing."""

from hypothesis import settings

from dynatrain_megatron import platform

# Some tests import Megatron themselves, in whatever order they are collected.
platform.install("auto")

# Machines that run tests are shared: how long one example takes says nothing about the code.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
