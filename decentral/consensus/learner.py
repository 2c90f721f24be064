"""The learner's part of a round: which record was chosen, who is told of it, which peers are here, what they offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decentral.consensus.acceptance import check_acceptable, check_timely, continues_chain, takes_commit
from decentral.consensus.chain import Head, check_turn, contributions, removals
from decentral.consensus.paxos import check_farewell
from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER, CatchUpWith, Decide, RoundState
from decentral.consensus.voter import ballot_in_charge, has_all_frames
from decentral.errors import PayloadError
from decentral.wire.keys import PeerId, peer_name, verify
from decentral.wire.messages import MAX_PEERS, Behind, Commit, Farewell, JoinRequest, Offer, join_text

# ---- a record that was chosen ----
#
# A record that a majority voted for is decided, once every frame that it names is here.

PUT_BACK_AFTER = 12.0  # s, beside what its frames need: four requests to all who may have them
MOST_PUT_BACK = 16  # of one round: more than one that a majority signed is somebody's invention


def take_commit(state: RoundState, sender: PeerId, commit: Commit, now: float) -> None:
    """Take a commit that another peer sent. Raises PayloadError unless a majority signed it."""
    record = commit.record
    if record.round <= state.head.round or state.decided is not None:
        return
    if record.round > state.head.round + 1:
        state.effects.append(CatchUpWith(sender))
        return
    if record.hash in state.put_back or not continues_chain(state, record, sender):
        return
    check_turn(record, state.terms.num_fragments)
    state.terms.voting.check_certified(commit)
    if takes_commit(state, commit):
        set_decided(state, sender, commit, now)
        _pass_on(state, sender, commit)


def set_decided(state: RoundState, told_by: PeerId, commit: Commit, now: float) -> None:
    """Note a commit as the one to be applied once every frame that it names is here, and since when it is known."""
    state.decided, state.decided_since = (told_by, commit), now


def count_farewells(state: RoundState, now: float) -> None:
    """Decide on a record that peers may have chosen before they left, once every named frame is here."""
    commit = state.farewells.elect(state.acceptor, state.signer)
    if commit is None:
        return
    told = commit.certificate.votes[0][0]
    if continues_chain(state, commit.record, told) and has_all_frames(state, commit.record, told, now):
        _broadcast_found(state, commit)
        set_decided(state, told, commit, now)


def finish(state: RoundState, now: float) -> bool:
    """Decide once every named frame is here: a commit is never applied by half. Tell whether it was done."""
    _take_up_again(state)
    if state.decided is None or state.head.anchor is None:
        return False
    sender, commit = state.decided
    if not continues_chain(state, commit.record, sender):
        state.decided = None
        return False
    if not has_all_frames(state, commit.record, sender, now):
        _put_back(state, now)
        return False
    state.effects.append(Decide(commit, state.decided_since))
    _keep_commit(state, commit)
    _note_commit(state, commit)
    # Nothing more is decided before this is applied, whether it moves the anchor or not: two Decide in one list of
    # effects were carried out in the wrong order when the first one's ``note_applied`` led to a third.
    state.restart(replace(state.head.extended(commit.record), anchor=None), now)
    state.history.add(state.head)
    return True


def _put_back(state: RoundState, now: float) -> None:
    """Put a commit back whose frames nobody gives: a record that named a frame which is nowhere stalled a run for ever,
    without a word. It is taken up again when they are here.
    """
    assert state.decided is not None
    if now - state.decided_since > PUT_BACK_AFTER + 2 * state.allowed():
        told_by, commit = state.decided
        state.decided = None
        if len(state.put_back) < MOST_PUT_BACK:
            state.put_back[commit.record.hash] = told_by, commit, state.decided_since


def _take_up_again(state: RoundState) -> None:
    if state.decided is not None:
        return
    for told_by, commit, since in state.put_back.values():
        if all(ref.frame in state.held for ref in commit.record.frames):
            set_decided(state, told_by, commit, since)
            return


# ---- commits on their way to everybody ----
#
# They come from their leader in a small swarm, by way of those who voted for them in a large one.
#
# A commit names a frame of every member, so one peer that sent it to all would send the square of their number, and
# all would wait for its uplink. Beyond a committee's size the leader tells the voters whose votes the commit carries,
# and each of those tells its share of the others. Which is whose share everybody reads in the commit. A share whose
# voter has died meanwhile asks, as whoever missed a commit does: it repeats its offer after three seconds.


def broadcast_commit(state: RoundState, commit: Commit) -> None:
    """Send everybody a commit that was decided here."""
    relays = _relays(state, commit)
    if not relays:
        state.tell((*state.head.members, *state.joiners), commit)
        return
    silent = [peer for peer in relays if peer == state.me or not state.presence.present(peer)]
    instead = [peer for relay in silent for peer in relay_shares(commit, relays)[relay]]
    state.tell((*relays, *instead, *state.joiners), commit)


def _broadcast_found(state: RoundState, commit: Commit) -> None:
    """Send everybody a commit that farewells have shown, as everybody finds by itself: of a large swarm only the
    committee.
    """
    committee = state.committee
    if state.me in committee or len(committee) == len(state.head.members):
        broadcast_commit(state, commit)


def _pass_on(state: RoundState, sender: PeerId, commit: Commit) -> None:
    """Send a commit that came from its leader on to this peer's share of the members."""
    relays = _relays(state, commit)
    if state.me in relays and sender == state.leader_of(commit.certificate.ballot):
        state.tell(relay_shares(commit, relays)[state.me], commit)


