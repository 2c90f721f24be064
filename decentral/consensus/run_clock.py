"""Whether the time of a run that ends by time is up, as one part of a peer tells all the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunClock:
    """Read by the round machine and by the training thread; told the run's age on the swarm's."""

    minutes: float | None = None  # None: the run ends by its rounds
    is_up: bool = False

    def tell(self, age: float) -> None:
        """The run has lasted ``age`` seconds."""
        self.is_up = self.minutes is not None and age >= 60 * self.minutes
