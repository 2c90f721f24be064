"""How far the contributions of one round differ, from what was measured of each when its frame was checked.

dispersion   std(x) / mean(x)                                           over the peers
mean cosine  mean of <x_i, x_j> / (|x_i| |x_j|) over i < j = (|sum u_i|^2 - K) / (K (K - 1)),   u_i = x_i / |x_i|

The right-hand side needs K sums instead of K^2 products. Its vectors are sketches of 1024 numbers
(`decentral.optimizers.aggregation.sketches`): the mean over K of them is off by about 0.04 / (K - 1), and exact for
contributions that are equal or opposite. All is float64 in the order of the record, so that peers who measured the same
frames have the same bits.
"""
# Shape suffixes: K = contributions, S = numbers of a sketch or a sample.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.replica.diagnosing.names import MEAN_COSINE, NORM_DISPERSION
from decentral.replica.received.measures import Measure

__all__ = ["between", "dispersion", "mean_cosine"]


def between(measures: Sequence[Measure]) -> dict[str, float]:
    """The figures of contributions, as far as there are any: one alone differs from nobody."""
    found = {
        NORM_DISPERSION: dispersion([one.norm for one in measures]),
        MEAN_COSINE: mean_cosine([one.sketch_S for one in measures]),
    }
    return {name: value for name, value in found.items() if value is not None}


def dispersion(values: Sequence[float]) -> float | None:
    """None of fewer than two, and where their mean is not above 0, or beyond what a float holds."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    if not 0 < mean < math.inf:
        return None
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) / mean


def mean_cosine(vectors: Sequence[Tensor]) -> float | None:
    """Over all pairs of flat vectors (S,), but those that are zero or not finite; None: fewer than two are left."""
    if not vectors:
        return None
    vector_KS = torch.stack(list(vectors)).double()
    norm_K = vector_KS.norm(dim=1)
    has_one_K = norm_K.isfinite() & (norm_K > 0)
    count = int(has_one_K.sum())
    if count < 2:
        return None
    unit_KS = vector_KS[has_one_K] / norm_K[has_one_K, None]
    cosine = (float(unit_KS.sum(0).square().sum()) - count) / (count * (count - 1))
    return max(-1.0, min(1.0, cosine))
