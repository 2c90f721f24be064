"""What norms are usual, learnt from norm to norm, and which one is far above it.

z = (norm - mean) / sigma, an outlier when z > 3 max(1, std z)
mean <- mean + a d ;  M2 <- (1-a) (M2 + a d d')      d, d': norm - mean, before and after ;  a = 0.02

What was learnt is four float32, (count, mean, M2, mean z^2), as part of a state that all peers hold alike. It is
computed in float64. std z is learnt after the warm-up: after two norms that are nearly equal the third one's z may be
500, and nothing would be an outlier for the next 400.

Source: Cheng et al., "EDiT", 2024, arXiv:2412.07210; constants as in intelligent-machine-learning/atorch.
"""

import math

import torch
from torch import Tensor

__all__ = ["LARGEST", "UNKNOWN", "is_outlier", "learnt"]

LARGEST = 1e18  # of a norm, and of z: a square beyond float32 would stay in the state for ever
UNKNOWN = (0.0, 0.0, 0.0, 0.0)
_AVERAGING = 0.02  # a, of the moving mean and variance
_THRESHOLD = 3.0  # standard deviations


def is_outlier(value: float, usual: Tensor, warmup: int) -> bool:
    """Whether a norm is far above the usual; before ``warmup`` norms were learnt from only one that cannot be is."""
    count, mean, squares, deviation = usual.tolist()
    if not math.isfinite(value):
        return True
    if count < warmup or squares <= 0:
        return False
    return bool((value - mean) / math.sqrt(squares) > _THRESHOLD * max(1.0, math.sqrt(deviation)))


def learnt(usual: Tensor, value: float, warmup: int) -> Tensor:
    """What is usual with one more norm."""
    count, mean, squares, deviation = usual.tolist()
    if count == 0:
        return torch.tensor([1.0, value, 0.0, 0.0])
    off = value - mean
    if count >= warmup and squares > 0:
        z = min(abs(off) / math.sqrt(squares), LARGEST)
        deviation += _AVERAGING * (z * z - deviation)
    mean += _AVERAGING * off
    squares = (1 - _AVERAGING) * (squares + _AVERAGING * off * (value - mean))
    return torch.tensor([count + 1, mean, squares, deviation])
