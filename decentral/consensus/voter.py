"""The voter's part of a round: frames that it misses, promises and votes, whose ballot it is, commits passed on."""

from __future__ import annotations

import math

from decentral.consensus.chain import check_contributors, check_known
from decentral.consensus.paxos import PLANS_PER_BALLOT, farewell, promise, shows_promise
from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER, Fetch, RoundState, SendSlices, fits
from decentral.consensus.timing import SLACK
from decentral.errors import PayloadError
from decentral.flow.pacing import shifted
from decentral.wire import messages as m
from decentral.wire.keys import Digest, PeerId

# ---- frames that are not here yet ----
#
# Most come by themselves; of whom the others are asked, and when.


class Retrieval:
    """Asks for what is offered or named and does not come."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def all_held(self, record: m.Record, likely: PeerId, now: float) -> bool:
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

    def _ask(self, frame: Digest, owner: PeerId, likely: PeerId, now: float, record: m.Record | None = None) -> None:
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


# ---- promises and votes ----
#
# Promise, accept durably, sign. A vote is given only with every named frame in hand.

LEAP = 1024  # ballots that a message may be above the promised one: a flipped bit must not use the numbers up


class Voter:
    """Answers the leaders of ballots."""

    def __init__(self, state: RoundState, retrieval: Retrieval) -> None:
        self._state, self._retrieval = state, retrieval
        # The record and ballot that were objected to last, and since when; None: the others were told.
        self._objected: tuple[tuple[Digest, int] | None, float | None] = None, None

    def take_prepare(self, sender: PeerId, prepare: m.Prepare) -> None:
        """Keep it until it is its sender's turn here, too; a peer that has left repeats its last word."""
        state = self._state
        self._check_leap(prepare.ballot)
        if state.has_left:
            state.send(sender, self.last_word())  # it was lost
        elif state.leader_of(prepare.ballot) == sender:
            state.prepares[sender] = prepare

    def answer_prepares(self, succession: Succession, now: float) -> None:
        """Promise the highest of those whose leaders' turn has come; where a higher ballot was promised, show that one.

        It is when this peer has lost its own patience with who led before, or knows that one to be away. Else ten
        messages a second of 24 bytes each kept five peers from ever deciding.
        """
        state = self._state
        if not state.prepares or state.forgetful or state.returning is not None:
            return
        in_charge = succession.ballot_in_charge(now)
        due = {p.ballot: sender for sender, p in state.prepares.items() if self._is_due(sender, p, in_charge, now)}
        if not due:
            return
        ballot = max(due)
        promised = state.acceptor.promise(ballot)
        if in_charge is not None and ballot > in_charge:
            state.taken_early[due[ballot]] = state.taken_early.get(due[ballot], 0) + 1
        state.prepares = {sender: p for sender, p in state.prepares.items() if p.ballot not in due}
        if promised is not None:
            state.become(promised)
        # A promise of a higher ballot says as much of what was accepted before. Without it two that came back were
        # bound to what nobody voted for until their ballots had passed that of the third, which had long been alone.
        answer = state.acceptor
        state.send(due[ballot], promise(answer, state.head.run, state.head.epoch, answer.promised, state.signer))

    def _is_due(self, sender: PeerId, prepare: m.Prepare, in_charge: int | None, now: float) -> bool:
        """Two that have lost patience are followed at once: they may know that the leader is away. One is not, for it
        may lie. But who lost it at another time than this peer is ahead of it by some ballots: each is followed once
        after the least patience, and twice as late each time, or two could go on past each other.
        """
        if in_charge is None or prepare.ballot <= in_charge:
            return True
        state = self._state
        place = state.head.epoch, state.head.round + 1
        said_now = [one for one in prepare.promises if (one.epoch, one.round) == place]
        others = {one.peer for one in said_now if shows_promise(one, state.head.run, prepare.ballot)}
        if others.intersection(state.committee) - {sender, state.me}:
            return True
        if state.promised_since is None or state.promised_since[0] != state.acceptor.promised:
            return False
        waited = now - state.promised_since[1]
        return waited >= state.patience() * 2.0 ** min(state.taken_early.get(sender, 0), 32)

    def take_proposal(self, sender: PeerId, proposal: m.Proposal) -> None:
        """Look at it from now on. Raises PayloadError when its sender does not lead its ballot or it is stale."""
        state = self._state
        self._check_leap(proposal.ballot)
        if state.leader_of(proposal.ballot) != sender:
            raise PayloadError(f"proposal of ballot {proposal.ballot} by a peer that does not lead it; drop it")
        if not state.succeeds(proposal.record, sender):
            return
        state.check_proposed(proposal)
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
        if not self._stands_behind(proposal, now) or not self._retrieval.all_held(proposal.record, sender, now):
            return
        accepted = state.acceptor.accept(proposal.ballot, proposal.record, proposal.signature)
        if accepted is None:
            return
        state.become(accepted)
        state.stall(now)
        self._tell(sender, self.vote_for(proposal))

    def _stands_behind(self, proposal: m.Proposal, now: float) -> bool:
        """Tell whether the changes that a record makes are right as this peer sees it. If they are not, the voters are
        told once; of newcomers after a moment, in which it may hear them as its leader did.
        """
        state, record = self._state, proposal.record
        peers, final = state.objections(proposal)
        if not (peers or final) or (proposal.ballot and state.is_carried_on(proposal)):
            return True
        known, since = self._objected
        if known != (record.hash, proposal.ballot):
            known, since = (record.hash, proposal.ballot), now
            self._objected = known, since
        of_newcomers = not final and peers.isdisjoint(record.members)
        if since is not None and now >= since + (FETCH_AFTER if of_newcomers else 0.0):
            self._objected = known, None
            named = tuple(sorted(peers))
            said = m.Refusal(record.epoch, record.round, proposal.ballot, record.hash, named, final)
            self.take_refusal(state.me, said)
            state.tell((*state.committee, state.leader_of(proposal.ballot)), said)
        return False

    def take_refusal(self, sender: PeerId, refusal: m.Refusal) -> None:
        """Another voter does not stand behind the record of a ballot."""
        self._state.refusals.take(sender, refusal)

    def end_refused(self, now: float) -> None:
        """A ballot whose record too many refuse is over, and what they refuse is left out for a lease."""
        state = self._state
        if state.proposal is None or state.refused_ballot >= state.proposal[1].ballot:
            return
        _, proposal = state.proposal
        voters = state.terms.voting.voters_on(proposal.record)
        if state.refusals.end(proposal.ballot, proposal.record, voters, now, state.terms.lease):
            state.refused_ballot = proposal.ballot

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
        return farewell(kept or state.acceptor, state.head.run, state.head.epoch, state.signer)

    def _check_leap(self, ballot: int) -> None:
        promised = self._state.acceptor.promised
        if ballot > promised + LEAP:
            raise PayloadError(f"ballot {ballot}, far above the promised one, {promised}; drop it")


