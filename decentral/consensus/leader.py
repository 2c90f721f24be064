"""The leader's part of a round: to see that a record is due, to make it, and to have it voted for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from decentral.consensus.chain import enough_promises, majority
from decentral.consensus.paxos import Ballot, Partition, Planned, check_promise, promise, results_of
from decentral.consensus.round_state import RESEND_AFTER, Mistake, RoundState, SendSlices, references
from decentral.consensus.voter import Herald, Retrieval, Succession, Voter
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import PeerId, verify

# ---- when a record is due ----
#
# There is something to commit when all who are there have offered, or a quorum has and its grace is over, or the
# deadline is, or members changed.


class Readiness:
    """When a leader waits no longer."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def usable(self, now: float) -> list[PeerId]:
        """The members whose offers can be committed; the deadline learns from those that are new."""
        state = self._state
        states = state.terms.states(state.head.outer_step)
        usable = state.round.usable(state.head, state.held, state.terms.named, states)
        if state.round.quorum_since is None and 0 < state.terms.enough <= len(usable):
            state.round.quorum_since = now
        for offer in state.round.newly(usable):
            if offer.steps >= state.terms.steps:
                state.deadline.observe(now - state.round.opened)
        return usable

    def has_work(self, usable: Sequence[PeerId], now: float) -> bool:
        """Whether a leader is needed."""
        state = self._state
        carried_on = state.acceptor.accepted is not None or state.leading is not None or state.acceptor.promised > 0
        return carried_on or self.frames_ready(usable, now) or self.membership_due(now)

    def frames_ready(self, usable: Sequence[PeerId], now: float) -> bool:
        """Whether it is worth it to commit what ``usable`` have offered, and nothing more is on its way."""
        state = self._state
        enough = len(state.head.members) >= state.terms.min_peers
        if enough and usable and self._quorum_waited(now):
            return True
        ready = enough and state.round.ready(usable, state.head, state.presence, state.deadline, now)
        here = frozenset(usable if ready else ())
        return ready and not any(self._is_coming(peer, now) for peer in state.round.offers if peer not in here)

    def _quorum_waited(self, now: float) -> bool:
        """Whether a quorum is here and had its grace: then nobody is waited for, and no frame that is on its way."""
        since = self._state.round.quorum_since
        return since is not None and now >= since + self._state.terms.grace

    def _is_coming(self, peer: PeerId, now: float) -> bool:
        """Whether a frame that was offered may still come: the deadline is for offers, their bytes take their time.

        So long that it may be asked for when it does not come by itself. And not every time: who offers and does not
        send would hold up every round.
        """
        state = self._state
        waited_for = state.presence.present(peer) and peer not in state.head.newcomers
        waited_for = waited_for and state.unsent.is_waited_for(peer, state.head.round + 1)
        fits = waited_for and state.round.offers[peer].base == state.head.anchor
        return fits and now < state.round.offered_at[peer] + 2 * state.allowed((peer,))

    def membership_due(self, now: float) -> bool:
        """Between rounds the membership may change by itself; with offers under way it rides along."""
        state = self._state
        waiting = not state.round.offers or len(state.head.members) < state.terms.min_peers
        return waiting and state.next_members(now) != state.head.members


# ---- the record to propose ----
#
# A leader that is free proposes the record of what was offered, and before it the plan of a reduce.


