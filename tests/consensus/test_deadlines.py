"""How long a round waits, and for whom."""

from __future__ import annotations

from dataclasses import replace

from decentral.wire import messages as m
from decentral.wire.frames import FrameKind
from tests.kit.machines import digest_of, finish_round


def test_a_late_peer_is_passed_by_after_the_deadline_and_named_again_when_it_is_back(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 3)
    late = swarm.members[2]
    others = [peer for peer in swarm.members if peer != late]
    swarm.run(lambda: not swarm.queue)  # the round that it has offered for already may end
    goal = swarm.rounds_done(late) + 1 + (late in swarm.hosts[late].machine.state.round.offers)
    swarm.run(lambda: [swarm.offer(p) for p in others] and all(swarm.rounds_done(p) >= goal for p in others))
    assert swarm.named(others[0]) == sorted(others)
    assert finish_round(swarm, 2)
    assert late in swarm.named(others[0])


def test_a_full_contribution_presses_those_who_have_not_offered_and_a_short_one_nobody(make_swarm):
    swarm = make_swarm(3)
    slow, others = swarm.members[0], swarm.members[1:]
    machine = swarm.hosts[slow].machine
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
    assert swarm.hosts[others[0]].machine.time_left(first) is None, "it has offered"


def test_the_deadline_learns_from_full_contributions_once_their_frames_are_here(make_swarm):
    swarm = make_swarm(2)
    a, b = swarm.members
    machine = swarm.hosts[a].machine
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
