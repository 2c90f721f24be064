"""How far the peers' losses differ, of a method whose summaries tell them: of others nothing is known, nor asked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from decentral.optimizers import Contributor, OuterMethod
from decentral.replica.diagnosing.between import dispersion
from decentral.replica.diagnosing.names import LOSS_DISPERSION
from decentral.replica.method_output import attempted

__all__ = ["between_losses"]


def between_losses(method: OuterMethod, told: Sequence[Contributor]) -> dict[str, float]:
    """Over those whose summary tells one. A plugin that raises, or gives no number, tells none."""
    if not method.overrides("told_loss"):
        return {}
    losses = [loss for one in told if (loss := _loss(method, one)) is not None]
    found = dispersion(losses)
    return {} if found is None else {LOSS_DISPERSION: found}


def _loss(method: OuterMethod, told: Contributor) -> float | None:
    """A finite number, or None: a summary is a peer's bytes, and a plugin anybody's code."""
    given, _ = attempted(lambda: method.told_loss(told))
    found, _ = attempted(lambda: float(given))  # type: ignore[arg-type]  # TypeError is what None gives
    return found if found is not None and math.isfinite(found) else None