class RecordBuilder:
    """Makes the value of a ballot."""

    def __init__(self, state: RoundState, readiness: Readiness) -> None:
        self._state, self._readiness = state, readiness

    def new_record(self, leading: Ballot, usable: Sequence[PeerId], now: float) -> m.Record | None:
        """The record to propose; None while it is too early, or while a reduce is under way."""
        state = self._state
        if not self._readiness.frames_ready(usable, now):
            return self._record(now) if self._readiness.membership_due(now) else None
        if not state.reduces:
            return self._record(now, frames=references(usable, state.round.offers))
        return self._reduced_record(leading, usable, now)

    def carried_on(self, bound: m.Record, now: float) -> m.Record:
        """A value that may be chosen. By the few who are left it must also say who was given up: were it chosen before,
        one of those would have voted for it; that peer re-syncs if it returns. So it is when those who were to vote on
        it were few, and are gone, while others are back whom it drops: nobody could vote for it as it is.
        """
        if self._state.presence.is_majority_here(self._state.terms.voting.voters_on(bound)):
            return bound
        return replace(bound, next_members=self._state.next_members(now))

    def _reduced_record(self, leading: Ballot, usable: Sequence[PeerId], now: float) -> m.Record | None:
        """Plan the reduce, wait for every owner's result, re-plan without those who let it down."""
        state, planned = self._state, leading.planned
        absent = [peer for peer in state.head.members if not state.presence.present(peer)]
        if planned is not None:
            frames = results_of(planned.plan, state.results)
            if frames is not None:
                plan = planned.plan
                return self._record(now, frames, plan.contributors, plan.partition, plan.number)
            if not planned.failed(absent, state.patience(), now):
                return None
        plan = self._plan(leading, usable, absent)
        if planned is not None and planned.asks_the_same(plan) and not planned.late(state.patience(), now):
            return None  # nobody else is there: told again at once, it would fail again at once, and so on
        leading.planned = Planned(plan, now)
        state.planned_number = plan.number
        state.carries_out(plan)
        state.broadcast(plan)
        state.effects.append(SendSlices(plan))
        return None

    def _plan(self, leading: Ballot, usable: Sequence[PeerId], absent: Sequence[PeerId]) -> m.ReducePlan:
        state, dropped = self._state, set(absent)
        dropped |= {peer for peer, until in state.rests.items() if state.head.round < until and peer != state.me}
        if leading.planned is not None:
            dropped |= leading.planned.blamed or leading.planned.silent_owners(state.results, state.me)
        peers = [peer for peer in usable if peer not in dropped] or usable[:1]
        assert state.terms.partition is not None
        fragment = state.head.fragment(state.terms.num_fragments)
        return m.ReducePlan(
            state.head.epoch,
            state.head.round + 1,
            leading.ballot,
            leading.next_plan_number(),
            references(peers, state.round.offers),
            state.terms.partition(fragment, tuple(sorted(peers))),
        )

    def _record(
        self,
        now: float,
        frames: tuple[m.FrameRef, ...] = (),
        contributors: tuple[m.FrameRef, ...] = (),
        partition: Partition = (),
        plan: int = 0,
    ) -> m.Record:
        state, head = self._state, self._state.head
        assert head.anchor is not None
        made = m.Record(
            run=head.run,
            epoch=head.epoch,
            round=head.round + 1,
            outer_step=head.outer_step,
            fragment=head.fragment(state.terms.num_fragments),
            plan=plan,
            previous=head.hash,
            base=head.anchor,
            members=head.members,
            frames=frames,
            contributors=contributors,
            partition=partition,
            next_members=state.next_members(now),
            final=False,
        )
        return replace(made, final=state.ends_with(made, now))


SHOWN_TO_ASK = 2  # promises that a leader shows to those that have not answered

