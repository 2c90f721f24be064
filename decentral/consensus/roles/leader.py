"""The leader's part: find out what an earlier quorum may have chosen, propose it or a new record, count votes."""

from __future__ import annotations

from collections.abc import Iterable

from decentral.consensus.ballot import Ballot
from decentral.consensus.roles.herald import Herald
from decentral.consensus.roles.readiness import Readiness
from decentral.consensus.roles.record_builder import RecordBuilder
from decentral.consensus.roles.retrieval import Retrieval
from decentral.consensus.roles.succession import Succession
from decentral.consensus.roles.voter import Voter
from decentral.consensus.round_state import RESEND_AFTER, RoundState
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import PeerId, verify


class Leader:
    """Leads the ballots that fall to this peer."""

    def __init__(self, state: RoundState, voter: Voter, retrieval: Retrieval, succession: Succession) -> None:
        self._state, self._voter = state, voter
        self._retrieval, self._succession = retrieval, succession
        self._readiness = Readiness(state)
        self._builder = RecordBuilder(state, self._readiness)
        self._herald = Herald(state)

    def lead(self, now: float) -> None:
        """Lead the ballot in charge if it is ours and there is something to commit."""
        state = self._state
        if not state.may_vote:
            return
        usable = self._readiness.usable(now)
        self._retrieval.ask_for_offered(now)
        if not self._readiness.has_work(usable, now):
            return
        state.stall(now)
        leading = self._ballot_of_ours(now)
        if leading is None:
            return
        if leading.prepared(state.voters):
            if leading.proposal is None:
                self._propose_something(leading, usable, now)
            self._resend(leading, now)
            self._elect(leading)
        else:
            self._resend(leading, now)

    def _ballot_of_ours(self, now: float) -> Ballot | None:
        """The ballot in charge, opened if it was not; None when another peer leads it."""
        state, ballot = self._state, self._succession.ballot_in_charge(now)
        if ballot is None or state.leader_of(ballot) != state.me:
            return None
        if state.leading is None or state.leading.ballot < ballot:
            state.leading = self._opened(ballot, now)
        return state.leading

    def _opened(self, ballot: int, now: float) -> Ballot:
        state, leading = self._state, Ballot(ballot, self._state.terms.voting, sent_at=now)
        if ballot == 0:
            return leading
        promised = state.acceptor.promise(ballot)
        assert promised is not None, "the ballot in charge is never below the promised one"
        state.become(promised)
        own = m.Promise(state.head.epoch, promised.round, ballot, promised.accepted_ballot, promised.accepted)
        leading.promises[state.me] = own
        state.broadcast(m.Prepare(state.head.epoch, promised.round, ballot))
        return leading

    def _propose_something(self, leading: Ballot, usable: list[PeerId], now: float) -> None:
        """What may have been chosen, or a record of our own."""
        record = self._already_proposed(leading) or self._bound_or_new(leading, usable, now)
        if record is not None:
            self._propose(leading, record, now)

    def _already_proposed(self, leading: Ballot) -> m.Record | None:
        """What this ballot proposed before its leader restarted: it is that or nothing, or two records had one ballot,
        and their plans one number, so that voters of the first took it for what had not been planned (seed 3159).
        """
        own = self._state.acceptor
        return own.accepted if own.accepted_ballot == leading.ballot else None

    def _bound_or_new(self, leading: Ballot, usable: list[PeerId], now: float) -> m.Record | None:
        state = self._state
        leading.farewells = state.farewells.votes(state.acceptor.round, but=state.presence.gone)
        bound = leading.bound_value(state.acceptor)
        return self._builder.new_record(leading, usable, now) if bound is None else self._builder.carried_on(bound)

    def _propose(self, leading: Ballot, record: m.Record, now: float) -> None:
        """Accept our own proposal durably first: a leader that restarts proposes the same or nothing."""
        state = self._state
        leading.proposal = m.Proposal(leading.ballot, record)
        leading.sent_at = now
        state.proposal = (state.me, leading.proposal)
        if state.acceptor.accepted_ballot == leading.ballot:  # restarted after voting: same record, same signature
            leading.votes[state.me] = self._voter.vote_for(leading.proposal).signature
        self._voter.vote(now)
        self._ask_for_votes(leading.proposal)

    def _ask_for_votes(self, proposal: m.Proposal, but: Iterable[PeerId] = ()) -> None:
        """Those of the committee, too, who are given up: one that is back says so by its answer."""
        state = self._state
        state.tell((*state.committee, *state.terms.voting.voters_on(proposal.record)), proposal, but)

    def _elect(self, leading: Ballot) -> None:
        state, commit = self._state, leading.elected()
        if commit is not None:
            self._herald.announce(commit)
            state.decided = (state.me, commit)

    def _resend(self, leading: Ballot, now: float) -> None:
        state = self._state
        if now - leading.sent_at < RESEND_AFTER:
            return
        leading.sent_at = now
        if leading.proposal is not None:
            self._ask_for_votes(leading.proposal, but=leading.votes)
        elif leading.planned is not None:
            state.broadcast(leading.planned.plan)
        elif leading.ballot > 0:
            prepare = m.Prepare(state.head.epoch, state.head.round + 1, leading.ballot)
            state.broadcast(prepare, but=leading.promises)

    def take_promise(self, sender: PeerId, promise: m.Promise) -> None:
        """Count it if it answers the ballot that we lead. Raises PayloadError when it accepted what nobody may."""
        state, leading = self._state, self._state.leading
        if leading is None or promise.ballot != leading.ballot:
            return
        if promise.accepted is not None:
            if not state.succeeds(promise.accepted, sender):
                return
            state.check_acceptable(promise.accepted)
        self._answered(leading, sender)
        leading.promises[sender] = promise

    def take_vote(self, sender: PeerId, vote: m.Vote) -> None:
        """Count it. Raises PayloadError when it is for another record or not signed by its sender."""
        leading = self._state.leading
        if leading is None or leading.proposal is None or vote.ballot != leading.ballot:
            return
        record = leading.proposal.record
        text = m.vote_text(record.run, record.epoch, record.round, vote.ballot, record.hash)
        if vote.record != record.hash or not verify(sender, vote.signature, text):
            raise PayloadError(f"vote in round {vote.round} is for another record or not signed by its sender; drop it")
        self._answered(leading, sender)
        leading.votes[sender] = vote.signature

    def take_missing(self, missing: m.Missing) -> None:
        """An owner's complaint about the plan that is being carried out."""
        leading = self._state.leading
        if leading is not None and leading.planned is not None:
            leading.planned.blame(missing.plan, missing.peers)

    def _answered(self, leading: Ballot, peer: PeerId) -> None:
        """A peer that answers a ballot opened after its farewell is back: it said that it would vote no more.

        Else nothing tells in the same round, as its messages may come in any order; and the frames of a record that
        only it holds would be asked of nobody.
        """
        if peer not in leading.parted:
            self._state.is_back(peer)
