"""Which frames are here, and of whom the missing ones are asked, and when: most come by themselves."""

from __future__ import annotations

from decentral.consensus.allowance import SLACK
from decentral.consensus.chain import Digest
from decentral.consensus.collection import fits
from decentral.consensus.effects import Fetch
from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER, RoundState
from decentral.flow.send_queue import shifted
from decentral.wire.keys import PeerId
from decentral.wire.messages import Record


class Retrieval:
    """Asks for what is offered or named and does not come."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def all_held(self, record: Record, likely: PeerId, now: float) -> bool:
        """Whether every frame that ``record`` names is here and is what it says; a missing one is asked for.

        ``likely``: the peer that told of the record, and hence has them.
        """
        held = self._state.held
        missing = [ref for ref in record.frames if ref.frame not in held]
        for ref in missing:
            self._ask(ref.frame, ref.peer, likely, now, record)
        kind, states = self._state.terms.named, self._state.terms.states(record.outer_step)
        return not missing and all(fits(held[ref.frame], ref, record, kind, states) for ref in record.frames)

    def ask_for_offered(self, now: float) -> None:
        """A leader cannot propose what it does not hold: ask for frames whose push never came."""
        if self._state.reduces:
            return
        for peer, offer in self._state.round.offers.items():
            if offer.frame not in self._state.held:
                self._ask(offer.frame, peer, peer, now)

    def _ask(self, frame: Digest, owner: PeerId, likely: PeerId, now: float, record: Record | None = None) -> None:
        state = self._state
        ask_at = state.round.ask_at
        if frame not in ask_at:
            ask_at[frame] = now + self._turn_of(owner)
        if now < ask_at[frame] and state.presence.present(owner):
            return
        ask_at[frame] = now + RESEND_AFTER
        holders = self._holders(owner, likely)
        if holders:
            state.effects.append(Fetch(frame, owner, holders, record))

    def _holders(self, owner: PeerId, likely: PeerId) -> tuple[PeerId, ...]:
        """Peers that are there and may have it, likeliest first; the rest begins elsewhere for each that asks."""
        state = self._state
        others = [peer for peer in shifted(state.head.members, state.me) if peer not in (state.me, owner, likely)]
        first = dict.fromkeys((likely, owner, *others))
        return tuple(peer for peer in first if peer != state.me and state.presence.present(peer))

    def _turn_of(self, owner: PeerId) -> float:
        """Seconds in which a frame comes by itself, or begins to. Results of a reduce leave one after another.

        With slack: asked for by all when it is a little late, everything is sent twice, and what was late gets later.
        """
        state = self._state
        offer = state.round.offers.get(owner)
        if offer is None and owner not in state.offerers:  # it is about as long as others are
            offer = next(iter(state.round.offers.values()), None)
        if offer is None or not state.reduces:
            return FETCH_AFTER
        return FETCH_AFTER + SLACK * (state.terms.takes(offer.nbytes, owner, state.head.members) or 0.0) / 2
