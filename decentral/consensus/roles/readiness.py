"""Whether there is something to commit: all who are there have offered, or a quorum has and its grace is over, or the
deadline is, or members changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from decentral.consensus.round_state import RoundState
from decentral.wire.keys import PeerId


class Readiness:
    """When a leader waits no longer."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def usable(self, now: float) -> list[PeerId]:
        """The members whose offers can be committed; the deadline learns from those that are new."""
        state = self._state
        states = state.terms.states(state.head.outer_step)
        usable = state.round.usable(state.head, state.held, state.terms.named, states)
        if state.round.quorum_since is None and 0 < state.terms.enough <= len(usable):
            state.round.quorum_since = now
        for offer in state.round.newly(usable):
            if offer.steps >= state.terms.steps:
                state.deadline.observe(now - state.round.opened)
        return usable

    def has_work(self, usable: Sequence[PeerId], now: float) -> bool:
        """Whether a leader is needed."""
        state = self._state
        carried_on = state.acceptor.accepted is not None or state.leading is not None or state.acceptor.promised > 0
        return carried_on or self.frames_ready(usable, now) or self.membership_due()

    def frames_ready(self, usable: Sequence[PeerId], now: float) -> bool:
        """Whether it is worth it to commit what ``usable`` have offered, and nothing more is on its way."""
        state = self._state
        enough = len(state.head.members) >= state.terms.min_peers
        if enough and usable and self._quorum_waited(now):
            return True
        ready = enough and state.round.ready(usable, state.head, state.presence, state.deadline, now)
        here = frozenset(usable if ready else ())
        return ready and not any(self._is_coming(peer, now) for peer in state.round.offers if peer not in here)

    def _quorum_waited(self, now: float) -> bool:
        """Whether a quorum is here and had its grace: then nobody is waited for, and no frame that is on its way."""
        since = self._state.round.quorum_since
        return since is not None and now >= since + self._state.terms.grace

    def _is_coming(self, peer: PeerId, now: float) -> bool:
        """Whether a frame that was offered may still come: the deadline is for offers, their bytes take their time.

        So long that it may be asked for when it does not come by itself. And not every time: who offers and does not
        send would hold up every round.
        """
        state = self._state
        waited_for = state.presence.present(peer) and peer not in state.head.newcomers
        waited_for = waited_for and state.unsent.is_waited_for(peer, state.head.round + 1)
        fits = waited_for and state.round.offers[peer].base == state.head.anchor
        return fits and now < state.round.offered_at[peer] + 2 * state.allowed((peer,))

    def membership_due(self) -> bool:
        """Between rounds the membership may change by itself; with offers under way it rides along."""
        state = self._state
        waiting = not state.round.offers or len(state.head.members) < state.terms.min_peers
        return waiting and state.next_members() != state.head.members
