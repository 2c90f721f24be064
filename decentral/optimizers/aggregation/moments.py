"""Mean and variance of a tensor's values, with the same bits on every machine.

Values are added row by row into lanes, and the lanes in halves: ``torch.sum`` splits by the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decentral.optimizers.aggregation.norm_clip import norm
from decentral.tensors.ops import WIDTH, rows_of

__all__ = ["mean_and_variance"]

# Shape suffixes: N = values, L = lanes, R = rows of so many.


def mean_and_variance(value_N: Tensor) -> tuple[float, float]:
    """The mean, and the unbiased variance, of two values or more of a flat float32 tensor on the processor.

    The mean is rounded to float32, so that deviations from it are float32 as well; what rounding took is put right.
    """
    count, mean = len(value_N), _sum(value_N) / len(value_N)
    near = float(np.float32(mean))
    with torch.no_grad():
        squares = norm(value_N - near) ** 2 - count * (mean - near) ** 2
    return near, max(0.0, squares / (count - 1))


def _sum(value_N: Tensor) -> float:
    """Row by row into the lanes, then the lanes in halves."""
    lane_L = np.zeros(WIDTH, dtype=np.float64)
    for value_RL in rows_of((value_N,)):
        for row_L in value_RL:
            lane_L += row_L
    while lane_L.size > 1:
        half = lane_L.size // 2
        lane_L = lane_L[:half] + lane_L[half:]
    return float(lane_L[0])
