"""Outer methods: each file the whole algorithm, the source's equation beside the code.

A method is a frozen dataclass derived from `OuterMethod`, whose fields are the keys that ``[outer]`` accepts for it.
"""

from decentral.optimizers.aggregation.mean import mean_pseudo_gradient
from decentral.optimizers.base import OuterMethod, Preset, Quorum, key
from decentral.optimizers.channels import CHANGE, Channel
from decentral.optimizers.live import NO_MOMENTS, InnerOptimizer, Live
from decentral.optimizers.merge import blend, carry
from decentral.optimizers.registry import describe_keys, describe_optimizers, make_outer, methods_with, presets
from decentral.optimizers.round_info import Contributor, RoundInfo

__all__ = [
    "CHANGE",
    "NO_MOMENTS",
    "Channel",
    "Contributor",
    "InnerOptimizer",
    "Live",
    "OuterMethod",
    "Preset",
    "Quorum",
    "RoundInfo",
    "blend",
    "carry",
    "describe_keys",
    "describe_optimizers",
    "key",
    "make_outer",
    "mean_pseudo_gradient",
    "methods_with",
    "presets",
]
