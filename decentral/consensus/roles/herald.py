"""How a commit reaches everybody: from its leader in a small swarm, by way of those who voted for it in a large one.

A commit names a frame of every member, so one peer that sent it to all would send the square of their number, and all
would wait for its uplink. Beyond a committee's size the leader tells the voters whose votes the commit carries, and
each of those tells its share of the others. Which is whose share everybody reads in the commit. A share whose voter has
died meanwhile asks, as whoever missed a commit does: it repeats its offer after three seconds.
"""

from __future__ import annotations

from decentral.consensus.round_state import RoundState
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit


class Herald:
    """Tells of commits."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def announce(self, commit: Commit) -> None:
        """Tell all of what was decided here."""
        state, relays = self._state, self._relays(commit)
        if not relays:
            state.tell((*state.head.members, *state.joiners), commit)
            return
        silent = [peer for peer in relays if peer == state.me or not state.presence.present(peer)]
        instead = [peer for relay in silent for peer in shares(commit, relays)[relay]]
        state.tell((*relays, *instead, *state.joiners), commit)

    def announce_found(self, commit: Commit) -> None:
        """Tell all of what farewells have shown, as everybody finds by itself: of a large swarm only the committee."""
        committee = self._state.committee
        if self._state.me in committee or len(committee) == len(self._state.head.members):
            self.announce(commit)

    def pass_on(self, sender: PeerId, commit: Commit) -> None:
        """Tell this peer's share of what the leader has told it."""
        state, relays = self._state, self._relays(commit)
        if state.me in relays and sender == state.leader_of(commit.certificate.ballot):
            state.tell(shares(commit, relays)[state.me], commit)

    def _relays(self, commit: Commit) -> tuple[PeerId, ...]:
        """Those who voted; nobody where the leader tells everybody."""
        few = len(commit.record.members) <= self._state.terms.voting.seats
        return () if few else tuple(peer for peer, _ in commit.certificate.votes)


def shares(commit: Commit, relays: tuple[PeerId, ...]) -> dict[PeerId, tuple[PeerId, ...]]:
    """The members that each of ``relays`` passes a commit on to: all others, each once."""
    others = tuple(peer for peer in commit.record.members if peer not in relays)
    return {relay: others[number :: len(relays)] for number, relay in enumerate(relays)}
