"""The leader's part: find out what an earlier quorum may have chosen, propose it or a new record, count votes.

A leader drafts a record when all who are there have offered or the deadline is over, and plans a reduce before it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from decentral.consensus.ballot import Ballot, Partition, Planned, results_of
from decentral.consensus.chain import voters_on
from decentral.consensus.collection import references
from decentral.consensus.effects import Send, SendSlices
from decentral.consensus.round_state import RESEND_AFTER
from decentral.consensus.voter import Voter
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import PeerId, verify


class Leader(Voter):
    """Leads the ballots that fall to this peer."""

    def _lead(self, now: float) -> None:
        """Lead the ballot in charge if it is ours and there is something to commit."""
        if self.forgetful or self.has_left or self.me not in self.head.members:
            return
        usable = self.round.usable(self.head, self.held, self.terms.partition is not None)
        for offer in self.round.newly(usable):
            if offer.steps >= self.terms.steps:
                self.deadline.observe(now - self.round.opened)
        self._ask_for_offered_frames(now)
        if not self._has_work(usable, now):
            return
        self._stall(now)
        ballot = self._ballot_in_charge(now)
        if ballot is None or self.leader_of(ballot) != self.me:
            return
        if self.leading is None or self.leading.ballot < ballot:
            self._open_ballot(ballot, now)
        leading = self.leading
        if leading is None or not leading.prepared(self.head.members, self.presence.given_up()):
            self._resend(now)
            return
        if leading.proposal is None:
            leading.farewells = self.farewells.votes(self.acceptor.round, but=self.presence.gone)
            bound = leading.bound_value(self.acceptor)
            record = self._new_record(leading, usable, now) if bound is None else self._carried_on(bound)
            if record is not None:
                self._propose(leading, record, now)
        self._resend(now)
        self._elect(leading)

    def _has_work(self, usable: list[PeerId], now: float) -> bool:
        carried_on = self.acceptor.accepted is not None or self.leading is not None or self.acceptor.promised > 0
        return carried_on or self._frames_ready(usable, now) or self._membership_due()

    def _frames_ready(self, usable: list[PeerId], now: float) -> bool:
        enough = len(self.head.members) >= self.terms.min_peers
        ready = enough and self.round.ready(usable, self.head, self.presence, self.deadline, now)
        return ready and not any(self._is_coming(peer, now) for peer in self.round.offers if peer not in usable)

    def _is_coming(self, peer: PeerId, now: float) -> bool:
        """Whether a frame that was offered may still come: the deadline is for offers, their bytes take their time.

        So long that it may be asked for when it does not come by itself. And not every time: who offers and does not
        send would hold up every round.
        """
        waited_for = self.presence.present(peer) and peer not in self.head.newcomers
        waited_for = waited_for and self.unsent.is_waited_for(peer, self.head.round + 1)
        fits = waited_for and self.round.offers[peer].base == self.head.anchor
        return fits and now < self.round.offered_at[peer] + 2 * self._allowed((peer,))

    def _membership_due(self) -> bool:
        """Between rounds the membership may change by itself; with offers under way it rides along."""
        waiting = not self.round.offers or len(self.head.members) < self.terms.min_peers
        return waiting and self._next_members() != self.head.members

    def _new_record(self, leading: Ballot, usable: list[PeerId], now: float) -> m.Record | None:
        if not self._frames_ready(usable, now):
            return self._record() if self._membership_due() else None
        if self.terms.partition is None:
            return self._record(frames=references(usable, self.round.offers))
        return self._reduced_record(leading, usable, now)

    def _reduced_record(self, leading: Ballot, usable: list[PeerId], now: float) -> m.Record | None:
        """Plan the reduce, wait for every owner's result, re-plan without those who let it down."""
        absent = [peer for peer in self.head.members if not self.presence.present(peer)]
        planned = leading.planned
        if planned is not None:
            frames = results_of(planned.plan, self.results)
            if frames is not None:
                plan = planned.plan
                return self._record(frames, plan.contributors, plan.partition, plan.number)
            if not planned.failed(absent, self.patience(), now):
                return None
        plan = self._plan(leading, usable, absent)
        if planned is not None and planned.asks_the_same(plan) and not planned.late(self.patience(), now):
            return None  # nobody else is there: told again at once, it would fail again at once, and so on
        leading.planned = Planned(plan, now)
        self.planned_number = leading.planned.plan.number
        self._broadcast(leading.planned.plan)
        self._effects.append(SendSlices(leading.planned.plan))
        return None

    def _plan(self, leading: Ballot, usable: list[PeerId], absent: list[PeerId]) -> m.ReducePlan:
        dropped = set(absent)
        if leading.planned is not None:
            dropped |= leading.planned.blamed or leading.planned.silent_owners(self.results, self.me)
        peers = [peer for peer in usable if peer not in dropped] or usable[:1]
        assert self.terms.partition is not None
        fragment = self.head.fragment(self.terms.num_fragments)
        return m.ReducePlan(
            self.head.epoch,
            self.head.round + 1,
            leading.ballot,
            leading.next_plan_number(),
            references(peers, self.round.offers),
            self.terms.partition(fragment, tuple(sorted(peers))),
        )

    def _record(
        self,
        frames: tuple[m.FrameRef, ...] = (),
        contributors: tuple[m.FrameRef, ...] = (),
        partition: Partition = (),
        plan: int = 0,
    ) -> m.Record:
        head = self.head
        assert head.anchor is not None
        last = bool(frames) and (head.outer_step + 1 >= self.terms.rounds or self.time_is_up)
        return m.Record(
            run=head.run,
            epoch=head.epoch,
            round=head.round + 1,
            outer_step=head.outer_step,
            fragment=head.fragment(self.terms.num_fragments),
            plan=plan,
            previous=head.hash,
            base=head.anchor,
            members=head.members,
            frames=frames,
            contributors=contributors,
            partition=partition,
            next_members=self._next_members(),
            final=last,
        )

    def _carried_on(self, bound: m.Record) -> m.Record:
        """A value that may be chosen. By the few who are left it must also say who was given up: were it chosen before,
        one of those would have voted for it; that peer re-syncs if it returns. So it is when those who were to vote on
        it were few, and are gone, while others are back whom it drops: nobody could vote for it as it is.
        """
        if self.presence.is_majority_here(voters_on(bound)):
            return bound
        return replace(bound, next_members=self._next_members())

    def _ballot_in_charge(self, now: float) -> int | None:
        """The lowest ballot not yet given up whose leader is there."""
        first = self.acceptor.promised + self._num_given_up(now)
        ballots = range(first, first + len(self.head.members))
        return next((ballot for ballot in ballots if self.presence.present(self.leader_of(ballot))), None)

    def _num_given_up(self, now: float) -> int:
        """Ballots from the promised one on that had their time: as long as the round had stalled before, and patience.

        So each gets twice the time of the last. Counted from when it was promised: all who did agree within a message's
        time on who leads, whatever number it has, and whoever has restarted since.
        """
        if self.stalled_since is None:
            return 0
        promised, since = self.promised_since or (self.acceptor.promised, self.stalled_since)
        if promised != self.acceptor.promised:
            promised, since = self.acceptor.promised, now
        self.promised_since = promised, since
        if now - since < self.terms.patience:  # as most often: no need to look at everybody's uplink
            return 0
        length = self.patience(plans=2) + since - self.stalled_since  # one that fails, one without who failed it
        return int(math.log2((now - since) / length + 1.0))

    def _open_ballot(self, ballot: int, now: float) -> None:
        self.leading = Ballot(ballot, sent_at=now)
        if ballot == 0:
            return
        promised = self.acceptor.promise(ballot)
        assert promised is not None, "the ballot in charge is never below the promised one"
        self._become(promised)
        own = m.Promise(self.head.epoch, promised.round, ballot, promised.accepted_ballot, promised.accepted)
        self.leading.promises[self.me] = own
        self._broadcast(m.Prepare(self.head.epoch, promised.round, ballot))

    def _propose(self, leading: Ballot, record: m.Record, now: float) -> None:
        """Accept our own proposal durably first: a leader that restarts proposes the same or nothing."""
        leading.proposal = m.Proposal(leading.ballot, record)
        leading.sent_at = now
        self.proposal = (self.me, leading.proposal)
        if self.acceptor.accepted_ballot == leading.ballot:  # restarted after voting: same record, same signature
            leading.votes[self.me] = self._vote_for(leading.proposal).signature
        self._vote(now)
        self._broadcast(leading.proposal)

    def _elect(self, leading: Ballot) -> None:
        commit = leading.elected()
        if commit is None:
            return
        self._broadcast(commit, also=self.joiners)
        self.decided = (self.me, commit)

    def _count_farewells(self, now: float) -> None:
        """Those who left may have chosen a record before; it is decided once every named frame is here."""
        commit = self.farewells.elected(self.acceptor, self.signer)
        if commit is None:
            return
        told = commit.certificate.votes[0][0]
        if self._succeeds(commit.record, told) and self._all_held(commit.record, told, now):
            self._broadcast(commit, also=self.joiners)
            self.decided = (told, commit)

    def _resend(self, now: float) -> None:
        leading = self.leading
        if leading is None or now - leading.sent_at < RESEND_AFTER:
            return
        leading.sent_at = now
        if leading.proposal is not None:
            self._broadcast(leading.proposal, but=leading.votes)
        elif leading.planned is not None:
            self._broadcast(leading.planned.plan)
        elif leading.ballot > 0:
            prepare = m.Prepare(self.head.epoch, self.head.round + 1, leading.ballot)
            self._broadcast(prepare, but=leading.promises)

    def _repeat_offer(self, now: float) -> None:
        """An offer or its answer may have been lost: tell whoever leads now."""
        offer = self.round.offers.get(self.me)
        if offer is None or now - self._offered_at < RESEND_AFTER:
            return
        self._offered_at = now
        ballot = self._ballot_in_charge(now)
        leader = None if ballot is None else self.leader_of(ballot)
        if leader is not None and leader != self.me:
            self._effects.append(Send(leader, offer))

    def _ask_for_offered_frames(self, now: float) -> None:
        """A leader cannot propose what it does not hold: ask for frames whose push never came."""
        if self.terms.partition is not None:
            return
        for peer, offer in self.round.offers.items():
            if offer.frame not in self.held:
                self._ask(offer.frame, peer, peer, now)

    def _take_vote(self, sender: PeerId, vote: m.Vote) -> None:
        leading = self.leading
        if leading is None or leading.proposal is None or vote.ballot != leading.ballot:
            return
        record = leading.proposal.record
        text = m.vote_text(record.run, record.epoch, record.round, vote.ballot, record.hash)
        if vote.record != record.hash or not verify(sender, vote.signature, text):
            raise PayloadError(f"vote in round {vote.round} is for another record or not signed by its sender; drop it")
        self._answered(leading, sender)
        leading.votes[sender] = vote.signature

    def _answered(self, leading: Ballot, peer: PeerId) -> None:
        """Who answers a ballot that was opened after its farewell is back: it said that it would vote no more.

        Else nothing tells in the same round, as its messages may come in any order; and the frames of a record that
        only it holds would be asked of nobody.
        """
        if peer not in leading.parted:
            self._is_back(peer)
