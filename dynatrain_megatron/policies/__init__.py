"""Policies: functions that say, at a step boundary, which layout a job should go on in.

A policy is named in the configuration, ``policy=package.module:function``, and called on rank 0.
It gets a :class:`PolicyContext` and returns a layout or None. Shipped are :func:`schedule`,
:func:`follow_capacity` and :func:`alternate`. They know neither torch nor Megatron.
"""

from dynatrain_megatron.policies.contract import (
    Answer,
    Policy,
    PolicyContext,
    as_changes,
    ask_policy,
    first_of,
    load_policy,
)
from dynatrain_megatron.policies.shipped import alternate, follow_capacity, schedule

__all__ = [
    "Answer",
    "Policy",
    "PolicyContext",
    "alternate",
    "as_changes",
    "ask_policy",
    "first_of",
    "follow_capacity",
    "load_policy",
    "schedule",
]
