"""Offers: this peer's own, told to whoever may lead and repeated to whoever does, and those of the others.

In a small swarm everybody may lead. In a large one the committee does, which tells its own offers to all: whoever has
the first of them knows that it must hurry, and how long others take.
"""

from __future__ import annotations

from decentral.consensus.roles.succession import Succession
from decentral.consensus.round_state import RESEND_AFTER, RoundState
from decentral.errors import PayloadError
from decentral.wire.keys import PeerId
from decentral.wire.messages import Offer


class Offers:
    """Offers what this peer made, and books what is offered."""

    def __init__(self, state: RoundState, succession: Succession) -> None:
        self._state, self._succession = state, succession
        self._told_at = 0.0  # when our offer was last sent

    def offer(self, offer: Offer, now: float) -> bool:
        """Tell those who need it; False when the offer is for another round than the one in progress.

        Raises PayloadError for one that the others would refuse.
        """
        state = self._state
        if (offer.epoch, offer.round) != (state.head.epoch, state.head.round + 1):
            return False
        self.take_offer(state.me, offer, now)
        self._told_at = now
        state.tell(state.offerers, offer)
        return True

    def take_offer(self, sender: PeerId, offer: Offer, now: float) -> None:
        """Book one. Raises PayloadError when it cannot be meant for this round."""
        state = self._state
        if offer.fragment != state.head.fragment(state.terms.num_fragments):
            raise PayloadError(f"offer for fragment {offer.fragment} in round {offer.round}: not its turn; drop it")
        if offer.nbytes > state.terms.largest:
            raise PayloadError(f"offer of {offer.nbytes} bytes, {state.terms.largest} are possible here; drop it")
        state.check_age((offer,))
        if state.farewells.since(sender) < offer.round:  # one of the same round may be older than the farewell
            state.is_back(sender)  # to drop it would find no votes
        new = state.round.add(sender, offer, now)
        if new and offer.based == state.head.outer_step and sender not in state.head.newcomers:
            state.paces.observe(sender, offer.steps, state.round.opened, now)

    def repeat(self, now: float) -> None:
        """Our offer or its answer may have been lost: tell whoever leads now."""
        state = self._state
        offer = state.round.offers.get(state.me)
        if offer is None or now - self._told_at < RESEND_AFTER:
            return
        self._told_at = now
        ballot = self._succession.ballot_in_charge(now)
        leader = None if ballot is None else state.leader_of(ballot)
        if leader is not None and leader != state.me:
            state.send(leader, offer)

    def time_left(self, now: float) -> float | None:
        """Seconds in which this peer should offer what it has rather than come late; None while nothing presses.

        Only a full contribution presses: else everybody could hurry everybody, and nobody make all inner steps.
        """
        state, seen = self._state, self._state.round
        waits = state.head.anchor is not None and not state.head.final and state.me in state.head.members
        full = any(offer.steps >= state.terms.steps for offer in seen.offers.values())
        if not waits or seen.first_offer is None or state.me in seen.offers or not full:
            return None
        return state.deadline.early_at(seen.opened, seen.first_offer) - now

    def full_times(self) -> tuple[float, ...]:
        """Seconds that other members take for a full contribution, of those who are there and known."""
        state = self._state
        others = (peer for peer in state.head.members if peer != state.me and state.presence.present(peer))
        return state.paces.full_times(others)
