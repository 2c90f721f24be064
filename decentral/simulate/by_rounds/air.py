"""How long what is said takes, and what of it gets lost and is said again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER
from decentral.simulate.foreseen.round_time import WAYS
from decentral.simulate.profiles import Profile

Seconds = NDArray[np.float64]


@dataclass(slots=True)
class Air:
    """The way between any two machines; draws from ``generator``."""

    profile: Profile
    generator: np.random.Generator

    @property
    def lost(self) -> float:
        """The share of streams of which nothing of use arrives."""
        return 1.0 - (1.0 - self.profile.loss) * (1.0 - self.profile.corruption)

    def delays(self, *shape: int) -> Seconds:
        """Seconds from opening a stream until its first bytes are there; so many of them."""
        delays = np.full(shape, WAYS * self.profile.latency)
        if self.profile.delay:
            delays += self.generator.uniform(0.0, self.profile.delay, shape)
        return delays

    def messages(self, *shape: int) -> Seconds:
        """Seconds until a message is there; one that is lost is said again."""
        return self.delays(*shape) + RESEND_AFTER * self._times_lost(*shape)

    def losses(self, *shape: int) -> NDArray[np.bool_]:
        """Which of so many frames do not come by themselves."""
        return self.generator.random(shape) < self.lost if self.lost else np.zeros(shape, dtype=np.bool_)

    def fetches(self, *shape: int) -> Seconds:
        """Seconds from hearing of a frame that does not come until it is fetched, without its own time on the line."""
        return FETCH_AFTER + self.delays(*shape) + self.profile.latency + RESEND_AFTER * self._times_lost(*shape)

    def _times_lost(self, *shape: int) -> Seconds:
        if not self.lost:
            return np.zeros(shape)
        return (self.generator.geometric(1.0 - self.lost, shape) - 1).astype(np.float64)
