"""The outer step of each algorithm: pure tensors, the source's equation beside the code.

One sign (pseudo-gradient = anchor - local, subtracted) and one divisor (`mean_pseudo_gradient`).
"""

from decentral.optimizers.aggregation.mean import mean_pseudo_gradient
from decentral.optimizers.base import OuterOptimizer
from decentral.optimizers.diloco import DiLoCo, outer_learning_rate
from decentral.optimizers.merge import merge
from decentral.optimizers.noloco import NoLoCo
from decentral.optimizers.registry import PRESETS, Preset, describe_optimizers, make_outer
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.optimizers.streaming import StreamingDiLoCo

__all__ = [
    "PRESETS",
    "DiLoCo",
    "NoLoCo",
    "OuterOptimizer",
    "Preset",
    "SparseLoCo",
    "StreamingDiLoCo",
    "describe_optimizers",
    "make_outer",
    "mean_pseudo_gradient",
    "merge",
    "outer_learning_rate",
]
