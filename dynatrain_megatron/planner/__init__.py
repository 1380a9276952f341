"""From two roster sets to a plan: which rank sends what to whom, in which order.

Pure functions of plain data: every rank replays them on the same inputs and gets the same plan,
so that no coordinator is needed; plans are compared by digest before any byte moves. What concerns
all ranks is worked out in terms of sets of ranks and pairs of ranks, the detail by each rank for
itself. The steps:

``cells``     every box once, and the sets of ranks that hold it
``flows``     what one set of ranks holds and one set wants
``shares``    who sends which part of a flow to whom; ``balance`` shares it out between holders
``relays``    where several ranks of a node want the same: it comes to them once, they pass it on
``routes``    the pieces of that: regions, and the fragments they are in
``schedule``  streams between two ranks as messages, messages in bounded windows: the columns
``windows``   who places them: ``direct``, ``rounds`` (xor, ring), or what ``cost`` says is fastest
``checks``    coverage proof and the lower bound of bytes, computed another way
``plan``      all of it as one value, with the figures a report needs; ``cache`` keeps some
``stages``    parts of the state moved one after the other, and the memory that takes; ``staged``
              is a plan for each of them

Before that ``placement`` may let processes take other ranks, so that less has to move at all; which
rank is worth most to whom is ``assignment``. ``topology`` is where ranks are and how fast their
links, ``topology_file`` what a user says of that. ``bound`` judges plans: how little the busiest
rank could send.
"""

from dynatrain_megatron.planner.cache import PlanCache, Recent
from dynatrain_megatron.planner.placement import Placement, PlacementOptions, place
from dynatrain_megatron.planner.plan import Plan, PlanOptions, make_plan
from dynatrain_megatron.planner.shares import Sources
from dynatrain_megatron.planner.topology import Speeds, Topology
from dynatrain_megatron.planner.topology_file import TopologyFile, read_topology_file

__all__ = [
    "Placement",
    "PlacementOptions",
    "Plan",
    "PlanCache",
    "PlanOptions",
    "Recent",
    "Sources",
    "Speeds",
    "Topology",
    "TopologyFile",
    "make_plan",
    "place",
    "read_topology_file",
]