# ---- the ballot in charge ----
#
# It is the lowest one that had not its time yet and whose leader is there.


class Succession:
    """Which peer leads now, as every peer reckons it by itself."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def ballot_in_charge(self, now: float) -> int | None:
        """The lowest ballot not yet given up whose leader is there."""
        state = self._state
        first = max(state.acceptor.promised + self._num_given_up(now), state.refused_ballot + 1)
        ballots = range(first, first + len(state.head.members))
        return next((ballot for ballot in ballots if state.presence.present(state.leader_of(ballot))), None)

    def _num_given_up(self, now: float) -> int:
        """Ballots from the promised one on that had their time: as long as the round had stalled before, and patience.

        So each gets twice the time of the last. Counted from when it was promised: all who did agree within a message's
        time on who leads, whatever number it has, and whoever has restarted since. Who leads one waits for those who
        promise when they have lost their own patience, and not before.
        """
        state = self._state
        if state.stalled_since is None:
            return 0
        promised, since = state.promised_since or (state.acceptor.promised, state.stalled_since)
        if promised != state.acceptor.promised:
            promised, since = state.acceptor.promised, now
        state.promised_since = promised, since
        if promised and state.leader_of(promised) == state.me:
            since += state.patience()
        if now - since < state.terms.patience:  # as most often: no need to look at everybody's uplink
            return 0
        length = state.patience(plans=2) + since - state.stalled_since  # one that fails, one without who failed it
        return int(math.log2((now - since) / length + 1.0))


# ---- commits on their way to everybody ----
#
# They come from their leader in a small swarm, by way of those who voted for them in a large one.
#
# A commit names a frame of every member, so one peer that sent it to all would send the square of their number, and
# all would wait for its uplink. Beyond a committee's size the leader tells the voters whose votes the commit carries,
# and each of those tells its share of the others. Which is whose share everybody reads in the commit. A share whose
# voter has died meanwhile asks, as whoever missed a commit does: it repeats its offer after three seconds.


class Herald:
    """Tells of commits."""

    def __init__(self, state: RoundState) -> None:
        self._state = state

    def announce(self, commit: m.Commit) -> None:
        """Tell all of what was decided here."""
        state, relays = self._state, self._relays(commit)
        if not relays:
            state.tell((*state.head.members, *state.joiners), commit)
            return
        silent = [peer for peer in relays if peer == state.me or not state.presence.present(peer)]
        instead = [peer for relay in silent for peer in relay_shares(commit, relays)[relay]]
        state.tell((*relays, *instead, *state.joiners), commit)

    def announce_found(self, commit: m.Commit) -> None:
        """Tell all of what farewells have shown, as everybody finds by itself: of a large swarm only the committee."""
        committee = self._state.committee
        if self._state.me in committee or len(committee) == len(self._state.head.members):
            self.announce(commit)

    def pass_on(self, sender: PeerId, commit: m.Commit) -> None:
        """Tell this peer's share of what the leader has told it."""
        state, relays = self._state, self._relays(commit)
        if state.me in relays and sender == state.leader_of(commit.certificate.ballot):
            state.tell(relay_shares(commit, relays)[state.me], commit)

    def _relays(self, commit: m.Commit) -> tuple[PeerId, ...]:
        """Those who voted; nobody where the leader tells everybody."""
        few = len(commit.record.members) <= self._state.terms.voting.seats
        return () if few else tuple(peer for peer, _ in commit.certificate.votes)


def relay_shares(commit: m.Commit, relays: tuple[PeerId, ...]) -> dict[PeerId, tuple[PeerId, ...]]:
    """The members that each of ``relays`` passes a commit on to: all others, each once."""
    others = tuple(peer for peer in commit.record.members if peer not in relays)
    return {relay: others[number :: len(relays)] for number, relay in enumerate(relays)}