def _relays(state: RoundState, commit: Commit) -> tuple[PeerId, ...]:
    """Return the peers that pass a commit on, which are its voters; nobody where the leader tells everybody."""
    few = len(commit.record.members) <= state.terms.voting.seats
    return () if few else tuple(peer for peer, _ in commit.certificate.votes)


def relay_shares(commit: Commit, relays: tuple[PeerId, ...]) -> dict[PeerId, tuple[PeerId, ...]]:
    """Return the members that each of ``relays`` passes a commit on to: all others, each once."""
    others = tuple(peer for peer in commit.record.members if peer not in relays)
    return {relay: others[number :: len(relays)] for number, relay in enumerate(relays)}


# ---- commits that are kept ----
#
# They are kept for peers that missed them, or compare branches.

RECENT = 256  # commits: 0.9 MB with 16 members


def _keep_commit(state: RoundState, commit: Commit) -> None:
    recent = state.recent
    recent[commit.record.round] = commit
    while len(recent) > RECENT:
        recent.popitem(last=False)


def find_oldest_head(state: RoundState) -> Head:
    """Return the oldest head from which every commit is kept; the newest where none is."""
    oldest = state.head
    while (commit := state.recent.get(oldest.round)) is not None:
        before = state.history.at((oldest.round - 1, commit.record.previous))
        if before is None:
            break
        oldest = replace(before, anchor=commit.record.base)
    return oldest


def remember_before(state: RoundState, start: Head, heads: Sequence[Head], commits: Sequence[Commit]) -> None:
    """Take up the way that led to where memory begins: from ``start``, with the commits that made ``heads``, of
    which the last is that place.
    """
    for head in reversed((start, *heads[:-1])):
        state.history.add_before(head)
    for commit in reversed(commits):
        if len(state.recent) < RECENT:
            state.recent[commit.record.round] = commit
            state.recent.move_to_end(commit.record.round, last=False)


# ---- peers that come, leave and are behind ----
#
# They say so themselves, and commits tell of them.


def take_join(state: RoundState, sender: PeerId, request: JoinRequest, now: float) -> None:
    """Take a newcomer's request to be let in, or a member's word that it stays, and where it stands."""
    note_back(state, sender)
    if sender not in state.head.members:
        if not verify(sender, request.signature, join_text(state.head.run, request.round, request.digest)):
            raise PayloadError(f"request to join by {peer_name(sender)} that it did not sign; drop it")
        state.joiners.pop(sender, None)
        state.joiners[sender] = request
        if len(state.joiners) > MAX_PEERS:  # who is there asks again
            del state.joiners[next(iter(state.joiners))]
    elif request.round < state.head.round and not has_crossed(state, request.round + 1, now):
        help_laggard(state, sender, request.round)


def take_farewell(state: RoundState, sender: PeerId, farewell: Farewell) -> None:
    """Take the farewell of a member that leaves. Raises PayloadError when its vote is not signed by it, or is for what
    nobody may accept.
    """
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
            check_acceptable(state, farewell.accepted)
        state.farewells.take(sender, farewell)
    state.presence.leaving.add(sender)
    state.joiners.pop(sender, None)
    if state.leading is not None:
        state.leading.parted.add(sender)


def note_active(state: RoundState, peer: PeerId, round_: int) -> None:
    """Note that ``peer`` offered or voted in a round: what it said of its leaving before is void."""
    state.last_active[peer] = max(round_, state.last_active.get(peer, 0))


def note_back(state: RoundState, peer: PeerId) -> None:
    """Note that ``peer`` spoke after its farewell: whoever shows it from now on shows what is void."""
    if peer in state.head.members:
        state.came_back_in[peer] = state.head.round + 1
    state.presence.leaving.discard(peer)
    state.farewells.forget(peer)


def take_behind(state: RoundState, sender: PeerId, message: Behind) -> None:
    """Take a member's word how far it is, and that we are not."""
    if sender in state.head.members:
        state.stands_at[sender] = message.round
    if message.round > state.head.round:
        state.effects.append(CatchUpWith(sender))


def help_laggard(state: RoundState, peer: PeerId, stands_at: int) -> None:
    """Send the commit that ``peer`` missed, or tell it how far the chain is."""
    commit = state.recent.get(stands_at + 1)
    alone = commit is not None and stands_at + 1 == state.head.round
    state.send(peer, commit if commit is not None and alone else Behind(state.head.round))


def has_crossed(state: RoundState, round_: int, now: float) -> bool:
    """Tell whether a message about ``round_`` was on its way when that round's commit was: its sender gets it anyway.

    A leader would send half of all peers the commit twice, for the votes that a majority did not need, and a late
    offer or a request to join would bring its sender the commit from every member: N times 190 N bytes.
    """
    return round_ == state.head.round and now - state.round.opened < FETCH_AFTER


