"""The voter's part of a ballot: promise, accept durably, sign. A vote is given only with every named frame in hand."""

from __future__ import annotations

from decentral.consensus.ballot import PLANS_PER_BALLOT
from decentral.consensus.chain import check_contributors, check_known
from decentral.consensus.effects import SendSlices
from decentral.consensus.farewells import farewell
from decentral.consensus.roles.retrieval import Retrieval
from decentral.consensus.round_state import RoundState
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import PeerId

LEAP = 1024  # ballots that a message may be above the promised one: a flipped bit must not use the numbers up


class Voter:
    """Answers the leaders of ballots."""

    def __init__(self, state: RoundState, retrieval: Retrieval) -> None:
        self._state, self._retrieval = state, retrieval

    def take_prepare(self, sender: PeerId, prepare: m.Prepare) -> None:
        """Promise, unless a higher ballot was promised; a peer that has left repeats its last word."""
        state = self._state
        self._check_leap(prepare.ballot)
        if state.has_left:
            state.send(sender, self.last_word())  # it was lost
            return
        promised = None if state.forgetful else state.acceptor.promise(prepare.ballot)
        if promised is None or state.leader_of(prepare.ballot) != sender:
            return
        state.become(promised)
        answer = m.Promise(
            state.head.epoch, promised.round, prepare.ballot, promised.accepted_ballot, promised.accepted
        )
        state.send(sender, answer)

    def take_proposal(self, sender: PeerId, proposal: m.Proposal) -> None:
        """Look at it from now on. Raises PayloadError when its sender does not lead its ballot or it is stale."""
        state = self._state
        self._check_leap(proposal.ballot)
        if state.leader_of(proposal.ballot) != sender:
            raise PayloadError(f"proposal of ballot {proposal.ballot} by a peer that does not lead it; drop it")
        if not state.succeeds(proposal.record, sender):
            return
        state.check_acceptable(proposal.record)
        state.check_own(proposal.record.contributors)
        if state.proposal is None or proposal.ballot > state.proposal[1].ballot:
            state.proposal = (sender, proposal)
        elif proposal == state.proposal[1] and state.acceptor.accepted_ballot == proposal.ballot:
            state.send(sender, self.vote_for(proposal))  # our vote was lost

    def take_plan(self, sender: PeerId, plan: m.ReducePlan) -> None:
        """Carry out the newest plan of the ballot's leader. Raises PayloadError for what no record may name."""
        state = self._state
        self._check_leap(plan.ballot)
        if plan.number // PLANS_PER_BALLOT != plan.ballot:
            raise PayloadError(f"plan {plan.number} is none of ballot {plan.ballot}; drop it")
        check_contributors(plan.contributors, state.head.members)
        state.check_age(plan.contributors)
        state.check_own(plan.contributors)
        check_known([owner for owner, _, _ in plan.partition], state.head.members)
        leads = state.leader_of(plan.ballot) == sender
        if leads and plan.ballot >= state.acceptor.promised and plan.number > state.planned_number:
            state.planned_number = plan.number
            state.carries_out(plan)
            state.effects.append(SendSlices(plan))

    def vote(self, now: float) -> None:
        """Accept the newest proposal and sign it, once all that it names is here."""
        state = self._state
        if state.proposal is None or not state.may_vote:
            return
        sender, proposal = state.proposal
        if state.acceptor.accepted_ballot >= proposal.ballot or proposal.ballot < state.acceptor.promised:
            return
        if not state.succeeds(proposal.record, sender):  # again: the anchor may have been unknown when it came
            state.proposal = None
            return
        if proposal.record != state.acceptor.accepted and not state.is_as_planned(proposal.record):
            return
        if sender != state.me and state.me not in state.terms.voting.voters_on(proposal.record):
            return  # a leader accepts what it proposes, whether its vote counts or not: one record per ballot
        if not state.presence.may_drop(proposal.record) or not self._retrieval.all_held(proposal.record, sender, now):
            return
        accepted = state.acceptor.accept(proposal.ballot, proposal.record)
        if accepted is None:
            return
        state.become(accepted)
        state.stall(now)
        self._tell(sender, self.vote_for(proposal))

    def _tell(self, leader: PeerId, vote: m.Vote) -> None:
        leading = self._state.leading
        if leader == self._state.me and leading is not None:
            leading.votes[leader] = vote.signature
        else:
            self._state.send(leader, vote)

    def vote_for(self, proposal: m.Proposal) -> m.Vote:
        """Our signed vote; only for what the acceptor has accepted."""
        record = proposal.record
        text = m.vote_text(record.run, record.epoch, record.round, proposal.ballot, record.hash)
        return m.Vote(record.epoch, record.round, proposal.ballot, record.hash, self._state.signer.sign(text))

    def last_word(self) -> m.Farewell:
        """How this peer voted; of rounds that its disk forgot, too, or it would deny those votes."""
        state = self._state
        kept = state.remembered if state.forgetful else None
        return farewell(kept or state.acceptor, state.signer)

    def _check_leap(self, ballot: int) -> None:
        promised = self._state.acceptor.promised
        if ballot > promised + LEAP:
            raise PayloadError(f"ballot {ballot}, far above the promised one, {promised}; drop it")
