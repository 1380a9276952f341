"""The phases of a switch by name, in the order in which they happen."""

PHASES = (
    "prepare",
    "groups",
    "quiesce",
    "replicas",
    "build",
    "plan",
    "memory",
    "pack",
    "wire",
    "unpack",
    "rebuild",
    "verify",
    "vote",
    "commit",
    "save",
    "writers",
)
"""``replicas`` and ``save`` are there where they are asked for. ``writers`` is until all ranks go
on: mostly the taking up of TensorBoard's and W&B's writers by another process.
"""
