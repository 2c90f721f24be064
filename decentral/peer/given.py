"""Totals of what one peer gave to its run over all its lives, and the words that thank it.

It is part of every checkpoint: after a crash it is as old as the newest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from decentral.observe.health import in_time
from decentral.observe.story import number
from decentral.training.reporting import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Totals of a peer."""

    rounds: int = 0  # commits that have a contribution of it
    tokens: int = 0  # that it trained on; 0: nobody says how many are behind a step
    seconds: float = 0.0  # between its inner steps, waits for rounds among them, pauses not
    sent: int = 0  # bytes

    @classmethod
    def from_mapping(cls, found: object) -> Given:
        """Read what a checkpoint holds; one of an older version holds none."""
        known = found if isinstance(found, Mapping) else {}
        told = {name: number(known.get(name)) or 0 for name in ("rounds", "tokens", "sent", "seconds")}
        whole = {name: int(told[name]) for name in ("rounds", "tokens", "sent")}
        return cls(**whole, seconds=float(told["seconds"]))


class Giving:
    """Totals that grow. The training thread counts, any thread reads."""

    def __init__(
        self,
        counters: Counters,
        tokens_per_step: int,
        sent: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``sent``: bytes that this process has sent."""
        self.before = Given()  # of earlier processes
        self.steps = 0  # inner steps of this one
        self._counters, self._tokens_per_step, self._sent, self._clock = counters, tokens_per_step, sent, clock
        self._seconds = 0.0
        self._stepped_at: float | None = None  # None: the time until the next step does not count

    def stepped(self, *, paused: bool) -> None:
        """Count an inner step, and the time since the one before unless the peer was ``paused`` meanwhile."""
        now = self._clock()
        if self._stepped_at is not None and not paused:
            self._seconds += now - self._stepped_at
        self.steps += 1
        self._stepped_at = None if paused else now

    def pauses(self) -> None:
        """Count no time until the step after the next."""
        self._stepped_at = None

    def now(self) -> Given:
        """Return the totals as they are."""
        return Given(
            rounds=self.before.rounds + self._counters.num_contributed,
            tokens=self.before.tokens + self.steps * self._tokens_per_step,
            seconds=self.before.seconds + self._seconds,
            sent=self.before.sent + self._sent(),
        )

    def memory(self) -> dict[str, float]:
        """Write them down for a checkpoint."""
        return asdict(self.now())


def share_given(rounds: int, committed: int) -> float | None:
    """Return a peer's share of the contributions that the chain counts; None where it counts none, as in gossip."""
    return min(1.0, rounds / committed) if committed else None


def thanks(given: Given, inner_steps: int, share: float | None) -> str:
    """Say goodbye to who lent the machine."""
    rounds = f"{given.rounds:,} round{'' if given.rounds == 1 else 's'}"
    steps = f"{inner_steps:,} step{'' if inner_steps == 1 else 's'}"
    part = "" if share is None else f": {100 * share:.3g} % of the run so far"
    return f"you gave {rounds}, {steps} and {in_time(given.seconds)}{part}. Thank you."
