"""Executes a plan: pack, send and receive, unpack; and proves that the result is right."""

from dynatrain_megatron.engine.connect import connect
from dynatrain_megatron.engine.execute import BoundPlan, ExecutionReport, bind_plan, execute
from dynatrain_megatron.engine.fragments import Fragments, FragmentsBuilder
from dynatrain_megatron.engine.rings import RingTransport
from dynatrain_megatron.engine.same_host import SameHostTransport
from dynatrain_megatron.engine.transport import TorchTransport, Transport

__all__ = [
    "BoundPlan",
    "ExecutionReport",
    "Fragments",
    "FragmentsBuilder",
    "RingTransport",
    "SameHostTransport",
    "TorchTransport",
    "Transport",
    "bind_plan",
    "connect",
    "execute",
]
