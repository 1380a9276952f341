"""From two roster sets to a plan: which rank sends what to whom, in which order.

Pure functions of plain data: every rank replays them on the same inputs and gets the same plan,
so that no coordinator is needed; plans are compared by digest before any byte moves. The steps:

``routes``    each needed region: retained, or from which holder
``schedule``  moved pieces coalesced into messages, messages placed into bounded windows
``checks``    coverage proof and the lower bound of bytes, computed another way
``plan``      all of it as one value, with the figures a report needs
"""

from dynatrain_megatron.planner.plan import Plan, PlanOptions, make_plan
from dynatrain_megatron.planner.topology import Topology

__all__ = ["Plan", "PlanOptions", "Topology", "make_plan"]
