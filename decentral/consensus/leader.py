"""The leader's part of a round: to see that a record is due, to make it, and to have it voted for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from decentral.consensus import learner, voter
from decentral.consensus.acceptance import check_acceptable, continues_chain, note_plan
from decentral.consensus.chain import enough_promises, majority
from decentral.consensus.paxos import Ballot, Partition, Planned, check_promise, promise, results_of
from decentral.consensus.round_state import RESEND_AFTER, Mistake, RoundState, SendSlices, references
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import PeerId, verify

# ---- when a record is due ----
#
# There is something to commit when all who are there have offered, or a quorum has and its grace is over, or the
# deadline is, or members changed.


def find_usable(state: RoundState, now: float) -> list[PeerId]:
    """Return the members whose offers can be committed; the deadline learns from those that are new."""
    states = state.terms.states(state.head.outer_step)
    usable = state.round.usable(state.head, state.held, state.terms.named, states)
    # Others offer nothing but that the turn may pass: beside one who trains the fragment, they would dilute the mean.
    usable = [peer for peer in usable if state.presence.trains(peer, state.fragment)] or usable
    if state.round.quorum_since is None and 0 < state.terms.enough <= len(usable):
        state.round.quorum_since = now
    for offer in state.round.newly(usable):
        if offer.steps >= state.terms.steps:
            state.deadline.observe(now - state.round.opened)
    return usable


def _has_work(state: RoundState, usable: Sequence[PeerId], now: float) -> bool:
    """Tell whether a leader is needed."""
    carried_on = state.acceptor.accepted is not None or state.leading is not None or state.acceptor.promised > 0
    return carried_on or _frames_ready(state, usable, now) or _membership_due(state, now)


def _frames_ready(state: RoundState, usable: Sequence[PeerId], now: float) -> bool:
    """Tell whether it is worth it to commit what ``usable`` have offered, and nothing more is on its way."""
    enough = len(state.head.members) >= state.terms.min_peers
    if enough and usable and _quorum_waited(state, now):
        return True
    if not enough or not usable:
        return False
    ready = state.round.ready(usable, state.expected(), state.head.newcomers, state.deadline, now)
    here = frozenset(usable if ready else ())
    return ready and not any(_is_coming(state, peer, now) for peer in state.round.offers if peer not in here)


def _quorum_waited(state: RoundState, now: float) -> bool:
    """Tell whether a quorum is here and had its grace: then nobody is waited for, and no frame that is on its way."""
    since = state.round.quorum_since
    return since is not None and now >= since + state.terms.grace


def _is_coming(state: RoundState, peer: PeerId, now: float) -> bool:
    """Tell whether a frame that was offered may still come: the deadline is for offers, their bytes take their time.

    So long that it may be asked for when it does not come by itself. And not every time: a peer that offers and does
    not send would hold up every round.
    """
    waited_for = state.presence.present(peer) and peer not in state.head.newcomers
    waited_for = waited_for and state.unsent.is_waited_for(peer, state.head.round + 1)
    fits = waited_for and state.round.offers[peer].base == state.head.anchor
    return fits and now < state.round.offered_at[peer] + 2 * state.allowed((peer,))


def _membership_due(state: RoundState, now: float) -> bool:
    """Tell whether the membership is to change in a record of its own: with offers under way it rides along."""
    waiting = not state.round.offers or len(state.head.members) < state.terms.min_peers
    return waiting and next_members(state, now) != state.head.members


# ---- the record to propose ----
#
# A leader that is free proposes the record of what was offered, and before it the plan of a reduce.


def new_record(state: RoundState, leading: Ballot, usable: Sequence[PeerId], now: float) -> m.Record | None:
    """Make the record to propose; None while it is too early, or while a reduce is under way."""
    if not _frames_ready(state, usable, now):
        return make_record(state, now) if _membership_due(state, now) else None
    if not state.reduces:
        return make_record(state, now, frames=references(usable, state.round.offers))
    return _record_of_reduce(state, leading, usable, now)


def _carry_on(state: RoundState, bound: m.Record, now: float) -> m.Record:
    """Return the record of a value that may be chosen. Where few peers are left it must also say who was given up: were
    it chosen before, one of those would have voted for it; that peer re-syncs if it returns. The same holds when those
    who were to vote on it were few, and are gone, while others are back whom it drops: nobody could vote for it as it
    is.
    """
    if state.presence.is_majority_here(state.terms.voting.voters_on(bound)):
        return bound
    return replace(bound, next_members=next_members(state, now))


def _record_of_reduce(state: RoundState, leading: Ballot, usable: Sequence[PeerId], now: float) -> m.Record | None:
    """Plan the reduce, wait for every owner's result, re-plan without those who let it down."""
    planned = leading.planned
    absent = [peer for peer in state.head.members if not state.presence.present(peer)]
    if planned is not None:
        frames = results_of(planned.plan, state.results)
        if frames is not None:
            plan = planned.plan
            return make_record(state, now, frames, plan.contributors, plan.partition, plan.number)
        if not planned.has_failed(absent, state.patience(), now):
            return None
    plan = _make_plan(state, leading, usable, absent)
    if planned is not None and planned.asks_the_same(plan) and not planned.is_late(state.patience(), now):
        return None  # nobody else is there: told again at once, it would fail again at once, and so on
    leading.planned = Planned(plan, now)
    state.planned_number = plan.number
    note_plan(state, plan)
    state.broadcast(plan)
    state.effects.append(SendSlices(plan))
    return None


