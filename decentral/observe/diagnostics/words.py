"""Figures in words: the warning when one leaves its band, and the line of ``decentral status``."""

from __future__ import annotations

from collections.abc import Mapping

from decentral.observe.diagnostics.bands import BANDS
from decentral.replica.figures import (
    DEBT_RATIO,
    LOSS_DISPERSION,
    MEAN_COSINE,
    NEVER_SENT,
    NORM_DISPERSION,
    REPLICA_DISTANCE,
    REPLICA_VARIANCE,
)

__all__ = ["back_sentence", "in_words", "warning"]

_SAYS = {band.figure: band.says for band in BANDS}
_SHORT = {
    NORM_DISPERSION: "norms differ by {:.0%}",
    LOSS_DISPERSION: "losses differ by {:.0%}",
    MEAN_COSINE: "mean cosine {:.3f}",
    DEBT_RATIO: "owed {:.2g} x a round's update",
    NEVER_SENT: "{:.0%} never sent",
    REPLICA_DISTANCE: "replicas {:.2%} apart",
    REPLICA_VARIANCE: "variance {:.2g}",
}


def warning(figure: str, value: float, why: str, outer_step: int) -> str:
    """What is said when a figure left its band."""
    said = _SAYS[figure].format(value=value) if figure in _SAYS else f"{figure} is {value:.3g}"
    return f"{said} (round {outer_step}); probably {why}"


def back_sentence(figure: str, value: float, outer_step: int) -> str:
    """What is said when it is back."""
    said = _SAYS[figure].format(value=value) if figure in _SAYS else f"{figure} is {value:.3g}"
    return f"{said} (round {outer_step}); that is usual again"


def in_words(values: Mapping[str, float]) -> str:
    """All figures in one line; of a name that this version does not know, the name."""
    return ", ".join(_SHORT.get(name, f"{name} {{:.3g}}").format(value) for name, value in values.items())
