"""Which layout to take: the feasible ones of a number of ranks, with memory and time, best first.

Pure functions of a model's sizes; no torch, no Megatron, no ranks. Memory is exact but for
activations, time is a rough prediction that serves to put layouts in order.
"""

from dynatrain_megatron.advisor.advise import AXES, Advice, Advised, advise, feasible, judge
from dynatrain_megatron.advisor.flags import layout_options, read_flags, workload_of
from dynatrain_megatron.advisor.memory import MemoryEstimate, estimate_memory, stage_memory
from dynatrain_megatron.advisor.workload import ElementBytes, Machine, Recompute, Workload

__all__ = [
    "AXES",
    "Advice",
    "Advised",
    "ElementBytes",
    "Machine",
    "MemoryEstimate",
    "Recompute",
    "Workload",
    "advise",
    "estimate_memory",
    "feasible",
    "judge",
    "layout_options",
    "read_flags",
    "stage_memory",
    "workload_of",
]
