"""One layout on one process of a made-up job: its state, and what lies beside it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynatrain_megatron.engine import Fragments
from dynatrain_megatron.engine.holdings import Holdings
from dynatrain_megatron.engine.memory import Dropped


class Side(NamedTuple):
    """With gradients, and parameters that are rebuilt elsewhere."""

    holdings: Holdings
    tensors: list[torch.Tensor]
    gradients: torch.UntypedStorage
    missing: Dropped

    @classmethod
    def of(cls, fragments: Fragments, *, there: bool) -> Side:
        """A target, which is not ``there``, has memory for none of it yet."""
        rebuilt, gradients = torch.zeros(len(fragments.roster) + 1), torch.zeros(50)
        tensors = [*(view for views in fragments.views for view in views), rebuilt, gradients]
        missing = Dropped([] if there else tensors)
        holdings = Holdings(
            fragments,
            gradients=[gradients],
            rebuilt=[rebuilt],
            everything=tensors,
            missing=missing,
        )
        return cls(holdings, tensors, gradients.untyped_storage(), missing)
