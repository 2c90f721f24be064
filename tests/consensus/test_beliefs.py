"""What a peer believes of what others say: which branch counts, what was accepted, who is away, who asked."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from decentral.consensus import chain, learner
from decentral.consensus.acceptance import find_objections
from decentral.consensus.chain import Voting, is_refuted, majority, rank_of
from decentral.consensus.paxos import Acceptor, Ballot, Planned, Refusals, farewell, promise, results_of
from decentral.consensus.round_state import Send
from decentral.errors import PayloadError
from decentral.wire import messages as m
from tests.kit.machines import (
    START,
    A,
    B,
    C,
    digest_of,
    finish_round,
    join_request,
    proposal_of,
    record,
    ref,
    signer_of,
    vote_of,
)

# ---- which of two branches ----


def branch(*steps: tuple[dict[bytes, int], tuple[bytes, ...]]) -> list[chain.Head]:
    """Heads from START on, by what each record gives and whom it keeps."""
    heads = [START]
    for tokens, members in steps:
        heads.append(heads[-1].extended(record(heads[-1], tokens, members)))
    return heads


def test_a_record_of_the_majority_goes_before_that_of_the_few_however_heavy_they_become():
    few = branch(({A: 10**6}, (A,)), *[({A: 10**6}, (A,))] * 50)
    many = branch(({B: 1}, (A, B, C)))
    assert few[-1].weight > many[-1].weight
    assert rank_of(many, Voting()) > rank_of(few, Voting())


def test_of_two_sides_of_few_the_heavier_wins_and_of_two_of_the_majority_too():
    for members in ((A,), (A, B, C)):
        light, heavy = branch(({A: 1}, members)), branch(({A: 1}, members), ({A: 1}, members))
        other = branch(({A: 2}, (B,) if len(members) == 1 else members))
        assert rank_of(heavy, Voting()) > rank_of(light, Voting())
        assert len({rank_of(light, Voting()), rank_of(other, Voting())}) == 2


def test_the_order_of_branches_is_total_and_rises_with_every_record():
    """With the weight of the tip alone in the place of ranks, three branches could each beat another: a side of few
    that gave up a majority once more, one that did not, and a third that parted before both.
    """
    draws = random.Random(0)
    ways = [[START]]
    for _ in range(300):
        way = draws.choice(ways)
        head = way[-1]
        keep = tuple(sorted(draws.sample(head.members, draws.randint(1, len(head.members)))))
        made = record(head, {draws.choice(head.members): draws.randint(1, 50)}, keep)
        ways.append([*way, head.extended(replace(made, plan=draws.randint(0, 9)))])
        assert rank_of(ways[-1], Voting()) > rank_of(way, Voting())
    for one, two, three in itertools.islice(itertools.permutations(draws.sample(ways, 25), 3), 5000):
        ranks = [pairwise_rank(a, b) for a, b in ((one, two), (two, three), (three, one))]
        assert ranks not in ([True] * 3, [False] * 3) or one[-1] in (two[-1], three[-1])


def pairwise_rank(one: list[chain.Head], two: list[chain.Head]) -> bool:
    """Whether the first wins, as peers compare them: from the newest head that both went through."""
    shared = max(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a == b)
    return rank_of(one[shared:], Voting()) > rank_of(two[shared:], Voting())


# ---- what was accepted ----


def told(number: int, ballot: int, accepted: m.Record | None, in_ballot: int = 1) -> m.Promise:
    acceptor = Acceptor(1, ballot, -1 if accepted is None else in_ballot, accepted)
    return promise(acceptor, START.run, 0, ballot, signer_of(number))


def test_a_refuted_record_of_the_highest_ballot_leads_to_the_next_highest_and_not_to_freedom():
    members = tuple(sorted(signer_of(n).peer for n in range(4)))
    head = replace(START, members=members)
    low, high = (replace(record(head, {members[0]: n}, members)) for n in (1, 2))
    ballot = Ballot(9, Voting())
    ballot.promises = {
        signer_of(0).peer: told(0, 9, high, 5),
        signer_of(1).peer: told(1, 9, low, 0),
        signer_of(2).peer: told(2, 9, low, 0),
        signer_of(3).peer: told(3, 9, None),
    }
    assert ballot.bound_value(Acceptor(1)) == (0, low)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 21])
def test_a_record_is_refuted_by_one_more_than_it_takes_where_one_may_lie(n):
    voters = [signer_of(i).peer for i in range(n)]
    most = n - majority(voters) + 1 + (n >= 4)
    assert is_refuted(voters, most)
    assert not is_refuted(voters, most - 1)


def ready_leader(swarm):
    """A machine that leads a later ballot and has no promise but its own."""
    first, leader, liar, *_ = swarm.leaders()
    swarm.kill(first)
    swarm.lose = lambda sender, to, message: isinstance(message, m.Promise)
    swarm.offer_all()
    assert swarm.run(lambda: swarm.machine(leader).state.leading is not None)
    return swarm.machine(leader), leader, liar, first


@pytest.mark.parametrize("proposer", ["nobody", "the liar"])
def test_a_promise_of_a_record_that_its_ballots_leader_did_not_propose_is_refused(make_swarm, proposer):
    swarm = make_swarm(4)
    machine, leader, liar, _ = ready_leader(swarm)
    head, ballot = machine.head, machine.state.leading.ballot
    made = replace(record(head, {}, head.members), members=head.members, frames=())
    proposed = bytes(64) if proposer == "nobody" else vote_of(swarm.signer(liar), 0, made)
    false = promise(Acceptor(1, ballot, 0, made, proposed), head.run, head.epoch, ballot, swarm.signer(liar))
    with pytest.raises(PayloadError, match="whose leader did not sign it"):
        machine.receive(liar, false, swarm.now)
    assert set(machine.state.leading.promises) == {leader}


def test_a_promise_that_another_peer_signed_is_refused(make_swarm):
    swarm = make_swarm(4)
    machine, _, liar, first = ready_leader(swarm)
    head, ballot = machine.head, machine.state.leading.ballot
    said = promise(Acceptor(1, ballot), head.run, head.epoch, ballot, swarm.signer(first))
    with pytest.raises(PayloadError, match="not signed by its sender"):
        machine.receive(liar, said, swarm.now)


def test_a_proposal_that_its_leader_did_not_sign_gets_no_vote(make_swarm):
    swarm = make_swarm(3)
    leader, voter, other = swarm.leaders()
    machine = swarm.machine(voter)
    made = replace(record(machine.head, {}, swarm.members), members=swarm.members, base=machine.head.anchor)
    with pytest.raises(PayloadError, match="did not sign it"):
        machine.receive(leader, m.Proposal(0, made, vote_of(swarm.signer(other), 0, made)), swarm.now)
    machine.receive(leader, proposal_of(swarm.signer(leader), 0, made), swarm.now)
    assert machine.state.acceptor.accepted == made


def test_an_acceptor_file_of_before_signatures_is_read():
    made = record(START, {A: 1})
    older = b"".join((number.to_bytes(8, "little", signed=True)) for number in (1, 3, 2)) + m.encode_record(made)
    assert Acceptor.from_bytes(older) == Acceptor(1, 3, 2, made)
    now = Acceptor(1, 3, 2, made, bytes(range(64)))
    assert Acceptor.from_bytes(now.to_bytes()) == now


def test_a_commit_in_a_journal_of_before_farewells_is_read():
    made = record(START, {A: 1})
    commit = m.Commit(made, m.Certificate(0, ((A, bytes(64)),)))
    older = bytes((8, 2)) + m.encode(commit)[2:-4]
    assert m.decode_kept(older) == commit
    assert m.decode_kept(m.encode(commit)) == commit


# ---- whose turn it is ----


def test_a_prepare_waits_for_its_turn_and_one_that_another_backs_does_not(make_swarm):
    for shown in (False, True):
        swarm = make_swarm(4)
        leaders = swarm.leaders()
        voter, liar, backer = (swarm.machine(leaders[0]), leaders[1], leaders[2])
        backing = promise(Acceptor(1, 1), START.run, 0, 1, swarm.signer(backer))
        statement = m.Shown(backer, 0, 1, -1, bytes(32), backing.signature)
        voter.receive(liar, m.Prepare(0, 1, 1, (statement,) if shown else ()), 0.0)
        assert voter.state.acceptor.promised == (1 if shown else 0)


def test_a_prepare_that_shows_promises_of_another_round_waits_for_its_turn(make_swarm):
    """A promise for a ballot, once given, would back every later question for that ballot, in any round."""
    swarm = make_swarm(4)
    assert finish_round(swarm)
    order = swarm.leaders()
    voter, liar, backer = (swarm.machine(order[0]), order[1], order[2])
    given = promise(Acceptor(1, 1), START.run, 0, 1, swarm.signer(backer))
    old = m.Shown(backer, 0, 1, -1, bytes(32), given.signature)
    voter.receive(liar, m.Prepare(0, 2, 1, (old,)), swarm.now)
    assert voter.state.acceptor.promised == 0


def test_a_voter_of_a_higher_ballot_shows_its_promise_to_the_leader_of_a_lower_one(make_swarm):
    """It votes for nothing there, but its word may be what shows that a lone record was not chosen."""
    swarm = make_swarm(3)
    order = swarm.leaders()
    ahead, leader = swarm.machine(order[0]), order[1]
    ahead.state.persist(Acceptor(1, 6))
    effects = ahead.receive(leader, m.Prepare(0, 1, 1), 0.2)
    (shown,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.Promise)]
    assert (shown.ballot, shown.accepted_ballot) == (6, -1)
    made = Ballot(1, Voting(), promises={leader: promise(Acceptor(1, 1, 0), START.run, 0, 1, swarm.signer(leader))})
    voters = tuple(sorted(order))
    assert not made.is_prepared(voters, 2)
    made.overtaken[order[0]] = shown
    assert made.is_prepared(voters, 2)
    assert order[0] not in made.votes


# ---- who comes back ----


def test_who_comes_back_votes_when_all_members_have_answered_or_after_a_lease(make_swarm):
    swarm = make_swarm(3)
    me, one, other = swarm.members
    machine = swarm.machine(me)
    machine.listen_first(0.0, excused=False)
    machine.state.returning.note_answer(one)
    machine.tick(1.0)
    assert not machine.state.may_vote
    machine.state.returning.note_answer(other)
    machine.tick(2.0)
    assert machine.state.may_vote
    machine.listen_first(2.0, excused=False)
    machine.tick(2.0 + swarm.terms.lease - 0.1)
    assert not machine.state.may_vote
    machine.tick(2.0 + swarm.terms.lease)
    assert machine.state.may_vote


def alone(swarm, peer: bytes, head: chain.Head | None = None, final: bool = False) -> m.Commit:
    """A record that drops all others, by the one vote that counts for it."""
    head = head or swarm.genesis()
    made = replace(record(head, {}, (peer,)), members=head.members, base=head.anchor, final=final)
    return m.Commit(made, m.Certificate(0, ((peer, vote_of(swarm.signer(peer), 0, made)),)))


def is_away(machine, other, loner):
    machine.listen_first(0.0, excused=True)


def is_there(machine, other, loner):
    machine.listen_first(0.0, excused=False)


def gave_up_the_others(machine, other, loner):
    machine.liveness(frozenset({other}), frozenset({other}), 0.0, missed=frozenset({other}))


def is_no_member(machine, other, loner, *here):
    """It has no chain of its own to go on with; but a newcomer was taken to the end of its run by one vote."""
    machine.state.head = replace(machine.head, members=tuple(sorted((other, loner))))
    machine.liveness(frozenset(), frozenset(), 0.0, known=frozenset({loner, *here}))


def is_no_member_beside_another(machine, other, loner):
    is_no_member(machine, other, loner, other)


def voted_where_it_stands(machine, other, loner):
    machine.state.remembered = Acceptor(1)


def voted_later(machine, other, loner):
    """In rounds that its disk forgot, in which it cannot know whom it gave up: five met, and two that had lost rounds
    held on to others for ever.
    """
    machine.state.remembered = Acceptor(3)


@pytest.mark.parametrize(
    ("situation", "final", "taken"),
    [
        (is_away, False, True),
        (is_there, False, False),
        (gave_up_the_others, False, True),
        (gave_up_the_others, True, False),  # that no such record ends the run before its terms do
        (is_no_member, False, True),
        (is_no_member_beside_another, False, False),
        (voted_later, False, True),
        (voted_where_it_stands, False, False),
    ],
)
def test_one_vote_that_drops_all_others_is_taken_by_who_cannot_know_better_and_by_nobody_else(
    make_swarm, situation, final, taken
):
    swarm = make_swarm(3)
    me, other, loner = swarm.members
    machine = swarm.machine(me)
    situation(machine, other, loner)
    machine.receive(loner, alone(swarm, loner, machine.head, final), 0.0)
    assert (machine.head.round == 1) is taken


@pytest.mark.parametrize("since", ["nothing", "an offer", "it came back in the same round"])
def test_a_farewell_that_a_commit_shows_counts_until_its_peer_offers_again(make_swarm, since):
    swarm = make_swarm(3)
    me, left, loner = swarm.members
    machine = swarm.machine(me)
    said = farewell(Acceptor(1), START.run, 0, swarm.signer(left))
    shown = m.Shown(left, 0, 1, -1, bytes(32), said.signature)
    if since == "an offer":
        learner.note_active(machine.state, left, 2)
    if since == "it came back in the same round":
        learner.note_back(machine.state, left)
    machine.receive(loner, replace(alone(swarm, loner), farewells=(shown,)), 0.0)
    assert machine.head.round == (1 if since == "nothing" else 0)


# ---- what is refused ----


def test_one_refusal_stops_nothing_and_so_many_that_no_majority_is_left_end_the_ballot():
    made = record(START, {A: 1}, (A, B))
    refusals = Refusals()
    said = m.Refusal(0, 1, 0, made.hash, (C,), False)
    refusals.take(C, said)
    assert not refusals.end(0, made, (A, B, C), 0.0, 20.0)
    assert not refusals.disputed(0.0)
    refusals.take(B, replace(said, record=bytes(32)))
    assert not refusals.end(0, made, (A, B, C), 0.0, 20.0), "that was of another record"
    refusals.take(B, said)
    assert refusals.end(0, made, (A, B, C), 0.0, 20.0)
    assert refusals.disputed(19.0) == {C}
    assert not refusals.disputed(20.0)


def test_a_member_that_is_heard_is_not_dropped_because_the_leader_says_so(make_swarm):
    swarm = make_swarm(3)
    leader, _, other = swarm.leaders()
    swarm.machine(leader).liveness(frozenset({other}), frozenset(), 0.0)
    assert finish_round(swarm, 2)
    assert all(other in host.machine.head.members for host in swarm.hosts.values())


def test_newcomers_of_whom_nobody_has_heard_are_let_in_one_at_a_time(make_swarm):
    swarm = make_swarm(3)
    machine = swarm.machine(swarm.members[0])
    invented = [signer_of(500 + n) for n in range(3)]
    for count in (1, 2, 3):
        joined = invented[:count]
        made = replace(
            record(machine.head, {}, tuple(sorted([*swarm.members, *(one.peer for one in joined)]))),
            members=swarm.members,
            base=machine.head.anchor,
        )
        asked = tuple(
            sorted((m.Asked(s.peer, 0, START.hash, join_request(s, 0, START.hash).signature) for s in joined), key=peer)
        )
        wrong, _ = find_objections(machine.state, m.Proposal(0, made, bytes(64), requests=asked))
        assert wrong == (frozenset() if count == 1 else {one.peer for one in joined})
        bare, _ = find_objections(machine.state, m.Proposal(0, made, bytes(64)))
        assert bare == {one.peer for one in joined}, "nobody shows that they asked"


def peer(asked: m.Asked) -> bytes:
    return asked.peer


def test_the_run_ends_when_its_terms_say_so_and_not_before(make_swarm):
    swarm = make_swarm(3, rounds=2)
    machine = swarm.machine(swarm.members[0])
    given = {"members": swarm.members, "base": machine.head.anchor, "next_members": swarm.members}
    first = replace(record(machine.head, {}), **given, frames=(ref(swarm.members[0], digest_of("f")),))
    for outer_step, final, right in ((0, False, True), (0, True, False), (1, True, True), (1, False, False)):
        made = replace(first, outer_step=outer_step, final=final)
        assert find_objections(machine.state, m.Proposal(0, made, bytes(64)))[1] is not right
    clock = swarm.terms.clock
    clock.minutes = 10.0
    for age, right in ((0.0, False), (585.0, False), (591.0, True)):
        clock.tell(age)
        assert find_objections(machine.state, m.Proposal(0, replace(first, final=True), bytes(64)))[1] is not right


def test_an_owner_that_blames_everybody_leaves_alone_and_of_one_complaint_the_contributor_does():
    named = tuple(ref(peer, digest_of(peer)) for peer in (A, B, C))
    plan = m.ReducePlan(0, 1, 0, 7, named, ((A, 0, 8), (B, 8, 16)))
    one, all_others = Planned(plan, 0.0), Planned(plan, 0.0)
    one.blame(C, 7, (A, B))  # it owns nothing
    one.blame(A, 6, (B, C))  # that was of the plan before
    assert one.blamed == frozenset()
    one.blame(A, 7, (B,))
    assert one.blamed == {B}
    all_others.blame(A, 7, (A, B, C))
    assert all_others.blamed == {A}
    all_others.blame(B, 7, (A,))
    assert all_others.blamed == {A}


def test_a_result_of_who_does_not_own_the_range_is_none_of_the_plan_and_its_owners_still_counts():
    """A leader that took it had a record that cannot be written, and ended: one frame of any member did that."""
    plan = m.ReducePlan(0, 1, 0, 7, (ref(A, digest_of("a")),), ((A, 0, 8), (B, 8, 16)))
    by_a, by_b, by_c = (ref(peer, digest_of(peer)) for peer in (A, B, C))
    held = {(7, 0, A): by_a, (7, 1, C): replace(by_c, part=1)}
    assert results_of(plan, held) is None
    held[7, 1, B] = replace(by_b, part=1)
    assert results_of(plan, held) == (by_a, replace(by_b, part=1))
