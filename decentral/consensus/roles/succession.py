"""Which ballot is in charge: the lowest one that had not its time yet and whose leader is there."""

from __future__ import annotations

import math

from decentral.consensus.round_state import RoundState


class Succession:
    """Which peer leads now, as every peer reckons it by itself."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def ballot_in_charge(self, now: float) -> int | None:
        """The lowest ballot not yet given up whose leader is there."""
        state = self._state
        first = state.acceptor.promised + self._num_given_up(now)
        ballots = range(first, first + len(state.head.members))
        return next((ballot for ballot in ballots if state.presence.present(state.leader_of(ballot))), None)

    def _num_given_up(self, now: float) -> int:
        """Ballots from the promised one on that had their time: as long as the round had stalled before, and patience.

        So each gets twice the time of the last. Counted from when it was promised: all who did agree within a message's
        time on who leads, whatever number it has, and whoever has restarted since.
        """
        state = self._state
        if state.stalled_since is None:
            return 0
        promised, since = state.promised_since or (state.acceptor.promised, state.stalled_since)
        if promised != state.acceptor.promised:
            promised, since = state.acceptor.promised, now
        state.promised_since = promised, since
        if now - since < state.terms.patience:  # as most often: no need to look at everybody's uplink
            return 0
        length = state.patience(plans=2) + since - state.stalled_since  # one that fails, one without who failed it
        return int(math.log2((now - since) / length + 1.0))