def _note_commit(state: RoundState, commit: Commit) -> None:
    """Note all that a commit tells of the peers that are here."""
    record = commit.record
    _note_who_never_sent(state, record.round)
    note_who_was_active(state, commit)
    _note_who_is_back(state, commit)
    _note_shrink(state, commit)
    state.presence.leaving &= set(record.next_members)
    state.farewells.keep(record.next_members)
    for peer in record.next_members:
        state.joiners.pop(peer, None)


def _note_who_never_sent(state: RoundState, round_: int) -> None:
    for peer, offer in state.round.offers.items():
        if offer.frame not in state.held:
            state.unsent.note_absence(peer, round_)


def note_who_was_active(state: RoundState, commit: Commit) -> None:
    """Note that the contributors and voters of a commit had not left when it was decided."""
    record = commit.record
    for peer in (*(ref.peer for ref in contributions(record)), *(peer for peer, _ in commit.certificate.votes)):
        note_active(state, peer, record.round)
    state.last_active = {peer: round_ for peer, round_ in state.last_active.items() if peer in record.next_members}
    state.came_back_in = {p: round_ for p, round_ in state.came_back_in.items() if p in record.next_members}


def _note_who_is_back(state: RoundState, commit: Commit) -> None:
    """Note that a peer that voted in a round after its farewell came back, though nothing it sent came here.

    A peer that was told so by a commit alone counted the old farewell as a promise, was all that was left, and forked.
    """
    for peer, _ in commit.certificate.votes:
        if state.farewells.since(peer) < commit.record.round:
            note_back(state, peer)


def _note_shrink(state: RoundState, commit: Commit) -> None:
    """Remember whom a record gives up although no majority is left: they may live on, and fork the chain."""
    record = commit.record
    silent = removals(record) - state.presence.leaving
    shrinks = state.terms.voting.drops_majority(record)
    state.given_up = (state.given_up | (silent if shrinks else set())) - set(record.next_members)


# ---- offers, our own and those of the others ----
#
# Our own is told to whoever may lead, and repeated to whoever does.
#
# In a small swarm everybody may lead. In a large one the committee does, which tells its own offers to all: whoever
# has the first of them knows that it must hurry, and how long others take.


def make_offer(state: RoundState, offer: Offer, now: float) -> bool:
    """Offer this peer's contribution to those who need to know; False when the offer is for another round than the one
    in progress.

    Raises PayloadError for one that the others would refuse.
    """
    if (offer.epoch, offer.round) != (state.head.epoch, state.head.round + 1):
        return False
    take_offer(state, state.me, offer, now)
    state.offer_told_at = now
    state.tell(state.offerers, offer)
    return True


def take_offer(state: RoundState, sender: PeerId, offer: Offer, now: float) -> None:
    """Book an offer. Raises PayloadError when it cannot be meant for this round."""
    if offer.fragment != state.head.fragment(state.terms.num_fragments):
        raise PayloadError(f"offer for fragment {offer.fragment} in round {offer.round}: not its turn; drop it")
    if offer.nbytes > state.terms.largest:
        raise PayloadError(f"offer of {offer.nbytes} bytes, {state.terms.largest} are possible here; drop it")
    check_timely(state, (offer,))
    note_active(state, sender, offer.round)
    if state.farewells.since(sender) < offer.round:  # one of the same round may be older than the farewell
        note_back(state, sender)  # to drop it would find no votes
    new = state.round.add(sender, offer, now)
    if new and offer.based == state.head.outer_step and sender not in state.head.newcomers:
        state.paces.observe(sender, offer.steps, state.round.opened, now)


def repeat_offer(state: RoundState, now: float) -> None:
    """Tell whoever leads now of our offer again: it or its answer may have been lost."""
    offer = state.round.offers.get(state.me)
    if offer is None or now - state.offer_told_at < RESEND_AFTER:
        return
    state.offer_told_at = now
    ballot = ballot_in_charge(state, now)
    leader = None if ballot is None else state.leader_of(ballot)
    if leader is not None and leader != state.me:
        state.send(leader, offer)


def time_left(state: RoundState, now: float) -> float | None:
    """Return the seconds in which this peer should offer what it has rather than come late; None while nothing presses.

    Only a full contribution presses: else everybody could hurry everybody, and nobody make all inner steps.
    """
    seen = state.round
    waits = state.head.anchor is not None and not state.head.final and state.expects(state.me)
    full = any(offer.steps >= state.terms.steps for offer in seen.offers.values())
    if not waits or seen.first_offer is None or state.me in seen.offers or not full:
        return None
    return state.deadline.early_at(seen.opened, seen.first_offer) - now


def full_times(state: RoundState) -> tuple[float, ...]:
    """Return the seconds that other members take for a full contribution, where they are there and known."""
    others = (peer for peer in state.head.members if peer != state.me and state.presence.present(peer))
    return state.paces.full_times(others)