def _make_plan(state: RoundState, leading: Ballot, usable: Sequence[PeerId], absent: Sequence[PeerId]) -> m.ReducePlan:
    dropped = set(absent)
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


def make_record(
    state: RoundState,
    now: float,
    frames: tuple[m.FrameRef, ...] = (),
    contributors: tuple[m.FrameRef, ...] = (),
    partition: Partition = (),
    plan: int = 0,
) -> m.Record:
    """Make the record of the round in progress that names these frames, or nothing but the next members."""
    head = state.head
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
        next_members=next_members(state, now),
        final=False,
    )
    return replace(made, final=is_last(state, made, now))


def is_last(state: RoundState, record: m.Record, now: float) -> bool:
    """Tell whether a record of ours with these frames is the run's last."""
    is_up = state.terms.clock.is_up and None not in state.refusals.disputed(now)
    return bool(record.frames) and (record.outer_step + 1 >= state.terms.rounds or is_up)


def next_members(state: RoundState, now: float) -> tuple[PeerId, ...]:
    """Return the membership that a record made now would set."""
    disputed = {peer for peer in state.refusals.disputed(now) if peer is not None}
    return state.presence.next_members(state.head, state.joiners, disputed)


# ---- leading a ballot ----
#
# Find out what an earlier quorum may have chosen, propose it or a new record, count votes.

SHOWN_TO_ASK = 2  # promises that a leader shows to those that have not answered


def lead(state: RoundState, now: float) -> None:
    """Lead the ballot in charge if it is ours and there is something to commit."""
    if not state.may_vote:
        return
    usable = find_usable(state, now)
    voter.ask_for_offered(state, now)
    if not _has_work(state, usable, now):
        return
    state.stall(now)
    leading = _ballot_of_ours(state, now)
    if leading is None:
        return
    if _is_prepared(state, leading, now):
        if leading.proposal is None and not leading.unfit:
            _propose_something(state, leading, usable, now)
        _resend(state, leading, now)
        _elect(state, leading, now)
    else:
        _resend(state, leading, now)


def _ballot_of_ours(state: RoundState, now: float) -> Ballot | None:
    """Return the ballot in charge, opened if it was not; None when another peer leads it."""
    ballot = voter.ballot_in_charge(state, now)
    if ballot is None or state.leader_of(ballot) != state.me:
        return None
    if state.leading is None or state.leading.ballot < ballot:
        state.leading = _open_ballot(state, ballot, now)
    return state.leading


