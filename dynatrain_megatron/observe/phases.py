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
)
"""``replicas`` and ``save`` only where they are asked for; ``rebuild`` of what is gathered."""
