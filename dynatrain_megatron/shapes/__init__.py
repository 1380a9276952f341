"""Rosters of any model in any layout, from sizes alone: no Megatron, no torch, no ranks.

They are synthetic: made from the textbook rules of Megatron's cut (stages of layers, tensor
parallel cuts, experts dealt out, the distributed optimizer's flat ranges with its padding), not
taken from a job. Tests hold them against those of real jobs where such can be built. For planning
ahead, for benchmarks, and for tests of worlds that no machine at hand could run.
"""

from dynatrain_megatron.shapes.models import MODELS, Model, Parameter
from dynatrain_megatron.shapes.read import model_shape, read_model
from dynatrain_megatron.shapes.rosters import make_rosters

__all__ = ["MODELS", "Model", "Parameter", "make_rosters", "model_shape", "read_model"]
