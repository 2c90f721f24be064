"""The learner's part of a round: which record was chosen, which peers are here, what they offer."""

from __future__ import annotations

from dataclasses import replace

from decentral.consensus.chain import check_turn, contributions, dropped_by
from decentral.consensus.paxos import check_farewell
from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER, CatchUpWith, Decide, RoundState
from decentral.consensus.voter import Herald, Retrieval, Succession
from decentral.errors import PayloadError
from decentral.wire.keys import PeerId, peer_name, verify
from decentral.wire.messages import MAX_PEERS, Behind, Commit, Farewell, JoinRequest, Offer, join_text

# ---- peers that come, leave and are behind ----
#
# They say so themselves, and commits tell of them.


class Attendance:
    """Keeps the book of which peers are here and how far each has come."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def take_join(self, sender: PeerId, request: JoinRequest, now: float) -> None:
        """A newcomer asks to be let in, or a member says that it stays, and where it stands."""
        state = self._state
        state.is_back(sender)
        if sender not in state.head.members:
            if not verify(sender, request.signature, join_text(state.head.run, request.round, request.digest)):
                raise PayloadError(f"request to join by {peer_name(sender)} that it did not sign; drop it")
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
        current = farewell.round == state.head.round + 1
        check_farewell(sender, farewell, state.head.run, state.leader_of if current else None)
        if farewell.round < state.last_active.get(sender, 0):
            return  # it is older than what its sender has offered or voted for since
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
        self.note_who_was_active(commit)
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

    def note_who_was_active(self, commit: Commit) -> None:
        """Its contributors and voters had not left when it was decided."""
        state, record = self._state, commit.record
        for peer in (*(ref.peer for ref in contributions(record)), *(peer for peer, _ in commit.certificate.votes)):
            state.active(peer, record.round)
        state.last_active = {peer: round_ for peer, round_ in state.last_active.items() if peer in record.next_members}
        state.came_back_in = {p: round_ for p, round_ in state.came_back_in.items() if p in record.next_members}

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


# ---- what was chosen ----
#
# A record that a majority voted for is decided, once every frame that it names is here.

PUT_BACK_AFTER = 12.0  # s, beside what its frames need: four requests to all who may have them
MOST_PUT_BACK = 16  # of one round: more than one that a majority signed is somebody's invention
RECENT = 256  # commits kept for peers that missed them or compare branches: 0.9 MB with 16 members


class Learner:
    """Finds out what was chosen, and moves on to the next round."""

    def __init__(self, state: RoundState, retrieval: Retrieval, attendance: Attendance) -> None:
        self._state, self._retrieval, self._attendance = state, retrieval, attendance
        self._herald = Herald(state)

    def take_commit(self, sender: PeerId, commit: Commit, now: float) -> None:
        """What somebody else says is decided. Raises PayloadError unless a majority signed it."""
        state, record = self._state, commit.record
        if record.round <= state.head.round or state.decided is not None:
            return
        if record.round > state.head.round + 1:
            state.effects.append(CatchUpWith(sender))
            return
        if record.hash in state.put_back or not state.succeeds(record, sender):
            return
        check_turn(record, state.terms.num_fragments)
        state.terms.voting.check_certified(commit)
        if state.takes(commit):
            self._decided(sender, commit, now)
            self._herald.pass_on(sender, commit)

    def _decided(self, told_by: PeerId, commit: Commit, now: float) -> None:
        self._state.decided, self._state.decided_since = (told_by, commit), now

    def count_farewells(self, now: float) -> None:
        """Those who left may have chosen a record before; it is decided once every named frame is here."""
        state = self._state
        commit = state.farewells.elected(state.acceptor, state.signer)
        if commit is None:
            return
        told = commit.certificate.votes[0][0]
        if state.succeeds(commit.record, told) and self._retrieval.all_held(commit.record, told, now):
            self._herald.announce_found(commit)
            self._decided(told, commit, now)

    def finish(self, now: float) -> bool:
        """Decide once every named frame is here: a commit is never applied by half. Whether it was done."""
        state = self._state
        self._take_up_again()
        if state.decided is None or state.head.anchor is None:
            return False
        sender, commit = state.decided
        if not state.succeeds(commit.record, sender):
            state.decided = None
            return False
        if not self._retrieval.all_held(commit.record, sender, now):
            self._put_back(now)
            return False
        state.effects.append(Decide(commit))
        self._keep(commit)
        self._attendance.note(commit)
        # Nothing more is decided before this is applied, whether it moves the anchor or not: two Decide in one list of
        # effects were carried out in the wrong order when the first one's ``applied`` led to a third.
        state.restart(replace(state.head.extended(commit.record), anchor=None), now)
        state.history.add(state.head)
        return True

    def _put_back(self, now: float) -> None:
        """A commit whose frames nobody gives blocks nothing: a record that named one which is nowhere stalled a run for
        ever, without a word. It is taken up again when they are here.
        """
        state = self._state
        assert state.decided is not None
        if now - state.decided_since > PUT_BACK_AFTER + 2 * state.allowed():
            told_by, commit = state.decided
            state.decided = None
            if len(state.put_back) < MOST_PUT_BACK:
                state.put_back[commit.record.hash] = told_by, commit

    def _take_up_again(self) -> None:
        state = self._state
        if state.decided is not None:
            return
        for told_by, commit in state.put_back.values():
            if all(ref.frame in state.held for ref in commit.record.frames):
                state.decided = told_by, commit
                return

    def _keep(self, commit: Commit) -> None:
        recent = self._state.recent
        recent[commit.record.round] = commit
        while len(recent) > RECENT:
            recent.popitem(last=False)


# ---- offers, our own and those of the others ----
#
# Our own is told to whoever may lead, and repeated to whoever does.
#
# In a small swarm everybody may lead. In a large one the committee does, which tells its own offers to all: whoever
# has the first of them knows that it must hurry, and how long others take.


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
        state.active(sender, offer.round)
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
