"""The voter's part of a round: frames that it misses, promises and votes, and whose ballot it is."""

from __future__ import annotations

import math

from decentral.consensus.acceptance import (
    check_acceptable,
    check_own,
    check_timely,
    continues_chain,
    find_objections,
    is_as_planned,
    is_carried_on,
    note_plan,
)
from decentral.consensus.chain import check_contributors, check_known
from decentral.consensus.paxos import PLANS_PER_BALLOT, check_proposed, farewell, promise, shows_promise
from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER, Fetch, RoundState, SendSlices, fits
from decentral.consensus.timing import SLACK
from decentral.errors import PayloadError
from decentral.flow.pacing import order_after
from decentral.wire import messages as m
from decentral.wire.keys import Digest, PeerId

# ---- frames that are not here yet ----
#
# Most come by themselves; of whom the others are asked, and when.


def has_all_frames(state: RoundState, record: m.Record, likely: PeerId, now: float) -> bool:
    """Tell whether every frame that ``record`` names is here and is what it says; a missing one is asked for.

    ``likely``: the peer that told of the record, and hence has them.
    """
    held = state.held
    missing = [ref for ref in record.frames if ref.frame not in held]
    for ref in missing:
        _ask_for_frame(state, ref.frame, ref.peer, likely, now, record)
    kind, states = state.terms.named, state.terms.states(record.outer_step)
    return not missing and all(fits(held[ref.frame], ref, record, kind, states) for ref in record.frames)


def ask_for_offered(state: RoundState, now: float) -> None:
    """Ask for frames whose push never came: a leader cannot propose what it does not hold."""
    if state.reduces:
        return
    for peer, offer in state.round.offers.items():
        if offer.frame not in state.held:
            _ask_for_frame(state, offer.frame, peer, peer, now)


def _ask_for_frame(
    state: RoundState, frame: Digest, owner: PeerId, likely: PeerId, now: float, record: m.Record | None = None
) -> None:
    ask_at = state.round.ask_at
    if frame not in ask_at:
        ask_at[frame] = now + _seconds_to_come(state, owner)
    if now < ask_at[frame] and state.presence.present(owner):
        return
    ask_at[frame] = now + RESEND_AFTER
    holders = _holders(state, owner, likely)
    if holders:
        state.effects.append(Fetch(frame, owner, state.head.round + 1, holders, record))


def _holders(state: RoundState, owner: PeerId, likely: PeerId) -> tuple[PeerId, ...]:
    """Return the peers that are there and may have it, likeliest first; the rest begins elsewhere for each that
    asks.
    """
    others = [peer for peer in order_after(state.head.members, state.me) if peer not in (state.me, owner, likely)]
    first = dict.fromkeys((likely, owner, *others))
    return tuple(peer for peer in first if peer != state.me and state.presence.present(peer))


def _seconds_to_come(state: RoundState, owner: PeerId) -> float:
    """Return the seconds in which a frame comes by itself, or begins to. Results of a reduce leave one after another.

    With slack: asked for by all when it is a little late, everything is sent twice, and what was late gets later.
    """
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


def take_prepare(state: RoundState, sender: PeerId, prepare: m.Prepare) -> None:
    """Keep a leader's question until it is its turn here, too; a peer that has left repeats its last word."""
    _check_leap(state, prepare.ballot)
    if state.has_left:
        state.send(sender, last_word(state))  # it was lost
    elif state.leader_of(prepare.ballot) == sender:
        state.prepares[sender] = prepare


def answer_prepares(state: RoundState, now: float) -> None:
    """Promise the highest of those whose leaders' turn has come; where a higher ballot was promised, show that one.

    It is when this peer has lost its own patience with who led before, or knows that one to be away. Else ten
    messages a second of 24 bytes each kept five peers from ever deciding.
    """
    if not state.prepares or state.forgetful or state.returning is not None:
        return
    in_charge = ballot_in_charge(state, now)
    due = {p.ballot: sender for sender, p in state.prepares.items() if _is_due(state, sender, p, in_charge, now)}
    if not due:
        return
    ballot = max(due)
    promised = state.acceptor.promise(ballot)
    if in_charge is not None and ballot > in_charge:
        state.taken_early[due[ballot]] = state.taken_early.get(due[ballot], 0) + 1
    state.prepares = {sender: p for sender, p in state.prepares.items() if p.ballot not in due}
    if promised is not None:
        state.persist(promised)
    # A promise of a higher ballot says as much of what was accepted before. Without it two that came back were
    # bound to what nobody voted for until their ballots had passed that of the third, which had long been alone.
    answer = state.acceptor
    state.send(due[ballot], promise(answer, state.head.run, state.head.epoch, answer.promised, state.signer))


