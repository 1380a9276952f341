"""Rank 0 of a job of two processes at a real store, without Megatron and without its thread."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dynatrain_megatron.config import EngineTransport, Overlap
from dynatrain_megatron.elastic.store import JobStore
from dynatrain_megatron.elastic.world import process_uid
from dynatrain_megatron.plugin.membership import Membership
from dynatrain_megatron.transition.posted import Posted
from dynatrain_megatron.transition.prepare import Wire

OWN, OTHER, JOINER = process_uid(), "other", "joiner"


def membership(store: JobStore, *, timeout_s: float) -> Membership:
    """That of rank 0 in a job of two processes, without its thread."""
    job: Any = SimpleNamespace(
        processes=(OWN, OTHER), built=object(), num_changes=0, iteration=1, layout="dp2", secret=""
    )
    wire = Wire(EngineTransport.torch, 1 << 20, 20.0)
    return Membership(
        job,
        store,
        _no_check,
        wire,
        run_dir=Path("unused"),
        overlap=Overlap.off,
        timeout_s=timeout_s,
    )


def _no_check(posted: Posted) -> Any:
    raise AssertionError(posted)
