"""Rounds that go on with a quorum of contributions, and how old a contribution may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decentral.consensus import chain
from decentral.consensus.machine import TICK
from decentral.consensus.paxos import Acceptor, farewell, promise
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind, claims_of
from tests.kit.machines import digest_of, finish_round, vote_of

BOTH = pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])


def rounds_without(swarm, absent, count, limit=60.0) -> float:
    """Seconds until ``count`` more outer steps are made to which ``absent`` offer nothing."""
    others = [peer for peer in swarm.members if peer not in absent]
    began, goal = swarm.now, swarm.rounds_done(others[0]) + count
    for _ in range(count):
        step = swarm.rounds_done(others[0]) + 1
        swarm.run(lambda: not swarm.queue)
        for peer in others:
            swarm.offer(peer)
        assert swarm.run(lambda step=step: all(swarm.rounds_done(p) >= step for p in others), limit)
    assert swarm.rounds_done(others[0]) == goal
    swarm.check_agreement()
    return swarm.now - began


@BOTH
def test_with_a_quorum_of_two_of_four_nobody_waits_for_a_slow_peer_and_without_one_all_do(make_swarm, reduce):
    swarm = make_swarm(4, reduce=reduce, quorum=2)
    assert rounds_without(swarm, swarm.members[2:3], 5) < 5 * TICK
    assert len(swarm.named(swarm.members[0])) >= 2
    swarm = make_swarm(4, reduce=reduce)
    assert rounds_without(swarm, swarm.members[2:3], 5) >= 5 * swarm.terms.floor


def test_fewer_than_the_quorum_wait_for_the_deadline(make_swarm):
    swarm = make_swarm(4, quorum=3)
    assert rounds_without(swarm, swarm.members[2:], 1) >= swarm.terms.floor
    assert sorted(swarm.named(swarm.members[0])) == sorted(swarm.members[:2])


def test_a_quorum_is_never_of_fewer_than_the_least_number_of_peers(make_swarm):
    swarm = make_swarm(4, quorum=1, min_peers=3)
    swarm.offer(swarm.members[0])
    swarm.offer(swarm.members[1])
    assert not swarm.run(lambda: swarm.rounds_done(swarm.members[0]) > 0, limit=swarm.terms.floor)
    swarm.offer(swarm.members[2])
    assert swarm.run(lambda: swarm.rounds_done(swarm.members[0]) > 0, limit=0.0)


def test_what_is_offered_within_the_grace_is_named_and_a_round_goes_on_when_it_is_over(make_swarm):
    swarm = make_swarm(4, quorum=2, grace=2.0)
    first, late = swarm.members[:2], swarm.members[2]
    for peer in first:
        swarm.offer(peer)
    assert not swarm.run(lambda: swarm.rounds_done(first[0]) > 0, limit=1.0)
    swarm.offer(late)
    assert swarm.run(lambda: swarm.rounds_done(first[0]) > 0, limit=1.0 + TICK)
    assert sorted(swarm.named(first[0])) == sorted(swarm.members[:3])
    assert swarm.now <= 2.0 + 2 * TICK, "the grace begins with the quorum, not anew with every offer"


def test_when_all_are_in_the_grace_is_not_waited_for(make_swarm):
    swarm = make_swarm(4, quorum=2, grace=5.0)
    assert finish_round(swarm, 3)
    assert swarm.now == 0.0
    assert sorted(swarm.named(swarm.members[0])) == sorted(swarm.members)


def test_a_quorum_does_not_wait_for_a_frame_that_is_on_its_way(make_swarm):
    swarm = make_swarm(4, quorum=2)
    slow = swarm.leaders()[-1]
    swarm.lose = lambda sender, to, message: sender == slow and isinstance(message, tuple)
    for host in swarm.hosts.values():
        host.machine.state.terms = replace(host.machine.state.terms, takes=lambda nbytes, peer, members: 20.0)
    swarm.offer_all()
    others = [peer for peer in swarm.members if peer != slow]
    assert swarm.run(lambda: all(swarm.rounds_done(peer) == 1 for peer in others), limit=1.0)


@BOTH
def test_a_record_tells_the_age_and_the_summary_of_every_contribution_to_every_peer_alike(make_swarm, reduce):
    swarm = make_swarm(3, reduce=reduce, max_staleness=2)
    assert finish_round(swarm, 3)
    old, other = swarm.members[:2]
    swarm.stale[old], swarm.summaries[other] = 2, b"norm"
    assert finish_round(swarm, 1)
    for host in swarm.hosts.values():
        record = host.disk.log[-1].record
        told = {ref.peer: (record.outer_step - ref.based, ref.summary) for ref in chain.contributions(record)}
        assert told == {old: (2, b""), other: (0, b"norm"), swarm.members[2]: (0, b"")}
        assert not reduce or {(ref.based, ref.summary) for ref in record.frames} == {(record.outer_step, b"")}


@pytest.mark.parametrize(
    ("based", "words"),
    [(2, "progress from 2 outer steps ago, 1 are the most"), (5, "from an anchor 1 outer steps ahead of the round")],
)
def test_an_offer_that_is_too_old_or_of_an_anchor_yet_to_come_is_refused(make_swarm, based, words):
    swarm = make_swarm(3, max_staleness=1)
    assert finish_round(swarm, 4)
    machine = swarm.machine(swarm.members[0])
    head = machine.head
    offer = m.Offer(head.epoch, head.round + 1, 0, head.anchor, digest_of("f"), 100, 5, 50, based)
    with pytest.raises(PayloadError, match=words):
        machine.receive(swarm.members[1], offer, swarm.now + 2.0)
    with pytest.raises(PayloadError, match=words):
        machine.offer(offer, swarm.now + 2.0)
    assert not machine.state.round.offers


@BOTH
def test_what_only_the_leader_does_not_find_too_old_is_never_committed(make_swarm, reduce):
    """A leader of other terms, or one that lies, proposes it; and tells the next leader that it has accepted it."""
    swarm = make_swarm(4, reduce=reduce, max_staleness=1)
    assert finish_round(swarm, 4)
    leader, old, third, fourth = swarm.leaders()
    lenient, refused = swarm.machine(leader), []
    lenient.state.terms = replace(lenient.state.terms, max_staleness=9)
    for host in swarm.hosts.values():
        host.machine.receive = tolerant(host.machine.receive, refused)
    tell_stale_offer(swarm, old, leader)
    assert swarm.run(lambda: [swarm.offer(p) for p in (leader, third, fourth)] and swarm.rounds_done(third) >= 7)
    assert any("3 outer steps ago, 1 are the most" in words for words in refused)
    for commit in swarm.hosts[third].disk.log:
        assert all(commit.record.outer_step == ref.based for ref in chain.contributions(commit.record))


def tell_stale_offer(swarm, old, leader) -> None:
    """The leader alone hears of a contribution that was begun three outer steps ago, and has its frame."""
    head = swarm.machine(old).head
    frame, claims = digest_of("old"), claims_of(head.outer_step - 3, b"")
    header = replace(swarm.header(FrameKind.CONTRIBUTION, old, head), claims=claims)
    offer = m.Offer(head.epoch, head.round + 1, 0, head.anchor, frame, 100, 5, 50, head.outer_step - 3)
    for peer in swarm.members if not swarm.reduce else ():
        swarm.hosts[peer].frames[frame] = header
        swarm.do(peer, swarm.machine(peer).hold(frame, header, swarm.now))
    swarm.now += 2.0  # what is said just after a commit is of the round before
    swarm.do(leader, swarm.machine(leader).receive(old, offer, swarm.now))


def aged(record: m.Record, based: int) -> m.Record:
    return replace(record, frames=tuple(replace(ref, based=based) for ref in record.frames))


def test_a_farewell_that_accepted_what_is_too_old_binds_nobody(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 2)
    machine, liar = swarm.machine(swarm.members[0]), swarm.signers[1]
    record = aged(swarm.hosts[liar.peer].disk.log[-1].record, 0)
    proposed = vote_of(swarm.signer(machine.state.leader_of(1)), 1, record)
    said = farewell(Acceptor(record.round, 1, 1, record, proposed), record.run, record.epoch, liar)
    with pytest.raises(PayloadError, match="1 outer steps ago, 0 are the most"):
        machine.receive(liar.peer, said, swarm.now)
    assert machine.state.farewells.since(liar.peer) == -1


def test_a_promise_that_accepted_what_is_too_old_is_not_counted(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 2)
    head = swarm.head
    first, leader, liar, _ = chain.leaders(head)
    swarm.kill(first)
    machine = swarm.machine(leader)
    swarm.lose = lambda sender, to, message: isinstance(message, m.Promise)
    swarm.offer_all()
    assert swarm.run(lambda: machine.state.leading is not None)
    last = swarm.hosts[leader].disk.log[-1].record
    record = replace(
        aged(last, 0), round=head.round + 1, outer_step=head.outer_step, previous=head.hash, base=head.anchor
    )
    ballot, proposed = machine.state.leading.ballot, vote_of(swarm.signer(first), 0, record)
    accepted = Acceptor(head.round + 1, ballot, 0, record, proposed)
    promised = promise(accepted, head.run, head.epoch, ballot, swarm.signer(liar))
    with pytest.raises(PayloadError, match="2 outer steps ago, 0 are the most"):
        machine.receive(liar, promised, swarm.now)
    assert set(machine.state.leading.promises) == {leader}


def test_a_plan_that_names_what_is_too_old_is_not_carried_out(make_swarm):
    swarm = make_swarm(3, reduce=True)
    assert finish_round(swarm, 2)
    leader, one, other = swarm.leaders()
    head = swarm.machine(one).head
    contributors = (m.FrameRef(other, digest_of("f"), 0, 5, 50, head.outer_step - 1),)
    plan = m.ReducePlan(head.epoch, head.round + 1, 0, 0, contributors, swarm.terms.partition(0, (other,)))
    with pytest.raises(PayloadError, match="1 outer steps ago, 0 are the most"):
        swarm.machine(one).receive(leader, plan, swarm.now + 2.0)


def test_a_record_of_progress_from_an_anchor_yet_to_come_follows_nothing(make_swarm):
    swarm = make_swarm(3)
    assert finish_round(swarm, 1)
    record = swarm.hosts[swarm.members[0]].disk.log[-1].record
    chain.check_succession(swarm.genesis(), record)
    with pytest.raises(PayloadError, match="1 outer steps ahead of the round; drop it and its sender"):
        chain.check_succession(swarm.genesis(), aged(record, 1))


def tolerant(receive, found):
    """What a machine refuses is noted; else the test swarm takes it for a bug."""

    def call(sender, message, now):
        try:
            return receive(sender, message, now)
        except PayloadError as error:
            found.append(str(error))
            return []

    return call


def test_a_quorum_whose_frames_are_gone_when_its_grace_is_over_makes_no_empty_record(make_swarm):
    """The store drops frames for want of room; a record of nothing would be agreed on, again and again."""
    swarm = make_swarm(4, quorum=2, grace=2.0)
    leader = swarm.leaders()[0]
    for peer in [peer for peer in swarm.members if peer != leader][:2]:
        swarm.offer(peer)
    assert not swarm.run(lambda: swarm.rounds_done(leader) > 0, limit=1.0)
    swarm.machine(leader).state.held.clear()
    swarm.lose = lambda sender, to, message: to == leader and isinstance(message, tuple)
    swarm.run(lambda: swarm.rounds_done(leader) > 0, limit=3.0)
    assert all(commit.record.frames for host in swarm.hosts.values() for commit in host.disk.log)