# ---- leading a ballot ----
#
# Find out what an earlier quorum may have chosen, propose it or a new record, count votes.


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
        if self._is_prepared(leading, now):
            if leading.proposal is None and not leading.unfit:
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

    def _is_prepared(self, leading: Ballot, now: float) -> bool:
        """Tell whether as many promised as it takes. A majority is enough when this peer has waited for as long as the
        others keep what it asked; until then so many that one may lie, and where a record is bound by nobody's word but
        its proposer's, all who are there: else a leader that was silent in its own ballot has the next ones wait for
        frames that nobody has.
        """
        state = self._state
        if leading.ballot == 0 or leading.proposal is not None:
            return True
        voters = state.voters
        if now >= leading.opened + state.patience():
            return leading.prepared(voters, majority(voters))
        silent = set(voters) - leading.heard() - state.presence.leaving - {state.me}
        if not any(map(state.presence.present, silent)):
            return leading.prepared(voters, majority(voters))
        bound = self._bound(leading)
        alone = bound is not None and leading.stands_alone(
            bound[1], state.leader_of(bound[0]), state.acceptor, state.me
        )
        return not alone and leading.prepared(voters, enough_promises(voters))

    def _opened(self, ballot: int, now: float) -> Ballot:
        state, leading = self._state, Ballot(ballot, self._state.terms.voting, opened=now, sent_at=now)
        if ballot == 0:
            return leading
        promised = state.acceptor.promise(ballot)
        assert promised is not None, "the ballot in charge is never below the promised one"
        state.become(promised)
        leading.promises[state.me] = promise(promised, state.head.run, state.head.epoch, ballot, state.signer)
        state.broadcast(m.Prepare(state.head.epoch, promised.round, ballot))
        return leading

    def _propose_something(self, leading: Ballot, usable: list[PeerId], now: float) -> None:
        """What may have been chosen, or a record of our own."""
        record = self._already_proposed(leading) or self._bound_or_new(leading, usable, now)
        if record is not None and self._is_fit(leading, record):
            self._propose(leading, record, now)

    def _is_fit(self, leading: Ballot, record: m.Record) -> bool:
        """Tell whether ``record`` can be written down. Something that a peer said and this one believed may have led to
        one that cannot: the next leader makes another, and neither peer ends of it.
        """
        try:
            record.hash  # noqa: B018 - it is of what is written
        except PayloadError as error:
            leading.unfit = True
            self._state.effects.append(Mistake(f"the record of ballot {leading.ballot}", error))
        return not leading.unfit

    def _already_proposed(self, leading: Ballot) -> m.Record | None:
        """What this ballot proposed before its leader restarted: it is that or nothing, or two records had one ballot,
        and their plans one number, so that voters of the first took it for what had not been planned (seed 3159).
        """
        own = self._state.acceptor
        return own.accepted if own.accepted_ballot == leading.ballot else None

    def _bound(self, leading: Ballot) -> tuple[int, m.Record] | None:
        state = self._state
        leading.farewells = state.farewells.votes(state.acceptor.round, but=state.presence.gone)
        return leading.bound_value(state.acceptor)

    def _bound_or_new(self, leading: Ballot, usable: list[PeerId], now: float) -> m.Record | None:
        bound = self._bound(leading)
        if bound is None:
            return self._builder.new_record(leading, usable, now)
        return self._builder.carried_on(bound[1], now)

    def _propose(self, leading: Ballot, record: m.Record, now: float) -> None:
        """Accept our own proposal durably first: a leader that restarts proposes the same or nothing."""
        state = self._state
        leading.proposal = self._shown(leading, record)
        leading.sent_at = now
        state.proposal = (state.me, leading.proposal)
        if state.acceptor.accepted_ballot == leading.ballot:  # restarted after voting: same record, same signature
            leading.votes[state.me] = self._voter.vote_for(leading.proposal).signature
        self._voter.vote(now)
        self._ask_for_votes(leading.proposal)

    def _shown(self, leading: Ballot, record: m.Record) -> m.Proposal:
        """The proposal of ``record``, with what others have signed that makes its changes right."""
        state, asked = self._state, self._state.joiners
        joined = [peer for peer in record.next_members if peer not in record.members and peer in asked]
        requests = tuple(m.Asked(peer, (r := asked[peer]).round, r.digest, r.signature) for peer in joined)
        promises = leading.shown(state.terms.voting.voters_on(record)) if leading.ballot else ()
        bare = m.Proposal(leading.ballot, record, m.NO_SIGNATURE, promises, state.farewells.shown(record), requests)
        return replace(bare, signature=self._voter.vote_for(bare).signature)

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
            self._ask_for_promises(leading)

    def _ask_for_promises(self, leading: Ballot) -> None:
        """Give those that have not answered; with the answers of others, as two that ask are followed at once."""
        state = self._state
        shown = leading.shown([peer for peer in state.committee if peer != state.me])[:SHOWN_TO_ASK]
        prepare = m.Prepare(state.head.epoch, state.head.round + 1, leading.ballot, shown)
        state.broadcast(prepare, but=leading.promises)

    def take_promise(self, sender: PeerId, promise: m.Promise) -> None:
        """Count it if it answers the ballot that we lead. Raises PayloadError when it accepted what nobody may."""
        state, leading = self._state, self._state.leading
        if leading is None or promise.ballot < leading.ballot:
            return
        check_promise(sender, promise, state.head.run, state.leader_of)
        if promise.accepted is not None:
            if not state.succeeds(promise.accepted, sender):
                return
            state.check_acceptable(promise.accepted)
        self._answered(leading, sender)
        if promise.ballot > leading.ballot:  # it votes for nothing of this ballot, and tells what may have been chosen
            leading.overtaken[sender] = promise
            return
        first = leading.promises.keys() <= {state.me}
        leading.promises[sender] = promise
        if first and sender in state.committee:
            self._ask_for_promises(leading)

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

    def take_missing(self, sender: PeerId, missing: m.Missing) -> None:
        """An owner's complaint about the plan that is being carried out."""
        leading = self._state.leading
        if leading is not None and leading.planned is not None:
            leading.planned.blame(sender, missing.plan, missing.peers)

    def _answered(self, leading: Ballot, peer: PeerId) -> None:
        """A peer that answers a ballot opened after its farewell is back: it said that it would vote no more.

        Else nothing tells in the same round, as its messages may come in any order; and the frames of a record that
        only it holds would be asked of nobody.
        """
        if peer not in leading.parted:
            self._state.is_back(peer)