def _is_prepared(state: RoundState, leading: Ballot, now: float) -> bool:
    """Tell whether as many promised as it takes. A majority is enough when this peer has waited for as long as the
    others keep what it asked; until then so many that one may lie, and where a record is bound by nobody's word but
    its proposer's, all who are there: else a leader that was silent in its own ballot has the next ones wait for
    frames that nobody has.
    """
    if leading.ballot == 0 or leading.proposal is not None:
        return True
    voters = state.voters
    if now >= leading.opened + state.patience():
        return leading.is_prepared(voters, majority(voters))
    silent = set(voters) - leading.heard() - state.presence.leaving - {state.me}
    if not any(map(state.presence.present, silent)):
        return leading.is_prepared(voters, majority(voters))
    bound = _bound_record(state, leading)
    alone = bound is not None and leading.stands_alone(bound[1], state.leader_of(bound[0]), state.acceptor, state.me)
    return not alone and leading.is_prepared(voters, enough_promises(voters))


def _open_ballot(state: RoundState, ballot: int, now: float) -> Ballot:
    leading = Ballot(ballot, state.terms.voting, opened=now, sent_at=now)
    if ballot == 0:
        return leading
    promised = state.acceptor.promise(ballot)
    assert promised is not None, "the ballot in charge is never below the promised one"
    state.persist(promised)
    leading.promises[state.me] = promise(promised, state.head.run, state.head.epoch, ballot, state.signer)
    state.broadcast(m.Prepare(state.head.epoch, promised.round, ballot))
    return leading


def _propose_something(state: RoundState, leading: Ballot, usable: list[PeerId], now: float) -> None:
    """Propose the record that may have been chosen, or one of our own."""
    record = _already_proposed(state, leading) or _bound_or_new(state, leading, usable, now)
    if record is not None and _is_fit(state, leading, record):
        _propose(state, leading, record, now)


def _is_fit(state: RoundState, leading: Ballot, record: m.Record) -> bool:
    """Tell whether ``record`` can be written down. Something that a peer said and this one believed may have led to
    one that cannot: the next leader makes another, and neither peer ends of it.
    """
    try:
        record.hash  # noqa: B018 - it is of what is written
    except PayloadError as error:
        leading.unfit = True
        state.effects.append(Mistake(f"the record of ballot {leading.ballot}", error))
    return not leading.unfit


def _already_proposed(state: RoundState, leading: Ballot) -> m.Record | None:
    """Return the record that this ballot proposed before its leader restarted. It is proposed again: two records of one
    ballot had plans of one number, so that voters of the first took it for what had not been planned (seed 3159).
    """
    own = state.acceptor
    return own.accepted if own.accepted_ballot == leading.ballot else None


def _bound_record(state: RoundState, leading: Ballot) -> tuple[int, m.Record] | None:
    leading.farewells = state.farewells.votes(state.acceptor.round, but=state.presence.gone)
    return leading.bound_value(state.acceptor)


def _bound_or_new(state: RoundState, leading: Ballot, usable: list[PeerId], now: float) -> m.Record | None:
    bound = _bound_record(state, leading)
    if bound is None:
        return new_record(state, leading, usable, now)
    return _carry_on(state, bound[1], now)


def _propose(state: RoundState, leading: Ballot, record: m.Record, now: float) -> None:
    """Accept our own proposal durably first: a leader that restarts proposes the same or nothing."""
    leading.proposal = _make_proposal(state, leading, record)
    leading.sent_at = now
    state.proposal = (state.me, leading.proposal)
    if state.acceptor.accepted_ballot == leading.ballot:  # restarted after voting: same record, same signature
        leading.votes[state.me] = voter.sign_vote(state, leading.proposal).signature
    voter.vote(state, now)
    _ask_for_votes(state, leading.proposal)


