"""Virtual Parameter Space: every unsharded tensor of a training job, and who holds which part.

A *logical tensor* is one unsharded tensor of the model or its optimizer, named by its checkpoint
key. A *region* is a box ``[start, stop)`` in a logical tensor's coordinates. A *fragment* is a
region and the place where one rank stores it; all fragments of a rank are its *roster*, and the
rosters of all ranks of a layout are a *roster set*::

    logical tensor "decoder.layers.linear_qkv.weight", shape (layers, out, in)

          in ->
        +-----------+     layer 0, tp 0   fragment of rank 0
    out |  rank 0   |
        +-----------+
        |  rank 1   |     layer 0, tp 1   fragment of rank 1
        +-----------+

This package is geometry on integers: no tensors, no process groups, no Megatron.
"""

from dynatrain_megatron.vps.region import Region, flat_range_regions
from dynatrain_megatron.vps.roster import Roster, RosterBuilder, RosterSet
from dynatrain_megatron.vps.tensors import LogicalTensor, State, StateKind

__all__ = [
    "LogicalTensor",
    "Region",
    "Roster",
    "RosterBuilder",
    "RosterSet",
    "State",
    "StateKind",
    "flat_range_regions",
]
