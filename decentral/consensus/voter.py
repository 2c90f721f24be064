"""The voter's part of a ballot: promise, accept durably, sign. A vote is given only with every named frame in hand."""

from __future__ import annotations

from decentral.consensus.ballot import PLANS_PER_BALLOT
from decentral.consensus.chain import check_contributors, check_known
from decentral.consensus.effects import Send, SendSlices
from decentral.consensus.round_state import RoundState
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import PeerId

LEAP = 1024  # ballots that a message may be above the promised one: a flipped bit must not use the numbers up


class Voter(RoundState):
    """Answers the leaders of ballots."""

    def _take_prepare(self, sender: PeerId, prepare: m.Prepare) -> None:
        self._check_leap(prepare.ballot)
        if self.has_left:
            self._effects.append(Send(sender, self._last_word()))  # it was lost
            return
        promised = None if self.forgetful else self.acceptor.promise(prepare.ballot)
        if promised is None or self.leader_of(prepare.ballot) != sender:
            return
        self._become(promised)
        answer = m.Promise(self.head.epoch, promised.round, prepare.ballot, promised.accepted_ballot, promised.accepted)
        self._effects.append(Send(sender, answer))

    def _take_proposal(self, sender: PeerId, proposal: m.Proposal) -> None:
        self._check_leap(proposal.ballot)
        if self.leader_of(proposal.ballot) != sender:
            raise PayloadError(f"proposal of ballot {proposal.ballot} by a peer that does not lead it; drop it")
        if not self._succeeds(proposal.record, sender):
            return
        if self.proposal is None or proposal.ballot > self.proposal[1].ballot:
            self.proposal = (sender, proposal)
        elif proposal == self.proposal[1] and self.acceptor.accepted_ballot == proposal.ballot:
            self._effects.append(Send(sender, self._vote_for(proposal)))  # our vote was lost

    def _take_plan(self, sender: PeerId, plan: m.ReducePlan) -> None:
        self._check_leap(plan.ballot)
        if plan.number // PLANS_PER_BALLOT != plan.ballot:
            raise PayloadError(f"plan {plan.number} is none of ballot {plan.ballot}; drop it")
        check_contributors(plan.contributors, self.head.members)
        check_known([owner for owner, _, _ in plan.partition], self.head.members)
        leads = self.leader_of(plan.ballot) == sender
        if leads and plan.ballot >= self.acceptor.promised and plan.number > self.planned_number:
            self.planned_number = plan.number
            self._effects.append(SendSlices(plan))

    def _check_leap(self, ballot: int) -> None:
        if ballot > self.acceptor.promised + LEAP:
            raise PayloadError(f"ballot {ballot}, far above the promised one, {self.acceptor.promised}; drop it")

    def _vote(self, now: float) -> None:
        if self.proposal is None or self.forgetful or self.has_left or self.me not in self.head.members:
            return
        sender, proposal = self.proposal
        if self.acceptor.accepted_ballot >= proposal.ballot or proposal.ballot < self.acceptor.promised:
            return
        if not self._succeeds(proposal.record, sender):  # again: the anchor may have been unknown when it came
            self.proposal = None
            return
        if not self.presence.may_drop(proposal.record) or not self._all_held(proposal.record, sender, now):
            return
        accepted = self.acceptor.accept(proposal.ballot, proposal.record)
        if accepted is None:
            return
        self._become(accepted)
        self._stall(now)
        vote = self._vote_for(proposal)
        if sender == self.me and self.leading is not None:
            self.leading.votes[self.me] = vote.signature
        else:
            self._effects.append(Send(sender, vote))

    def _vote_for(self, proposal: m.Proposal) -> m.Vote:
        record = proposal.record
        text = m.vote_text(record.run, record.epoch, record.round, proposal.ballot, record.hash)
        return m.Vote(record.epoch, record.round, proposal.ballot, record.hash, self.signer.sign(text))
