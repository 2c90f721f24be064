"""Where rules that move a centre begin: at no change, at the mean, or at the medoid.

The medoid is the contribution with the least sum of distances to the others, the first of equals.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.sent import Floats, Sent, total

__all__ = ["Start", "check_start", "start_of"]

Start = Literal["zero", "mean", "medoid"]


def check_start(rule: object, start: str, known: Sequence[Start]) -> None:
    """ConfigError unless it is one of them."""
    if start not in known:
        raise ConfigError(f"{rule}: start is where the centre begins, want one of {', '.join(known)}")


def start_of(sent: Sent, start: str) -> Floats:
    """The start as a mixture of the contributions."""
    if start == "mean":
        return sent.mean_shares()
    share_K = np.zeros(len(sent), dtype=np.float64)
    if start == "medoid":
        sums = [total(np.sqrt(square_K)) for square_K in sent.squared_distances_KK()]
        share_K[sums.index(min(sums))] = 1.0
    return share_K
