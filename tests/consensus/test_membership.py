"""Who is in, who is out, and who decides alone when too many are gone."""

from __future__ import annotations

import pytest

from decentral.consensus import chain
from decentral.consensus.round_state import FETCH_AFTER, CatchUpWith
from decentral.wire import messages as m
from tests.lab.machines import finish_round, signer_of


def test_a_minority_does_not_commit_and_follows_the_majority_when_healed(make_swarm):
    swarm = make_swarm(5)
    minority = set(swarm.members[:2])
    swarm.lose = lambda a, b, message: (a in minority) != (b in minority)
    for peer in swarm.members:
        others = frozenset(p for p in swarm.members if (p in minority) != (peer in minority))
        swarm.hosts[peer].machine.liveness(others, frozenset(), swarm.now)
    swarm.run(lambda: swarm.offer_all() or all(swarm.rounds_done(p) >= 2 for p in swarm.members[2:]))
    assert all(swarm.rounds_done(peer) == 0 for peer in minority)
    swarm.lose = lambda a, b, message: False
    for peer in swarm.members:
        swarm.hosts[peer].machine.liveness(frozenset(), frozenset(), swarm.now)
    for peer in minority:
        swarm.hosts[peer].machine.state.round.offers.clear()
        swarm.do(peer, swarm.hosts[peer].machine.receive(swarm.members[-1], m.Behind(99), swarm.now))
    assert swarm.run(lambda: all(swarm.rounds_done(p) >= 2 for p in swarm.members))
    swarm.check_agreement()


def test_two_peers_and_one_dies_the_other_goes_on_once_it_is_given_up(make_swarm):
    swarm = make_swarm(2)
    assert finish_round(swarm, 2)
    victim = swarm.members[0]
    swarm.kill(victim)
    swarm.lose_leases(gone=False)
    assert not finish_round(swarm, 1, limit=30), "half of an epoch is no majority"
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 3)
    assert swarm.hosts[swarm.members[1]].machine.head.members == (swarm.members[1],)


@pytest.mark.parametrize("n", range(25))
def test_the_survivor_of_two_goes_on_whatever_was_voted_when_the_other_died(make_swarm, n):
    swarm = make_swarm(2, seed=n)
    victim = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)[n % 2]
    swarm.on_delivery = lambda count: swarm.kill(victim) if count == n // 2 + 1 else None
    swarm.run(lambda: swarm.offer_all() or victim not in swarm.alive(), limit=20)
    swarm.kill(victim)
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2)


def test_a_joiner_is_admitted_between_rounds_at_once(make_swarm):
    swarm = make_swarm(4)
    joiner = swarm.members[3]
    for host in swarm.hosts.values():
        host.machine.state.restart(
            chain.Head(*_genesis_fields(swarm), tuple(p for p in swarm.members if p != joiner)), swarm.now
        )
    request = m.JoinRequest(0, swarm.genesis().hash)
    for peer in swarm.members[:3]:
        swarm.do(peer, swarm.hosts[peer].machine.receive(joiner, request, swarm.now))
    assert swarm.run(lambda: all(joiner in host.machine.head.members for host in swarm.hosts.values()), limit=10)
    assert swarm.hosts[joiner].machine.head.outer_step == 0
    assert finish_round(swarm, 2)
    assert joiner in swarm.named(joiner)


def test_more_newcomers_than_a_record_can_name_are_let_in_one_record_after_the_other(make_swarm):
    """A record of 1,027 members could not be written, and the leader ended: who wanted that needed 1,022 keys."""
    swarm = make_swarm(3)
    machine = swarm.hosts[swarm.members[0]].machine
    for number in range(m.MAX_PEERS + 100):
        machine.receive(signer_of(1000 + number).peer, m.JoinRequest(0, bytes(32)), swarm.now)
    wanted = machine.state.next_members()
    assert len(wanted) == m.MAX_PEERS
    assert set(swarm.members) <= set(wanted)
    assert len(machine.state.joiners) <= m.MAX_PEERS


def _genesis_fields(swarm):
    head = swarm.genesis()
    return head.run, head.epoch, head.round, head.outer_step, head.hash, head.anchor


def test_goodbye_takes_a_peer_out_with_the_next_record(make_swarm):
    swarm = make_swarm(3)
    leaver = swarm.members[1]
    swarm.leave(leaver)
    swarm.kill(leaver)
    assert finish_round(swarm, 2)
    assert leaver not in swarm.hosts[swarm.members[0]].machine.head.members


def test_below_min_peers_nothing_is_committed(make_swarm):
    swarm = make_swarm(2, min_peers=3)
    assert not finish_round(swarm, 1, limit=60)


