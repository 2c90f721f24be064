"""A committee votes for many: how it is drawn, what it decides, how its word reaches everybody, and when it is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from decentral.consensus.chain import SEATS, VOTING, Head, Voting, majority
from decentral.consensus.learner import relay_shares
from decentral.errors import PayloadError
from decentral.wire import messages as m
from tests.kit.machines import RUN, digest_of, few_of, finish_round, signer_of

BOTH = pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])


def head_of(num_peers, epoch=0, first=0) -> Head:
    members = tuple(sorted(signer_of(number).peer for number in range(first, first + num_peers)))
    return Head(RUN, epoch, 7, 3, digest_of("head"), digest_of("anchor"), members)


def record_of(head, next_members) -> m.Record:
    fields = (head.run, head.epoch, head.round + 1, head.outer_step, 0, 0, head.hash, head.anchor, head.members)
    return m.Record(*fields, (), (), (), tuple(sorted(next_members)), False)


def signed(record, voters, ballot=0) -> m.Commit:
    text = m.vote_text(record.run, record.epoch, record.round, ballot, record.hash)
    signers = sorted((signer_of(number) for number in range(200)), key=lambda signer: signer.peer)
    votes = tuple((signer.peer, signer.sign(text)) for signer in signers if signer.peer in voters)
    return m.Commit(record, m.Certificate(ballot, votes))


# ---- the draw ----


def test_who_is_outside_asks_all_of_a_small_swarm_and_of_a_large_one_the_committee_or_all_if_it_is_gone():
    small, large = head_of(20), head_of(60)
    assert VOTING.let_in_by(small, small.members) == small.members
    committee = VOTING.committee(large)
    assert VOTING.let_in_by(large, large.members[::-1]) == list(committee)
    assert VOTING.let_in_by(large, large.members[:40]) == [peer for peer in committee if peer in large.members[:40]]
    others = [peer for peer in large.members if peer not in committee]
    assert VOTING.let_in_by(large, others) == others


def test_up_to_21_members_vote_all_of_them_and_beyond_21_of_them():
    assert SEATS == 21
    for num_peers in (1, 2, 20, 21):
        head = head_of(num_peers)
        assert VOTING.committee(head) == head.members
    for num_peers in (22, 64, 150):
        committee = VOTING.committee(head_of(num_peers))
        assert len(committee) == 21
        assert set(committee) < set(head_of(num_peers).members)
        assert list(committee) == sorted(committee)


def test_a_record_alone_tells_the_committee_that_votes_on_it_as_the_head_before_it_does():
    head = head_of(40, epoch=5)
    assert VOTING.committee(record_of(head, head.members)) == VOTING.committee(head)


def test_every_epoch_draws_anew_and_a_round_does_not():
    head = head_of(60)
    committees = {VOTING.committee(replace(head, epoch=epoch)) for epoch in range(50)}
    assert len(committees) == 50
    assert VOTING.committee(replace(head, round=8, hash=digest_of("next"), outer_step=4)) == VOTING.committee(head)


def test_all_members_are_drawn_equally_often():
    head = head_of(42)
    seats = Counter(peer for epoch in range(400) for peer in VOTING.committee(replace(head, epoch=epoch)))
    assert set(seats) == set(head.members)
    assert 160 <= min(seats.values()) <= max(seats.values()) <= 240, "200 each, and 4 standard deviations"


def test_one_more_member_draws_all_the_others_anew():
    """So nobody can look for a key that is drawn beside those that are drawn already."""
    members = head_of(60).members
    other = replace(head_of(60), members=tuple(sorted({*members, signer_of(199).peer})))
    common = set(VOTING.committee(head_of(60))) & set(VOTING.committee(other))
    assert len(common) < 15, "about 7 of 21 by chance, 20 if the draw stayed"


def test_a_committee_without_a_majority_is_followed_by_the_first_of_those_who_are_left():
    head, voting = head_of(30), Voting(5)
    committee = voting.committee(head)
    assert voting.voters(head, committee[:2]) == committee
    left = voting.voters(head, committee[:3])
    assert len(left) == 5
    assert set(committee[3:]) < set(left)
    assert not set(left) & set(committee[:3])
    others = [peer for peer in head.members if peer not in committee]
    assert voting.voters(head, others) == committee, "all others may go"
    few = others[:2]
    assert voting.voters(head, set(head.members) - set(few)) == tuple(few), "who is left counts alone"


def test_two_that_give_up_different_peers_still_need_a_vote_in_common():
    """Of those who are alive. The first in the draw among more peers are, as far as they live, the first of the living:
    what makes the proof in docs/protocol.md hold for a committee that is drawn again.
    """
    head, voting = head_of(24), Voting(5)
    committee = voting.committee(head)
    alive = set(head.members) - {*committee[:4], *head.members[::5]}
    dead = sorted(set(head.members) - alive)
    first_alive = set(voting.voters(head, dead))
    for number in range(len(dead)):
        given_up = {*committee[:3], *dead[number:]}
        voters = voting.voters(head, given_up)
        assert len(voters) >= len(first_alive)
        assert set(voters) & alive <= first_alive


def test_leaders_are_of_the_committee_first_and_nobody_is_left_out():
    head = head_of(30)
    order = VOTING.leaders(head)
    assert set(order[:SEATS]) == set(VOTING.committee(head))
    assert sorted(order) == list(head.members)
    assert VOTING.leaders(replace(head, round=9))[:SEATS] != order[:SEATS]


# ---- certificates ----


def test_a_commit_needs_a_majority_of_the_committee_and_no_other_vote_counts():
    head = head_of(30)
    record, committee = record_of(head, head.members), VOTING.committee(head)
    others = [peer for peer in head.members if peer not in committee]
    VOTING.check_certified(signed(record, committee[: majority(committee)]))
    with pytest.raises(PayloadError, match="10 votes, a majority is 11 of 21"):
        VOTING.check_certified(signed(record, committee[:10]))
    with pytest.raises(PayloadError, match="not by one of its voters"):
        VOTING.check_certified(signed(record, [*committee[:11], others[0]]))


def test_a_record_that_drops_most_of_the_committee_is_voted_on_by_those_who_are_left():
    head = head_of(30)
    committee = VOTING.committee(head)
    record = record_of(head, set(head.members) - set(committee[:11]))
    assert VOTING.drops_majority(record), "19 of 30 members stay, and 10 of 21 voters"
    voters = VOTING.voters_on(record)
    VOTING.check_certified(signed(record, voters[: majority(voters)]))
    with pytest.raises(PayloadError, match="not by one of its voters"):
        VOTING.check_certified(signed(record, committee[:11]))
    most = record_of(head, committee[:11])
    assert not VOTING.drops_majority(most), "most members go, and most voters stay"


# ---- rounds ----


@BOTH
@pytest.mark.parametrize(("num_peers", "seats"), [(9, 5), (7, 3), (24, SEATS)])
def test_a_committee_commits_what_all_have_offered(make_swarm, num_peers, seats, reduce):
    swarm = make_swarm(num_peers, seats=seats, reduce=reduce)
    assert finish_round(swarm, 2)
    swarm.check_agreement()
    committee = Voting(seats).committee(swarm.genesis())
    for host in swarm.hosts.values():
        for commit in host.disk.log:
            assert {peer for peer, _ in commit.certificate.votes} <= set(committee)
        named = host.disk.log[-1].record.contributors or host.disk.log[-1].record.frames
        assert len(named) == num_peers


def test_what_a_round_says_grows_with_the_committee_and_not_with_the_square_of_the_members(make_swarm):
    swarm = make_swarm(30, seats=5)
    sent = []
    swarm.lose = lambda sender, to, message: sent.append((sender, to, message)) or False
    assert finish_round(swarm, 1)
    swarm.run(lambda: not swarm.queue)
    counts = Counter(type(message).__name__ for _, _, message in sent)
    assert counts["Proposal"] == 4
    assert counts["Vote"] <= 4
    assert counts["Offer"] == 5 * 29 + 25 * 5
    assert counts["Commit"] == 29, "each is told once"
    by_sender = Counter(sender for sender, _, message in sent if isinstance(message, m.Commit))
    assert len(by_sender) == 3
    assert max(by_sender.values()) == 2 + 9, "two others told, 27 shared by three"


def test_every_member_is_the_share_of_one_who_voted():
    head = head_of(40)
    commit = signed(record_of(head, head.members), VOTING.committee(head)[:11])
    relays = tuple(peer for peer, _ in commit.certificate.votes)
    told = [peer for share in relay_shares(commit, relays).values() for peer in share]
    assert sorted([*told, *relays]) == list(head.members)
    sizes = {len(share) for share in relay_shares(commit, relays).values()}
    assert max(sizes) - min(sizes) <= 1


def test_a_share_whose_voter_died_before_it_told_anybody_gets_the_commit_all_the_same(make_swarm):
    swarm = make_swarm(12, seats=3)
    committee = Voting(3).committee(swarm.genesis())
    leader = swarm.machine(swarm.members[0]).state.leader_of(0)
    dumb = next(peer for peer in committee if peer != leader)
    swarm.lose = lambda sender, to, message: sender == dumb and isinstance(message, m.Commit)
    swarm.offer_all()
    assert swarm.run(lambda: all(swarm.rounds_done(peer) == 1 for peer in swarm.members), limit=20.0)
    swarm.check_agreement()


@pytest.mark.parametrize("seed", few_of(range(8), 4))
def test_lost_messages_and_a_death_in_the_committee_cost_time_and_nothing_else(make_swarm, seed):
    swarm = make_swarm(8, seats=5, seed=seed)
    victim = Voting(5).committee(swarm.genesis())[seed % 5]
    swarm.lose = lambda sender, to, message: swarm.random.random() < 0.1
    swarm.on_delivery = lambda count: swarm.kill(victim) if count == 11 * (seed + 1) else None
    assert finish_round(swarm, 2, limit=400.0)
    swarm.lose_leases(gone=False)
    assert finish_round(swarm, 2, limit=400.0)
    swarm.check_agreement()
    assert all(victim not in swarm.machine(peer).head.members for peer in swarm.alive())


def test_who_is_not_of_the_committee_does_not_vote_and_its_vote_is_not_counted(make_swarm):
    """Nor that of a leader that is not: it accepts its own proposal, so that its ballot has but one."""
    swarm = make_swarm(9, seats=3)
    committee = Voting(3).committee(swarm.genesis())
    outsider = next(peer for peer in swarm.members if peer not in committee)
    for host in swarm.hosts.values():
        host.machine.state._leaders = [outsider]
    swarm.offer_all()
    machine = swarm.machine(outsider)
    for peer in swarm.members:
        offer = swarm.machine(peer).state.round.offers[peer]
        swarm.do(outsider, machine.receive(peer, offer, swarm.now) if peer != outsider else [])
    assert swarm.run(lambda: swarm.rounds_done(outsider) == 1, limit=20.0)
    commit = swarm.hosts[outsider].disk.log[-1]
    assert {peer for peer, _ in commit.certificate.votes} <= set(committee)


def test_a_voter_that_lacks_a_frame_does_not_vote_and_those_that_have_it_decide(make_swarm):
    swarm = make_swarm(9, seats=5)
    committee = Voting(5).committee(swarm.genesis())
    leader = swarm.machine(swarm.members[0]).state.leader_of(0)
    lacking = [peer for peer in committee if peer != leader][:3]
    swarm.lose = lambda sender, to, message: to in lacking and isinstance(message, tuple)
    swarm.offer_all()
    assert not swarm.run(lambda: swarm.rounds_done(leader) > 0, limit=8.0), "two of five have the frames"
    assert all(swarm.machine(peer).state.acceptor.accepted is None for peer in lacking)
    swarm.lose = lambda sender, to, message: to in lacking[1:] and isinstance(message, tuple)
    assert swarm.run(lambda: swarm.rounds_done(leader) > 0, limit=40.0)
    assert not {peer for peer, _ in swarm.hosts[leader].disk.log[0].certificate.votes} & set(lacking[1:])


# ---- a committee that is lost ----


def test_without_a_majority_of_the_committee_nothing_is_decided_until_it_is_given_up(make_swarm):
    swarm = make_swarm(9, seats=5)
    assert finish_round(swarm, 1)
    committee = Voting(5).committee(swarm.head)
    for peer in committee[:3]:
        swarm.kill(peer)
    swarm.lose_leases(gone=False)
    assert not finish_round(swarm, 1, limit=60), "six of nine are there, and two of the five who vote"
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 3)
    swarm.check_agreement()
    for peer in swarm.alive():
        assert swarm.machine(peer).head.members == tuple(swarm.alive())
        assert swarm.machine(peer).state.given_up == frozenset(committee[:3])


def test_when_the_whole_committee_is_gone_the_others_go_on(make_swarm):
    swarm = make_swarm(9, seats=3)
    assert finish_round(swarm, 1)
    for peer in Voting(3).committee(swarm.head):
        swarm.kill(peer)
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2)
    swarm.check_agreement()


def test_most_members_may_go_at_once_while_most_of_the_committee_stays(make_swarm):
    swarm = make_swarm(12, seats=3)
    assert finish_round(swarm, 1)
    committee = Voting(3).committee(swarm.head)
    others = [peer for peer in swarm.members if peer not in committee]
    for peer in others[:8]:
        swarm.kill(peer)
    swarm.lose_leases(gone=False)
    assert finish_round(swarm, 2), "three of twelve are left, with the three who vote"
    assert all(not swarm.machine(peer).state.given_up for peer in swarm.alive())


@pytest.mark.parametrize("after", few_of(range(1, 40, 3), 5))
def test_what_a_committee_that_leaves_had_chosen_is_what_the_others_commit(make_swarm, after):
    swarm = make_swarm(8, seats=3, seed=after)
    assert finish_round(swarm, 1)
    committee = Voting(3).committee(swarm.head)
    count = swarm.delivered + after
    swarm.on_delivery = lambda now: [leave(swarm, peer) for peer in committee[:2]] if now == count else None
    assert swarm.run(lambda: swarm.offer_all() or committee[0] not in swarm.alive(), limit=30)
    swarm.on_delivery = lambda now: None
    assert finish_round(swarm, 2, limit=100.0)
    swarm.check_agreement()


def leave(swarm, peer) -> None:
    swarm.leave(peer)
    swarm.kill(peer)
