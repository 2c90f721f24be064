"""A reduce that is carried out, once or again without those who let it down, as `record_builder` and `Reducer` do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER
from decentral.consensus.timing import SLACK
from decentral.dissemination.reduce import shares
from decentral.simulate.by_rounds.air import Air, Seconds
from decentral.simulate.by_rounds.frames import MemberLines
from decentral.simulate.cost.sizes import plan_nbytes
from decentral.wire.frames import HEADER_NBYTES

ATTEMPTS = 64  # plans of one round at most


@dataclass(frozen=True, slots=True)
class Reduced:
    """When each peer has all results, what each sent, and whose slices are in them. By places of members."""

    there: Seconds
    sent: Seconds  # bytes
    named: NDArray[np.int64]


@dataclass(slots=True)
class Reducing:
    """The plans of one round. ``patience``: s, of a leader; half of what exceeds it is an owner's for slices."""

    lines: MemberLines
    air: Air
    leader: int
    nbytes: float
    patience: float
    allowed: float

    def carried_out(self, places: NDArray[np.int64], ready: float) -> Reduced:
        """Plan after plan from ``ready`` on, with the slices of ``places`` at first."""
        sent = np.zeros(len(self.lines.up))
        for attempt in range(ATTEMPTS):
            plan = _Plan(self, places, ready)
            sent += plan.sent
            missing = self.air.losses(len(places), len(places)) & ~np.eye(len(places), dtype=np.bool_)
            owners = np.flatnonzero(missing.any(axis=0))
            unheard = self.air.losses(len(places)) & (places != self.leader)
            if len(places) > 1 and len(owners):
                owner = owners[self.air.generator.integers(len(owners))]
                ready = float(plan.heard[places[owner]]) + self.patience + self.allowed / 2
                ready += float(self.air.messages(1)[0])
                places = places[~missing[:, owner]]
            elif len(places) > 1 and unheard.any():
                ready += (self.patience + self.allowed) * 2.0 ** min(attempt, 6)
                places = places[~unheard]
            else:
                break
        return Reduced(plan.there(), sent, places)


class _Plan:
    def __init__(self, of: Reducing, places: NDArray[np.int64], ready: float) -> None:
        n, self.of = len(of.lines.up), of
        self.heard = ready + of.air.messages(n)
        self.heard[of.leader] = ready
        self.share = np.zeros(n)
        self.share[places] = shares([float(rate) for rate in of.lines.up[places]])
        self.slices = np.zeros(n)
        self.slices[places] = (1.0 - self.share[places]) * of.nbytes
        self.results = (n - 1) * self.share * of.nbytes
        parts = float((self.share > 0).sum()) * HEADER_NBYTES
        self.sent = self.slices + self.results + parts * ((self.slices > 0) + (self.share > 0) * 1.0)

    def there(self) -> Seconds:
        """When each peer has all results."""
        lines, air, n = self.of.lines, self.of.air, len(self.heard)
        count = int((self.slices > 0).sum())
        left = self.heard + self.slices / lines.rates(count - 1)
        came = float(left[self.slices > 0].max()) + air.delays(n) if count > 1 else self.heard
        summed = np.maximum(came, self.heard + (count - 1) * self.share * self.of.nbytes / lines.down)
        done = np.maximum(summed, left) + self.results / lines.rates(n - 1)
        done[self.of.leader] += self._told_again()
        last = float(done[self.share > 0].max())
        mine = (count - 1) * self.share + (1.0 - self.share)  # slices of what it owns, and results of the rest
        carried = float(self.heard.min()) + mine * self.of.nbytes / lines.down
        return np.maximum(self._fetched(last), np.maximum(last + air.delays(n), carried))

    def _told_again(self) -> float:
        """Seconds that the leader's line takes for the plan, told to all, and again while results are missing."""
        n, up = len(self.heard), float(self.of.lines.up[self.of.leader])
        plan = (n - 1) * plan_nbytes(int((self.slices > 0).sum()), int((self.share > 0).sum()))
        lasts = float((self.slices + self.results).max()) / up
        return plan * (1 + lasts // RESEND_AFTER) / up

    def _fetched(self, last: float) -> Seconds:
        """When who lacks a result of some owner has asked for it, from the proposal on, and got it."""
        lines, air, n = self.of.lines, self.of.air, len(self.heard)
        owners = np.flatnonzero(self.share)
        takes = 2.0 * self.of.nbytes / lines.up[owners]
        turn = FETCH_AFTER + SLACK * takes / 2 + self.share[owners] * self.of.nbytes / lines.up[owners]
        lost = air.losses(n, len(owners)) & (np.arange(n)[:, None] != owners[None, :])
        lost[self.of.leader] = False
        asked = last + air.delays(n, len(owners)) + turn[None, :] + air.messages(n, len(owners))
        latest: Seconds = np.where(lost, asked, 0.0).max(axis=1, initial=0.0)
        return latest
