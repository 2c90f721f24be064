"""What a contribution counts when outer steps passed since its progress began.

A mean whose weights are multiplied by such shares must not divide by them as well: alone in a commit, a late
contribution would count in full again. ``kept`` is the factor that puts the divisor right.

Shares are products and quotients of float64 and square roots, which IEEE 754 rounds alike everywhere: the power of C's
library differs in its last digits.
"""

import math
from collections.abc import Sequence

__all__ = ["aged", "kept"]


def aged(age: int, times: int) -> float:
    """``(1 + age) ** (-times / 2)``: 1 for one that is in time, and for ``times = 0``."""
    share, root = 1.0, math.sqrt(1.0 + age)
    for _ in range(times):
        share /= root
    return share


def kept(weights: Sequence[float], shares: Sequence[float]) -> float:
    """What a mean by ``weights``, each with its share in it, is multiplied by, so that its divisor has no shares.

    Contributors whose share is 0 are in neither sum. 1 where all shares are 1.
    """
    counted = [(weight, share) for weight, share in zip(weights, shares, strict=True) if weight > 0]
    return math.fsum(weight for weight, _ in counted) / math.fsum(weight / share for weight, share in counted)