def _make_proposal(state: RoundState, leading: Ballot, record: m.Record) -> m.Proposal:
    """Make the proposal of ``record``, with what others have signed that makes its changes right."""
    asked = state.joiners
    joined = [peer for peer in record.next_members if peer not in record.members and peer in asked]
    requests = tuple(m.Asked(peer, (r := asked[peer]).round, r.digest, r.signature) for peer in joined)
    promises = leading.shown(state.terms.voting.voters_on(record)) if leading.ballot else ()
    bare = m.Proposal(leading.ballot, record, m.NO_SIGNATURE, promises, state.farewells.shown(record), requests)
    return replace(bare, signature=voter.sign_vote(state, bare).signature)


def _ask_for_votes(state: RoundState, proposal: m.Proposal, but: Iterable[PeerId] = ()) -> None:
    """Send a proposal also to peers of the committee that are given up: one that is back says so by its answer."""
    state.tell((*state.committee, *state.terms.voting.voters_on(proposal.record)), proposal, but)


def _elect(state: RoundState, leading: Ballot, now: float) -> None:
    commit = leading.elect()
    if commit is not None:
        learner.broadcast_commit(state, commit)
        learner.set_decided(state, state.me, commit, now)


def _resend(state: RoundState, leading: Ballot, now: float) -> None:
    if now - leading.sent_at < RESEND_AFTER:
        return
    leading.sent_at = now
    if leading.proposal is not None:
        _ask_for_votes(state, leading.proposal, but=leading.votes)
    elif leading.planned is not None:
        state.broadcast(leading.planned.plan)
    elif leading.ballot > 0:
        _ask_for_promises(state, leading)


def _ask_for_promises(state: RoundState, leading: Ballot) -> None:
    """Ask the peers that have not answered; with the answers of others, as two that ask are followed at once."""
    shown = leading.shown([peer for peer in state.committee if peer != state.me])[:SHOWN_TO_ASK]
    prepare = m.Prepare(state.head.epoch, state.head.round + 1, leading.ballot, shown)
    state.broadcast(prepare, but=leading.promises)


def take_promise(state: RoundState, sender: PeerId, promise: m.Promise) -> None:
    """Count a promise if it answers the ballot that we lead. Raises PayloadError when it accepted what nobody may."""
    leading = state.leading
    if leading is None or promise.ballot < leading.ballot:
        return
    check_promise(sender, promise, state.head.run, state.leader_of)
    if promise.accepted is not None:
        if not continues_chain(state, promise.accepted, sender):
            return
        check_acceptable(state, promise.accepted)
    _note_answer(state, leading, sender)
    if promise.ballot > leading.ballot:  # it votes for nothing of this ballot, and tells what may have been chosen
        leading.overtaken[sender] = promise
        return
    first = leading.promises.keys() <= {state.me}
    leading.promises[sender] = promise
    if first and sender in state.committee:
        _ask_for_promises(state, leading)


def take_vote(state: RoundState, sender: PeerId, vote: m.Vote) -> None:
    """Count a vote. Raises PayloadError when it is for another record or not signed by its sender."""
    leading = state.leading
    if leading is None or leading.proposal is None or vote.ballot != leading.ballot:
        return
    record = leading.proposal.record
    text = m.vote_text(record.run, record.epoch, record.round, vote.ballot, record.hash)
    if vote.record != record.hash or not verify(sender, vote.signature, text):
        raise PayloadError(f"vote in round {vote.round} is for another record or not signed by its sender; drop it")
    _note_answer(state, leading, sender)
    leading.votes[sender] = vote.signature


def take_missing(state: RoundState, sender: PeerId, missing: m.Missing) -> None:
    """Note an owner's complaint about the plan that is being carried out."""
    leading = state.leading
    if leading is not None and leading.planned is not None:
        leading.planned.blame(sender, missing.plan, missing.peers)


def _note_answer(state: RoundState, leading: Ballot, peer: PeerId) -> None:
    """Note that a peer that answers a ballot opened after its farewell is back: it said that it would vote no more.

    Else nothing tells in the same round, as its messages may come in any order; and the frames of a record that
    only it holds would be asked of nobody.
    """
    if peer not in leading.parted:
        learner.note_back(state, peer)
