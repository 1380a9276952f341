"""Executes a plan: pack, send and receive, unpack; and proves that the result is right."""

from dynatrain_megatron.engine.execute import ExecutionReport, execute
from dynatrain_megatron.engine.fragments import Fragments, FragmentsBuilder
from dynatrain_megatron.engine.same_host import SameHostTransport, connect
from dynatrain_megatron.engine.transport import LocalTransport, TorchTransport, Transport

__all__ = [
    "ExecutionReport",
    "Fragments",
    "FragmentsBuilder",
    "LocalTransport",
    "SameHostTransport",
    "TorchTransport",
    "Transport",
    "connect",
    "execute",
]
