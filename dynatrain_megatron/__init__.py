"""Change the parallel layout of a Megatron-LM training job while it runs.

Importing this package loads neither torch nor Megatron; each room imports what it needs.
"""

__version__ = "0.1.0"
