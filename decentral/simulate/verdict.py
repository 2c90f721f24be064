"""What the checker found: counts of broken guarantees, and a sentence for each."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Verdict:
    """What was found; all zero and empty when every guarantee held."""

    divergence: int = 0  # rounds with two records, or one record with two anchors
    lost_updates: int = 0  # inner steps of peers that never went down, gone
    duplicated_updates: int = 0  # inner steps that moved the anchor twice
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing was broken."""
        return not (self.divergence or self.lost_updates or self.duplicated_updates or self.problems)

    def say(self, problem: str) -> None:
        """Note one broken guarantee."""
        self.problems.append(problem)
