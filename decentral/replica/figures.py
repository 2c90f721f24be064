"""The names of the figures that a round tells, as files, statuses and dashboards have them. Without torch, for who only
shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "BEHIND_ALONE",
    "DEBT_RATIO",
    "LOSS_DISPERSION",
    "MEAN_COSINE",
    "NAMES",
    "NEVER_SENT",
    "NORM_DISPERSION",
    "REPLICA_DISTANCE",
    "REPLICA_VARIANCE",
    "STILL_GAINED",
    "Figures",
]

NORM_DISPERSION = "norm_dispersion"  # standard deviation of the contributions' norms over their mean
LOSS_DISPERSION = "loss_dispersion"  # the same of the losses, where a method's summaries tell them
MEAN_COSINE = "mean_cosine"  # over all pairs of contributions, in [-1, 1]
DEBT_RATIO = "debt_ratio"  # norm of what this peer owes over that of its newest pseudo-gradient
NEVER_SENT = "never_sent"  # share of coordinates that nobody has sent since this process looks, in [0, 1]
REPLICA_DISTANCE = "replica_distance"  # gossip: rms of (ours - theirs) over rms of ours, in the newest pair
REPLICA_VARIANCE = "replica_variance"  # gossip: half the mean square of that over the last pairs
BEHIND_ALONE = "behind_alone"  # share of what this peer's own steps would have learnt by now that the anchor lacks
STILL_GAINED = "still_gained"  # share of all that was learnt that steps, commits or the time between looks still gain
NAMES = (
    *(NORM_DISPERSION, LOSS_DISPERSION, MEAN_COSINE, DEBT_RATIO, NEVER_SENT),
    *(REPLICA_DISTANCE, REPLICA_VARIANCE, BEHIND_ALONE, STILL_GAINED),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one round; one that could not be told is not there."""

    outer_step: int = 0  # made so far, this one included; 0: none was looked at
    contributors: int = 0  # that the figures between peers are of
    rounds: int = 0  # of each fragment at least, that this process has looked at for what was never sent
    of_part: bool = False  # of the part that this peer summed, not of whole contributions: it saw no more
    values: Mapping[str, float] = field(default_factory=dict)  # by NAMES; finite
