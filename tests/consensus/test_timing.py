"""What offers show of each member's speed."""

from __future__ import annotations

import pytest

from decentral.consensus.machine import TICK
from decentral.consensus.timing import OFFERS_OF_A_PACE, Deadline, Paces
from tests.kit.machines import finish_round

A, B, C = (bytes([n]) * 32 for n in range(3))


def test_a_pace_is_the_seconds_of_a_full_contribution_whatever_was_offered():
    paces = Paces(30, overlaps=False)
    paces.observe(A, 30, 100.0, 115.0)
    paces.observe(B, 15, 100.0, 115.0)
    assert paces.full_times([A, B, C]) == (15.0, 30.0)
    assert paces.full_times([C, B]) == (30.0,)


def test_a_peer_is_not_taken_for_faster_than_one_that_made_all_steps():
    """What it says of its steps is free."""
    paces = Paces(30, overlaps=False)
    paces.observe(A, 2**31, 0.0, 15.0)
    paces.observe(B, 0, 0.0, 15.0)
    assert paces.full_times([A, B]) == (15.0,)


def test_one_straggle_does_not_move_it_and_the_last_offers_do():
    paces = Paces(10, overlaps=False)
    for took in (5.0, 5.0, 300.0, 5.0):
        paces.observe(A, 10, 0.0, took)
    assert paces.full_times([A]) == (5.0,)
    for _ in range(OFFERS_OF_A_PACE):
        paces.observe(A, 10, 50.0, 57.0)
    assert paces.full_times([A]) == (7.0,)


def test_where_training_goes_on_meanwhile_the_seconds_are_between_two_offers():
    paces = Paces(10, overlaps=True)
    paces.observe(A, 10, 0.0, 4.0)
    assert paces.full_times([A]) == (), "when its steps began is not known"
    paces.observe(A, 5, 9.0, 14.0)
    assert paces.full_times([A]) == (20.0,)


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
    machine = swarm.hosts[me].machine
    swarm.stale[late], opened = 1, machine.state.round.opened
    swarm.offer(late)
    for peer, seconds in ((fast, 1.0), (slow, 3.0)):
        swarm.run(lambda seconds=seconds: swarm.now >= opened + seconds)
        swarm.offer(peer)
        swarm.run(lambda: not swarm.queue)
    assert machine.full_times() == pytest.approx((2.0, 6.0), abs=4 * TICK), "5 of 10 steps, in 1 and 3 s"
    assert swarm.hosts[fast].machine.full_times() == pytest.approx((6.0,), abs=4 * TICK), "its own is none of them"
