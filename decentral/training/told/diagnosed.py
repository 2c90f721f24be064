"""Joins what rounds tell of the swarm to one peer: the newest figures for its status, events when one leaves its band.

Called on the swarm's thread before the training side learns of the round; read by any.
"""

from __future__ import annotations

from collections.abc import Callable

from decentral.observe.diagnostics.watch import Watch
from decentral.replica.figures import Figures

__all__ = ["Diagnosed"]


class Diagnosed:
    """Of one peer's rounds, since its process began."""

    def __init__(self, emit: Callable[[str, dict[str, object]], None]) -> None:
        """``emit``: takes an event and its fields."""
        self._emit, self._watch = emit, Watch()
        self.now = Figures()  # of the newest round; replaced, never written to

    @property
    def out(self) -> tuple[str, ...]:
        """Names of the figures that are out of their bands."""
        return self._watch.out

    def __call__(self, figures: Figures) -> None:
        """One more round."""
        self.now = figures
        for crossing in self._watch.see(figures):
            self._emit(
                "out_of_band" if crossing.is_out else "back_in_band",
                {
                    "outer_step": crossing.outer_step,
                    "figure": crossing.figure,
                    "value": crossing.value,
                    "low": crossing.low,
                    "high": crossing.high,
                    "why": crossing.why,
                },
            )
