"""What the worlds rest on inside torch: every internal name, with its reason, and the check.

torch calls ``distributed_c10d._world`` an extension point and keeps the rest to itself, so a new
release may change any of it. :func:`check` says so before a world is touched. What it found with
torch 2.11 and 2.14 is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dynatrain_megatron.errors import HostMismatch


@dataclass(frozen=True, slots=True)
class TorchName:
    """A name of torch, dotted, below ``torch.distributed`` or ``torch._C``."""

    name: str
    reason: str


NAMES = (
    TorchName("distributed.distributed_c10d._world", "where torch looks up its process groups"),
    TorchName("distributed.distributed_c10d._World", "the class of what it finds there"),
    TorchName(
        "_C._distributed_c10d._unregister_process_group",
        "names of groups outlive the groups in C++, and the next group of that name is refused",
    ),
    TorchName(
        "_C._distributed_c10d._set_global_rank",
        "building a world gives C++ logs the rank in it, long before it is in force",
    ),
    TorchName("distributed.ProcessGroup.shutdown", "ends one group and no other"),
    TorchName(
        "distributed.ProcessGroup.set_timeout",
        "connecting is given seconds, training the minutes it was launched with",
    ),
    TorchName("distributed.ProcessGroup._device_types", "what a group's tombstone stands in for"),
    TorchName("distributed.ProcessGroup._register_backend", "puts a tombstone in a group's place"),
    TorchName("distributed.ProcessGroup._set_default_backend", "the same for barriers"),
    TorchName("distributed.ProcessGroup.BackendType.UNDEFINED", "a kind no living group has"),
    TorchName("_C._distributed_c10d.Backend", "the tombstone, where Python can make one"),
    TorchName(
        "_C._distributed_c10d.FakeProcessGroup.Options.error_on_collective",
        "the tombstone elsewhere",
    ),
)

TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
"""Tables of torch's record that all records share, and that must not be shared by worlds."""

_OTHERS = ("default_pg", "group_count", "pg_coalesce_state", "pg_config_info", "comms")
"""Its other properties: two that we keep ourselves, two of each object's own, one computed."""


def check() -> None:
    """Raise :class:`HostMismatch` where this torch is not what worlds are made for; local."""
    for entry in NAMES:
        value: Any = torch
        for part in entry.name.split("."):
            value = getattr(value, part, None)
            if value is None:
                raise _mismatch(f"has no torch.{entry.name} ({entry.reason})")
    record = dist.distributed_c10d._World
    properties = {name for name, value in vars(record).items() if isinstance(value, property)}
    if missing := {*TABLES, "default_pg", "group_count"} - properties:
        raise _mismatch(f"keeps no {', '.join(sorted(missing))} in its record of process groups")
    if unknown := properties - {*TABLES, *_OTHERS}:
        raise _mismatch(f"keeps {', '.join(sorted(unknown))} too in its record of process groups")
    one, other = record(), record()
    for name in ("pg_coalesce_state", "comms"):
        if name in properties and getattr(one, name) is getattr(other, name):
            raise _mismatch(f"shares {name} among all records of process groups")


def _mismatch(what: str) -> HostMismatch:
    return HostMismatch(
        f"torch {torch.__version__} {what}, so processes cannot change worlds in it; install "
        "torch 2.11 to 2.14, or a dynatrain-megatron made for this one"
    )
