"""Between which bounds each figure of a healthy swarm stays, and the probable cause where it does not.

The bounds are for warnings that are worth a person's time: each lies well outside of what healthy runs showed
(docs/diagnostics.md has the numbers), and none of them changes what the run does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from decentral.replica.figures import (
    DEBT_RATIO,
    LOSS_DISPERSION,
    MEAN_COSINE,
    NEVER_SENT,
    NORM_DISPERSION,
    REPLICA_VARIANCE,
)

__all__ = ["BANDS", "Band"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where one figure belongs. ``says`` and causes complete a sentence for people."""

    figure: str
    says: str  # the figure in words; ``{value}`` is where its value goes
    low: float = -math.inf
    high: float = math.inf
    among_all: bool = False  # ``low`` is of two contributors; of K it is K - 1 times nearer to 0
    after: int = 0  # rounds of each fragment before which it is not looked at: it begins far out, and comes in
    if_low: str = ""  # probable cause, and what to do
    if_high: str = ""

    def bounds(self, contributors: int) -> tuple[float, float]:
        """Lowest and highest value in the band."""
        return self.low / max(1, contributors - 1) if self.among_all else self.low, self.high

    def cause(self, value: float) -> str:
        """Why a value outside of the band is there, probably."""
        return self.if_high if value > self.high else self.if_low


BANDS = (
    Band(
        figure=NORM_DISPERSION,
        says="the peers' updates differ in length by {value:.0%} of their mean",
        high=0.5,
        if_high="one of them has another learning rate, batch size or data; compare settings, and see outliers in "
        'decentral logs; norm_clip = "median" under [outer] shortens what is far too long',
    ),
    Band(
        figure=LOSS_DISPERSION,
        says="the peers' losses differ by {value:.0%} of their mean",
        high=0.25,
        if_high="their data differ in kind, or one of them diverges; compare data and learning rates",
    ),
    Band(
        figure=MEAN_COSINE,
        says="the peers' updates have a mean cosine of {value:.2f}",
        low=-0.5,  # the mean of K updates then has half the energy that independent ones would have: 1 + (K - 1) c
        high=0.95,
        among_all=True,
        if_low="they undo one another's steps: their data differ so much that each goes to an optimum of its own; make "
        "fewer inner steps between rounds, or share the data more evenly",
        if_high="all pull the anchor back, as the outer learning rate or momentum is too high, or all train on the "
        "same data in the same order, so that more peers bring nothing (peer.seed, peer.shard)",
    ),
    Band(
        figure=DEBT_RATIO,
        says="this peer owes {value:.0f} times what it learnt in a round",
        high=30.0,
        if_high="the compressor sends too little for its error feedback, so that what is sent is stale; keep more "
        "values, or let the debt decay (feedback under [compressor]) in the next run",
    ),
    Band(
        figure=NEVER_SENT,
        says="{value:.0%} of the parameters were never sent by anybody",
        high=0.5,
        after=200,
        if_high="the compressor keeps the same few values each round, or most parameters get no gradient (unused "
        "experts, rare tokens); keep more values, or add a feedback under [compressor]",
    ),
    Band(
        figure=REPLICA_VARIANCE,
        says="the replicas have a variance of {value:.2g} of their own square",
        high=0.02,  # a distance of 20 % of a replica's length
        if_high="pairs pull them together less than training drives them apart: the learning rate is too high, there "
        "are too many inner steps, or pairs fail (decentral logs --event pair); lower one of the first two",
    ),
)