def _is_due(state: RoundState, sender: PeerId, prepare: m.Prepare, in_charge: int | None, now: float) -> bool:
    """Tell whether a leader is followed now. Two that have lost patience are followed at once: they may know that the
    leader is away. One is not, for it may lie. But who lost it at another time than this peer is ahead of it by some
    ballots: each is followed once after the least patience, and twice as late each time, or two could go on past each
    other.
    """
    if in_charge is None or prepare.ballot <= in_charge:
        return True
    place = state.head.epoch, state.head.round + 1
    said_now = [one for one in prepare.promises if (one.epoch, one.round) == place]
    others = {one.peer for one in said_now if shows_promise(one, state.head.run, prepare.ballot)}
    if others.intersection(state.committee) - {sender, state.me}:
        return True
    if state.promised_since is None or state.promised_since[0] != state.acceptor.promised:
        return False
    waited = now - state.promised_since[1]
    return waited >= state.patience() * 2.0 ** min(state.taken_early.get(sender, 0), 32)


def take_proposal(state: RoundState, sender: PeerId, proposal: m.Proposal) -> None:
    """Look at a proposal from now on. Raises PayloadError when its sender does not lead its ballot or it is stale."""
    _check_leap(state, proposal.ballot)
    if state.leader_of(proposal.ballot) != sender:
        raise PayloadError(f"proposal of ballot {proposal.ballot} by a peer that does not lead it; drop it")
    if not continues_chain(state, proposal.record, sender):
        return
    check_proposed(proposal.record, proposal.ballot, proposal.signature, state.leader_of)
    check_acceptable(state, proposal.record)
    check_own(state, proposal.record.contributors)
    if state.proposal is None or proposal.ballot > state.proposal[1].ballot:
        state.proposal = (sender, proposal)
    elif proposal == state.proposal[1] and state.acceptor.accepted_ballot == proposal.ballot:
        state.send(sender, sign_vote(state, proposal))  # our vote was lost


def take_plan(state: RoundState, sender: PeerId, plan: m.ReducePlan) -> None:
    """Carry out the newest plan of the ballot's leader. Raises PayloadError for what no record may name."""
    _check_leap(state, plan.ballot)
    if plan.number // PLANS_PER_BALLOT != plan.ballot:
        raise PayloadError(f"plan {plan.number} is none of ballot {plan.ballot}; drop it")
    check_contributors(plan.contributors, state.head.members)
    check_timely(state, plan.contributors)
    check_own(state, plan.contributors)
    check_known([owner for owner, _, _ in plan.partition], state.head.members)
    leads = state.leader_of(plan.ballot) == sender
    if leads and plan.ballot >= state.acceptor.promised and plan.number > state.planned_number:
        state.planned_number = plan.number
        note_plan(state, plan)
        state.effects.append(SendSlices(plan))


def vote(state: RoundState, now: float) -> None:
    """Accept the newest proposal and sign it, once all that it names is here."""
    if state.proposal is None or not state.may_vote:
        return
    sender, proposal = state.proposal
    if state.acceptor.accepted_ballot >= proposal.ballot or proposal.ballot < state.acceptor.promised:
        return
    if not continues_chain(state, proposal.record, sender):  # again: the anchor may have been unknown when it came
        state.proposal = None
        return
    if proposal.record != state.acceptor.accepted and not is_as_planned(state, proposal.record):
        return
    if sender != state.me and state.me not in state.terms.voting.voters_on(proposal.record):
        return  # a leader accepts what it proposes, whether its vote counts or not: one record per ballot
    if not _stands_behind(state, proposal, now) or not has_all_frames(state, proposal.record, sender, now):
        return
    accepted = state.acceptor.accept(proposal.ballot, proposal.record, proposal.signature)
    if accepted is None:
        return
    state.persist(accepted)
    state.stall(now)
    _send_vote(state, sender, sign_vote(state, proposal))


