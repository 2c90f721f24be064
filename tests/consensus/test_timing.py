"""How long a round waits, and for whom; and what offers show of each member's speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decentral.consensus.machine import TICK
from decentral.consensus.timing import OFFERS_OF_A_PACE, Deadline, Paces
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind
from tests.kit.machines import digest_of, finish_round

A, B, C = (bytes([n]) * 32 for n in range(3))


OFTEN = OFFERS_OF_A_PACE


@pytest.mark.parametrize(
    ("steps", "overlaps", "offers", "peers", "times"),
    [
        (30, False, [(A, 30, 100.0, 115.0), (B, 15, 100.0, 115.0)], [A, B, C], (15.0, 30.0)),
        (30, False, [(B, 15, 100.0, 115.0)], [C, B], (30.0,)),
        # what it says of its steps is free
        (30, False, [(A, 2**31, 0.0, 15.0), (B, 0, 0.0, 15.0)], [A, B], (15.0,)),
        # one straggle does not move it, and the last offers do
        (10, False, [(A, 10, 0.0, took) for took in (5.0, 5.0, 300.0, 5.0)], [A], (5.0,)),
        (10, False, [*[(A, 10, 0.0, 5.0)] * 4, *[(A, 10, 50.0, 57.0)] * OFTEN], [A], (7.0,)),
        # where training goes on meanwhile the seconds are between two offers: when its steps began is not known
        (10, True, [(A, 10, 0.0, 4.0)], [A], ()),
        (10, True, [(A, 10, 0.0, 4.0), (A, 5, 9.0, 14.0)], [A], (20.0,)),
    ],
)
def test_a_pace_is_the_seconds_of_a_full_contribution_whatever_was_offered(steps, overlaps, offers, peers, times):
    paces = Paces(steps, overlaps=overlaps)
    for offer in offers:
        paces.observe(*offer)
    assert paces.full_times(peers) == times


def test_who_is_no_member_any_more_is_forgotten():
    paces = Paces(10, overlaps=True)
    for peer in (A, B):
        paces.observe(peer, 10, 0.0, 5.0)
        paces.observe(peer, 10, 5.0, 10.0)
    paces.keep([B, C])
    assert paces.full_times([A, B]) == (5.0,)
    paces.observe(A, 10, 10.0, 90.0)
    assert paces.full_times([A]) == ()


@pytest.mark.parametrize("reduce", [False, True], ids=["gather", "reduce"])
def test_a_machine_learns_the_pace_of_the_others_from_offers_in_time(make_swarm, reduce):
    swarm = make_swarm(4, reduce=reduce, max_staleness=3)
    me, fast, slow, late = swarm.members
    assert finish_round(swarm, 1)
    swarm.run(lambda: not swarm.queue)
    for host in swarm.hosts.values():
        host.machine.state.paces = Paces(10, overlaps=False)
        host.machine.state.deadline = Deadline(9.0, 10.0)  # the slow one is waited for
    machine = swarm.machine(me)
    swarm.stale[late], opened = 1, machine.state.round.opened
    swarm.offer(late)
    for peer, seconds in ((fast, 1.0), (slow, 3.0)):
        swarm.run(lambda seconds=seconds: swarm.now >= opened + seconds)
        swarm.offer(peer)
        swarm.run(lambda: not swarm.queue)
    assert machine.full_times() == pytest.approx((2.0, 6.0), abs=4 * TICK), "5 of 10 steps, in 1 and 3 s"
    assert swarm.machine(fast).full_times() == pytest.approx((6.0,), abs=4 * TICK), "its own is none of them"


def test_a_late_peer_is_passed_by_after_the_deadline_and_named_again_when_it_is_back(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 3)
    late = swarm.members[2]
    others = [peer for peer in swarm.members if peer != late]
    swarm.run(lambda: not swarm.queue)  # the round that it has offered for already may end
    goal = swarm.rounds_done(late) + 1 + (late in swarm.machine(late).state.round.offers)
    swarm.run(lambda: [swarm.offer(p) for p in others] and all(swarm.rounds_done(p) >= goal for p in others))
    assert swarm.named(others[0]) == sorted(others)
    assert finish_round(swarm, 2)
    assert late in swarm.named(others[0])


def test_a_full_contribution_presses_those_who_have_not_offered_and_a_short_one_nobody(make_swarm):
    swarm = make_swarm(3)
    slow, others = swarm.members[0], swarm.members[1:]
    machine = swarm.machine(slow)
    assert machine.time_left(swarm.now) is None, "nobody has offered yet"
    for peer in others:
        swarm.offer(peer)
    swarm.run(lambda: len(machine.state.round.offers) == 2)
    first, opened = machine.state.round.first_offer, machine.state.round.opened
    left = machine.time_left(first)
    assert 0 < left < machine.state.deadline.at(opened, first) - first
    assert machine.time_left(first + 100) < 0
    machine.state.terms = replace(machine.state.terms, steps=6)
    assert machine.time_left(first) is None
    machine.state.terms = replace(machine.state.terms, steps=5)
    assert swarm.machine(others[0]).time_left(first) is None, "it has offered"


def test_the_deadline_learns_from_full_contributions_once_their_frames_are_here(make_swarm):
    swarm = make_swarm(2)
    a, b = swarm.members
    machine = swarm.machine(a)
    machine.state.terms = replace(machine.state.terms, steps=5)
    head = machine.head
    frame, header = digest_of("late frame"), swarm.header(FrameKind.CONTRIBUTION, b, head)
    offer = m.Offer(head.epoch, 1, 0, head.anchor, frame, 100, 5, 50)
    machine.receive(b, offer, 2.0)
    assert not machine.state.deadline.delays
    machine.hold(frame, header, 7.0)
    assert list(machine.state.deadline.delays) == [7.0]
    machine.state.terms = replace(machine.state.terms, steps=6)
    swarm.offer(a)
    assert list(machine.state.deadline.delays) == [7.0], "fewer steps than a full contribution"
