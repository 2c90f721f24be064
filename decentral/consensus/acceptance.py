"""The judgement of one peer: which records it votes for, which commits it takes, what nobody of this run accepts.

A majority's votes make a commit binding, and who is a member follows from records. So one record could drop all who
would vote otherwise: this peer stands behind one only where it sees the reasons itself, or where they are shown signed.
Functions of the round's state, which ask the same of a proposal (`find_objections`), of a commit (`takes_commit`) and
of what a promise says was accepted (`check_acceptable`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from decentral.consensus.chain import (
    LENGTH,
    Place,
    check_age,
    check_succession,
    check_turn,
    contributions,
    is_refuted,
    majority,
    moves_anchor,
    removals,
)
from decentral.consensus.paxos import PLANS_PER_BALLOT, shows_farewell, shows_promise
from decentral.consensus.round_state import CatchUpWith, RoundState, claims_match
from decentral.consensus.timing import FIRST_REST
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import Digest, PeerId, peer_name, verify

MOST_UNKNOWN = 1  # newcomers that a record lets in of whom a voter has heard nothing

# ---- a record that others signed ----


def takes_commit(state: RoundState, commit: m.Commit) -> bool:
    """Tell whether a commit is learned as it was signed. One that gives up a majority is so only where this peer
    has given up those peers itself, holds their farewells, was away for so long that it cannot know, or voted in
    later rounds that its disk forgot, with whomever it gave up in them. A peer that is no member has no chain of its
    own to go on with, and takes a commit that drops nobody that is here. None ends the run before its terms do.

    Else one vote of one peer, which counts for a record that drops all the others, would end the run of them all.
    """
    record = commit.record
    if not state.terms.voting.drops_majority(record):
        return True
    if record.final and not _ends_as_agreed(state, record):
        return False
    was_away = state.returning is not None and state.returning.excused
    if was_away or state.forgetful or record.hash in state.followed:
        return True
    said = members_that_left(state, commit.farewells, record)
    return state.presence.may_drop(record, said) or (
        state.me not in state.head.members and not removals(record) - said & state.presence.known
    )


def note_followers(state: RoundState, commits: Sequence[m.Commit], places: Mapping[PeerId, Place]) -> None:
    """Remember the records whose dropped members stand on that chain themselves: nobody need hold on to those peers.

    ``places``: where the peers that are here stand.
    """
    if len(state.followed) > LENGTH:
        state.followed.clear()  # they cost one vote each to make up
    beyond = {(commit.record.round, commit.record.hash) for commit in commits}
    for commit in commits:
        record = commit.record
        voters = state.terms.voting.committee(record)
        there = {peer for peer, place in places.items() if place in beyond}
        left_behind = removals(record).intersection(voters) - there - state.presence.given_up() - {state.me}
        if state.terms.voting.drops_majority(record) and not left_behind:
            state.followed.add(record.hash)
        beyond.discard((record.round, record.hash))  # who stands there has not taken those after it


def members_that_left(state: RoundState, shown: Iterable[m.Shown], record: m.Record) -> frozenset[PeerId]:
    """Return the members that said farewell, as it is shown, and have neither offered nor voted since, nor come
    back.
    """
    timely = [one for one in shown if state.last_active.get(one.peer, 0) <= one.round <= record.round]
    return frozenset(
        one.peer
        for one in timely
        if state.came_back_in.get(one.peer, -1) < one.round and shows_farewell(one, record.run)
    )


# ---- a record that a leader proposes ----


def find_objections(state: RoundState, proposal: m.Proposal) -> tuple[frozenset[PeerId], bool]:
    """Name whom a proposed record drops or lets in without reason, or whose result cannot be a mean, as far as this
    peer can tell; and whether it ends the run without a reason, or does not although it should.
    """
    record = proposal.record
    said = members_that_left(state, proposal.farewells, record)
    wrong = state.presence.would_drop(record, said)
    if not state.presence.may_drop(record, said):
        wrong |= removals(record) - state.presence.given_up() - said
    overlong = state.terms.overlong(record) if record.partition else frozenset()
    state.rests.update(dict.fromkeys(overlong, record.round + FIRST_REST))
    wrong |= overlong
    joined = frozenset(record.next_members).difference(record.members)
    wrong |= joined - state.joiners.keys() - _shown_to_ask(state, proposal)
    return wrong, not _ends_as_agreed(state, record)


def _shown_to_ask(state: RoundState, proposal: m.Proposal) -> frozenset[PeerId]:
    """Return the newcomers whose signed requests the leader shows and whose lease is here; and one newcomer of whom
    nothing is here, for it may reach nobody but the leader. More would be as many as a leader cares to make up.
    """
    run, known = proposal.record.run, state.presence.known
    asked = {
        one.peer
        for one in proposal.requests
        if verify(one.peer, one.signature, m.join_text(run, one.round, one.digest))
    }
    unknown = asked - known - state.joiners.keys() - set(proposal.record.members)
    return frozenset(asked if len(unknown) <= MOST_UNKNOWN else asked & known)


def _ends_as_agreed(state: RoundState, record: m.Record) -> bool:
    by_rounds = moves_anchor(record) and record.outer_step + 1 >= state.terms.rounds
    if not record.final:
        return not by_rounds
    return by_rounds or (moves_anchor(record) and state.terms.clock.is_nearly_up)


def is_carried_on(state: RoundState, proposal: m.Proposal) -> bool:
    """Tell whether its leader shows that it is bound to the record: a majority has promised its ballot, so many of
    them have accepted the record that it may be chosen, and not only who proposed it says so.

    Then it is voted for as it stands. It may have been chosen when its changes were right, and a voter that asks
    again would find that whom it drops is back. The word of who proposed it, or of who made a result that is no
    mean, is enough where all others who might know better are given up.
    """
    record, run = proposal.record, proposal.record.run
    if not state.presence.may_drop(record, members_that_left(state, proposal.farewells, record)):
        return False  # of the few who are left each has to stand behind that
    voters = state.terms.voting.voters_on(record)
    shown = [one for one in proposal.promises if one.peer in voters and one.epoch == record.epoch]
    shown = [one for one in shown if one.round == record.round and shows_promise(one, run, proposal.ballot)]
    for_it = [one for one in shown if one.accepted == record.hash]
    if len(shown) < majority(voters) or is_refuted(voters, len(shown) - len(for_it)) or not for_it:
        return False
    if record.partition and (liars := state.terms.overlong(record)):
        answered = {one.peer for one in shown} | {state.me}
        alone = {one.peer for one in for_it} <= liars and not set(voters) - answered <= state.presence.given_up()
        if alone or _is_denied(state, record, voters, shown):
            return False
    if len(for_it) > 1 or state.leader_of(for_it[0].accepted_ballot) != for_it[0].peer:
        return True
    return set(voters) - {one.peer for one in shown} <= state.presence.given_up()


def _is_denied(state: RoundState, record: m.Record, voters: Sequence[PeerId], shown: Iterable[m.Shown]) -> bool:
    """Tell whether no majority can have accepted a record whose result is no mean, as this peer sees it: who made
    that is the liar, so that the others and this peer are taken at their word.
    """
    against = {one.peer for one in shown if one.accepted != record.hash}
    if state.acceptor.accepted != record:
        against.add(state.me)
    return len(voters) - len(against.intersection(voters)) < majority(voters)


# ---- what nobody of this run accepts ----


def continues_chain(state: RoundState, record: m.Record, sender: PeerId) -> bool:
    """Tell whether ``record`` continues our chain; if not, one of us is on another branch and the shell compares."""
    try:
        check_succession(state.head, record)
    except PayloadError:
        state.effects.append(CatchUpWith(sender))
        return False
    return True


def check_timely(state: RoundState, progress: Iterable[m.FrameRef | m.Offer]) -> None:
    """Raise PayloadError unless all of ``progress`` may be committed in this round, as every peer finds alike."""
    check_age(progress, state.head.outer_step, state.terms.max_staleness)


def check_acceptable(state: RoundState, record: m.Record) -> None:
    """Raise PayloadError for a record that no peer of this run accepts: nobody is bound by what one says it did."""
    check_age(contributions(record), record.outer_step, state.terms.max_staleness)
    check_turn(record, state.terms.num_fragments)
    for ref in record.frames:
        if ref.frame in state.held and not claims_match(state.held[ref.frame], ref):
            raise PayloadError(f"a record says of the frame of {peer_name(ref.peer)} what it did not sign; drop it")


def check_own(state: RoundState, contributors: Iterable[m.FrameRef]) -> None:
    """Raise PayloadError where this peer's contribution is said to be what it did not offer.

    Nobody is asked to believe this peer: votes of a majority that was told otherwise are binding all the same.
    """
    mine = state.round.offers.get(state.me)
    for ref in contributors:
        if mine is not None and ref.peer == state.me and ref.frame == mine.frame and not _as_offered(ref, mine):
            raise PayloadError("a record or plan says of this peer's contribution what it did not offer; drop it")


# ---- results of a reduce, as they were planned ----


def note_plan(state: RoundState, plan: m.ReducePlan) -> None:
    """Remember what results of ``plan`` are made for."""
    state.plans[plan.number] = _plan_digest(plan)


def is_as_planned(state: RoundState, record: m.Record) -> bool:
    """Tell whether the results that ``record`` names were made for its ranges and contributors, as far as is known
    here.

    With other ranges they could not be laid together once it is committed.
    """
    if not record.contributors or (known := state.plans.get(record.plan)) is None:
        return True
    ballot, parts = record.plan // PLANS_PER_BALLOT, (record.contributors, record.partition)
    return known == _plan_digest(m.ReducePlan(record.epoch, record.round, ballot, record.plan, *parts))


def _as_offered(ref: m.FrameRef, offer: m.Offer) -> bool:
    named = (ref.steps, ref.tokens, ref.based, ref.summary)
    return named == (offer.steps, offer.tokens, offer.based, offer.summary)


def _plan_digest(plan: m.ReducePlan) -> Digest:
    return hashlib.blake2b(m.encode(plan), digest_size=32).digest()
