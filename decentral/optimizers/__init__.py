"""Outer methods: each class the whole algorithm, the source's equation beside the code.

A method is a frozen dataclass derived from `OuterMethod`, whose fields are the keys that ``[outer]`` accepts for it.
"""

from decentral.optimizers.aggregation.base import Aggregation
from decentral.optimizers.aggregation.registry import (
    aggregation_names,
    describe_aggregation_keys,
    describe_aggregations,
    make_aggregation,
)
from decentral.optimizers.base import (
    CHANGE,
    NO_MOMENTS,
    Channel,
    Contributor,
    InnerOptimizer,
    Live,
    OuterMethod,
    Preset,
    RoundInfo,
    Speaking,
    Summary,
    Timing,
    compressor_beside,
    key,
    rate,
)
from decentral.optimizers.mean import mean_pseudo_gradient
from decentral.optimizers.registry import describe_keys, describe_optimizers, make_outer, methods_with, presets
from decentral.optimizers.steps import blend, carry

__all__ = [
    "CHANGE",
    "NO_MOMENTS",
    "Aggregation",
    "Channel",
    "Contributor",
    "InnerOptimizer",
    "Live",
    "OuterMethod",
    "Preset",
    "RoundInfo",
    "Speaking",
    "Summary",
    "Timing",
    "aggregation_names",
    "blend",
    "carry",
    "compressor_beside",
    "describe_aggregation_keys",
    "describe_aggregations",
    "describe_keys",
    "describe_optimizers",
    "key",
    "make_aggregation",
    "make_outer",
    "mean_pseudo_gradient",
    "methods_with",
    "presets",
    "rate",
]