def _stands_behind(state: RoundState, proposal: m.Proposal, now: float) -> bool:
    """Tell whether the changes that a record makes are right as this peer sees it. If they are not, the voters are
    told once; of newcomers after a moment, in which it may hear them as its leader did.
    """
    record = proposal.record
    peers, final = find_objections(state, proposal)
    if not (peers or final) or (proposal.ballot and is_carried_on(state, proposal)):
        return True
    known, since = state.objected
    if known != (record.hash, proposal.ballot):
        known, since = (record.hash, proposal.ballot), now
        state.objected = known, since
    of_newcomers = not final and peers.isdisjoint(record.members)
    if since is not None and now >= since + (FETCH_AFTER if of_newcomers else 0.0):
        state.objected = known, None
        named = tuple(sorted(peers))
        said = m.Refusal(record.epoch, record.round, proposal.ballot, record.hash, named, final)
        take_refusal(state, state.me, said)
        state.tell((*state.committee, state.leader_of(proposal.ballot)), said)
    return False


def take_refusal(state: RoundState, sender: PeerId, refusal: m.Refusal) -> None:
    """Book that another voter does not stand behind the record of a ballot."""
    state.refusals.take(sender, refusal)


def end_refused(state: RoundState, now: float) -> None:
    """End a ballot whose record too many refuse; what they refuse is left out for a lease."""
    if state.proposal is None or state.refused_ballot >= state.proposal[1].ballot:
        return
    _, proposal = state.proposal
    voters = state.terms.voting.voters_on(proposal.record)
    if state.refusals.end(proposal.ballot, proposal.record, voters, now, state.terms.lease):
        state.refused_ballot = proposal.ballot


def _send_vote(state: RoundState, leader: PeerId, vote: m.Vote) -> None:
    leading = state.leading
    if leader == state.me and leading is not None:
        leading.votes[leader] = vote.signature
    else:
        state.send(leader, vote)


def sign_vote(state: RoundState, proposal: m.Proposal) -> m.Vote:
    """Sign our vote; only for what the acceptor has accepted."""
    record = proposal.record
    text = m.vote_text(record.run, record.epoch, record.round, proposal.ballot, record.hash)
    return m.Vote(record.epoch, record.round, proposal.ballot, record.hash, state.signer.sign(text))


def last_word(state: RoundState) -> m.Farewell:
    """Say how this peer voted; in rounds that its disk forgot, too, or it would deny those votes."""
    kept = state.remembered if state.forgetful else None
    return farewell(kept or state.acceptor, state.head.run, state.head.epoch, state.signer)


def _check_leap(state: RoundState, ballot: int) -> None:
    promised = state.acceptor.promised
    if ballot > promised + LEAP:
        raise PayloadError(f"ballot {ballot}, far above the promised one, {promised}; drop it")


# ---- the ballot in charge ----
#
# It is the lowest one that had not its time yet and whose leader is there. Every peer reckons it by itself.


def ballot_in_charge(state: RoundState, now: float) -> int | None:
    """Return the lowest ballot that had not its time yet and whose leader is there."""
    first = max(state.acceptor.promised + _num_spent(state, now), state.refused_ballot + 1)
    ballots = range(first, first + len(state.head.members))
    return next((ballot for ballot in ballots if state.presence.present(state.leader_of(ballot))), None)


def _num_spent(state: RoundState, now: float) -> int:
    """Count the ballots from the promised one on that had their time: each has as long as the round had stalled before,
    and patience.

    So each gets twice the time of the last. Counted from when it was promised: all who did agree within a message's
    time on who leads, whatever number it has, and whoever has restarted since. Who leads one waits for those who
    promise when they have lost their own patience, and not before.
    """
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
