"""What came of a forecast by rounds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class StepTimes:
    """Of each outer step, or gossip step of whoever is first."""

    times: list[float] = field(default_factory=list)  # s
    reached: int = 0  # outer steps; in gossip peers leave some out
    named: list[int] = field(default_factory=list)  # contributors of each round; of gossip 2 for each pair, else 1

    @property
    def seconds_per_round(self) -> float | None:
        """Median seconds from one to the next; None of one."""
        took = [after - before for before, after in pairwise(self.times)]
        return round(statistics.median(took), 3) if took else None
