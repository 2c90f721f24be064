"""The messages of a round as seconds: how long what is said takes, what of it gets lost and is said again, and when a
leader, voters and everybody have what they wait for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decentral.consensus.machine import TICK
from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER
from decentral.consensus.timing import Deadline
from decentral.simulate.scenario import Profile
from decentral.training.round_time import WAYS

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


# ---- the end of a leader's wait ----
#
# When it waits no longer, and whose contributions it has then: as `decentral.consensus.leader` has it.


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The leader's view of a round: per offer, in any order."""

    opened: float
    heard: Seconds  # when each offer is here
    usable: Seconds  # when what it offers is here, too
    allowed: Seconds  # how long that may be on its way
    awaited: np.ndarray  # whether anybody waits for it: newcomers are not waited for
    missing: float  # until when it waits for members that do not offer at all
    num_present: int  # members that are there, as far as it knows


def proposal_time(seen: LeaderView, deadline: Deadline) -> float:
    """The moment from which a proposal is made; it names what is usable then."""
    first = float(seen.heard.min())
    everybody = max(float(seen.usable[seen.awaited].max(initial=0.0)), float(seen.usable.min()), seen.missing)
    enough = float(np.sort(seen.usable)[max(0, math.ceil(seen.num_present / 2) - 1) :].min(initial=math.inf))
    late = max(deadline.at(seen.opened, first) + TICK / 2, enough)
    last = max(first + deadline.ceiling + TICK / 2, float(seen.usable.min()))
    return _with_what_is_coming(seen, min(everybody, late, last))


def _with_what_is_coming(seen: LeaderView, now: float) -> float:
    """The deadline is for offers: what was offered may still come."""
    until = np.minimum(seen.usable, seen.heard + 2 * seen.allowed)
    while True:
        coming = seen.awaited & (seen.heard <= now) & (seen.usable > now) & (until > now)
        if not coming.any():
            return now
        now = float(until[coming].min())


# ---- from a proposal to everybody ----


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal: when it is made, by which peer, and which vote. Peers by their places."""

    proposed: float
    leader: int
    voters: list[int]
    held: Seconds  # when each peer has all that it names


def commit_time(ballot: Proposed, air: Air) -> float:
    """When a majority's votes are back."""
    voters = np.array(ballot.voters)
    asked = ballot.proposed + air.messages(len(voters))
    back = np.maximum(asked, ballot.held[voters]) + air.messages(len(voters))
    back[voters == ballot.leader] = max(ballot.proposed, ballot.held[ballot.leader])
    return max(float(np.sort(back)[len(voters) // 2]), float(ballot.held[ballot.leader]))


def apply_times(ballot: Proposed, air: Air, at: float, offered: Seconds, seats: int) -> Seconds:
    """When each peer goes on: with the commit, and all that it names.

    ``offered``: when it told its own offer, which it repeats until it hears of a commit.
    """
    n = len(offered)
    told = at + air.delays(n) * (1 if n <= seats else 2)
    lost = air.losses(n)
    repeats = offered + RESEND_AFTER * np.ceil(np.maximum(1.0, (at - offered) / RESEND_AFTER)) + 2 * air.delays(n)
    told[lost] = np.maximum(repeats, told)[lost]
    told[ballot.leader] = at
    return np.maximum(told, ballot.held)
