"""Which peers come, leave and are behind: what they say of themselves, and what commits tell of them."""

from __future__ import annotations

from decentral.consensus.effects import CatchUpWith
from decentral.consensus.round_state import FETCH_AFTER, RoundState
from decentral.consensus.voting import dropped_by
from decentral.wire.keys import PeerId
from decentral.wire.messages import MAX_PEERS, Behind, Commit, Farewell, JoinRequest


class Attendance:
    """Keeps the book of which peers are here and how far each has come."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def take_join(self, sender: PeerId, request: JoinRequest, now: float) -> None:
        """A newcomer asks to be let in, or a member says that it stays, and where it stands."""
        state = self._state
        state.is_back(sender)
        if sender not in state.head.members:
            state.joiners.pop(sender, None)
            state.joiners[sender] = request
            if len(state.joiners) > MAX_PEERS:  # who is there asks again
                del state.joiners[next(iter(state.joiners))]
        elif request.round < state.head.round and not self.crossed(request.round + 1, now):
            self.help_laggard(sender, request.round)

    def take_farewell(self, sender: PeerId, farewell: Farewell) -> None:
        """A member leaves. Raises PayloadError when its vote is not signed by it, or is for what nobody may accept."""
        state = self._state
        if farewell.round > state.head.round + 1:  # it knows a commit that this peer missed, and counts until then
            state.early.keep(sender, farewell, state.head.members)
            state.effects.append(CatchUpWith(sender))
            return
        if sender in state.head.members:
            if farewell.accepted is not None:
                state.check_acceptable(farewell.accepted)
            state.farewells.take(sender, farewell)
        state.presence.leaving.add(sender)
        state.joiners.pop(sender, None)
        if state.leading is not None:
            state.leading.parted.add(sender)

    def take_behind(self, sender: PeerId, message: Behind) -> None:
        """A member says how far it is, and that we are not."""
        state = self._state
        if sender in state.head.members:
            state.stands_at[sender] = message.round
        if message.round > state.head.round:
            state.effects.append(CatchUpWith(sender))

    def help_laggard(self, peer: PeerId, stands_at: int) -> None:
        """Send the commit that ``peer`` missed, or tell it how far the chain is."""
        state = self._state
        commit = state.recent.get(stands_at + 1)
        alone = commit is not None and stands_at + 1 == state.head.round
        state.send(peer, commit if commit is not None and alone else Behind(state.head.round))

    def crossed(self, round_: int, now: float) -> bool:
        """Whether a message about ``round_`` was on its way when that round's commit was: its sender gets it anyway.

        A leader would send half of all peers the commit twice, for the votes that a majority did not need, and a late
        offer or a request to join would bring its sender the commit from every member: N times 190 N bytes.
        """
        return round_ == self._state.head.round and now - self._state.round.opened < FETCH_AFTER

    def note(self, commit: Commit) -> None:
        """What a commit that is decided tells of who is here."""
        state, record = self._state, commit.record
        self._note_who_never_sent(record.round)
        self._note_who_is_back(commit)
        self._note_shrink(commit)
        state.presence.leaving &= set(record.next_members)
        state.farewells.keep(record.next_members)
        for peer in record.next_members:
            state.joiners.pop(peer, None)

    def _note_who_never_sent(self, round_: int) -> None:
        state = self._state
        for peer, offer in state.round.offers.items():
            if offer.frame not in state.held:
                state.unsent.passed_over(peer, round_)

    def _note_who_is_back(self, commit: Commit) -> None:
        """A peer that voted in a round after its farewell came back meanwhile, though nothing it sent came here.

        One that was told so by a commit alone counted the old farewell as a promise, was all that was left, and forked.
        """
        for peer, _ in commit.certificate.votes:
            if self._state.farewells.since(peer) < commit.record.round:
                self._state.is_back(peer)

    def _note_shrink(self, commit: Commit) -> None:
        """Remember whom a record gives up although no majority is left: they may live on, and fork the chain."""
        state, record = self._state, commit.record
        silent = dropped_by(record) - state.presence.leaving
        shrinks = state.terms.voting.drops_majority(record)
        state.given_up = (state.given_up | (silent if shrinks else set())) - set(record.next_members)