def test_a_shrink_is_remembered_until_those_given_up_are_back_and_a_goodbye_is_none(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 1)
    leaver, dead, one, other = swarm.members
    swarm.leave(leaver)
    swarm.kill(leaver)
    swarm.kill(dead)
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2)
    machines = [swarm.hosts[peer].machine for peer in (one, other)]
    assert [machine.state.given_up for machine in machines] == [{dead}, {dead}]
    for machine in machines:
        machine.liveness(frozenset(), frozenset(), swarm.now)
        machine.state.presence.unreachable.clear()
        machine.state.joiners[dead] = m.JoinRequest(0, machine.head.hash)
    assert swarm.run(lambda: all(dead in machine.head.members for machine in machines), limit=30)
    assert not any(machine.state.given_up for machine in machines)


def test_a_peer_that_comes_back_after_its_goodbye_stays_a_member(make_swarm):
    swarm = make_swarm(3)
    moody, *others = swarm.members
    swarm.offer(others[0])
    swarm.run(lambda: not swarm.queue)
    swarm.leave(moody)
    swarm.come_back(moody)
    swarm.offer(moody)
    swarm.run(lambda: not swarm.queue)
    assert finish_round(swarm, 2)
    assert swarm.hosts[others[0]].machine.head.epoch == 0


def test_an_accepted_record_that_drops_a_peer_who_is_back_does_not_end_the_run(make_swarm):
    """Two of four left it, so the two others would have voted on it; only one did before the third came back."""
    swarm = make_swarm(4)
    leader, dead, back, other = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)
    for peer in (leader, other):
        swarm.offer(peer)
    swarm.run(lambda: not swarm.queue)
    swarm.kill(dead)
    swarm.lose = lambda sender, to, message: sender == back
    swarm.leave(back, to=[leader])
    swarm.lose_leases(gone=True)
    assert swarm.run(lambda: swarm.hosts[leader].machine.state.acceptor.accepted is not None)
    dropped = set(swarm.members) - set(swarm.hosts[leader].machine.state.acceptor.accepted.next_members)
    assert dropped == {dead, back}
    swarm.lose = lambda sender, to, message: False
    swarm.come_back(back)
    assert finish_round(swarm, 2)
    assert back in swarm.hosts[leader].machine.head.members
    swarm.check_agreement()


def test_strangers_can_make_a_peer_keep_only_so_much_of_rounds_to_come(make_swarm):
    """A thousand identities cost nothing; a member's word is kept beside theirs."""
    swarm = make_swarm(3)
    machine, member = swarm.hosts[swarm.members[0]].machine, swarm.members[1]
    for number in range(1000):
        machine.receive(signer_of(1000 + number).peer, m.Prepare(0, 5, 1), 0.0)
    machine.receive(member, m.Prepare(0, 5, 1), 0.0)
    kept = {peer for peer, _ in machine.state.early}
    assert member in kept
    assert len(kept) <= 33


def test_a_member_that_is_ahead_is_caught_up_with_whatever_strangers_said_before_it(make_swarm):
    """Whom the last effect names is asked: a stranger's word is not acted upon, and must not hide a member's."""
    swarm = make_swarm(3)
    machine, member = swarm.hosts[swarm.members[0]].machine, swarm.members[1]
    for number in range(3):
        machine.receive(signer_of(1000 + number).peer, m.Prepare(0, 5, 1), 0.0)
    machine.receive(member, m.Prepare(0, 5, 1), 0.0)
    machine.receive(signer_of(2000).peer, m.Prepare(0, 5, 1), 0.0)
    asked = [effect.peer for effect in machine.tick(FETCH_AFTER + 0.1) if isinstance(effect, CatchUpWith)]
    assert asked[-1] == member
    assert len(asked) == len(set(asked)) == 5, "one of the strangers may have been let in by those who are ahead"


def test_a_record_of_few_that_cannot_be_voted_on_any_more_stalls_nobody_whom_it_dropped_and_who_is_back(make_swarm):
    swarm = make_swarm(4)
    first, *back, other = chain.leaders(swarm.hosts[swarm.members[0]].machine.head)
    for peer in back:
        swarm.kill(peer)
    swarm.lose = lambda sender, to, message: True
    swarm.lose_leases(gone=True)
    record = swarm.hosts[first].machine.state.acceptor.accepted
    assert set(record.next_members) == {first, other}, "the two who are left go on without the others"
    swarm.run(lambda: not swarm.queue)
    swarm.kill(other)
    for peer in back:
        swarm.restart(peer)
    swarm.lose = lambda sender, to, message: False
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 2, limit=60.0), "who voted on it is gone, and who is here is dropped by it"
    swarm.check_agreement()
