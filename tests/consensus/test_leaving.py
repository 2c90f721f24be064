"""Members that leave, one or all but one, at any moment: what they had chosen stays chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decentral.consensus.paxos import Acceptor, farewell
from decentral.errors import PayloadError
from decentral.wire import messages as m
from tests.kit.machines import after_a_lost_tail, finish_round, vote_of


def say_farewell(swarm, leavers) -> None:
    """Their farewells are on their way, in any order with what they said before."""
    for leaver in leavers:
        farewell = swarm.machine(leaver).leave()
        swarm.queue += [(leaver, peer, farewell) for peer in swarm.members if peer != leaver]


@pytest.mark.parametrize("after", [0, 3, 1000], ids=["at once", "after three messages", "when all is said"])
@pytest.mark.parametrize("num_peers", [2, 3, 5])
def test_whoever_is_left_decides_what_those_who_left_had_chosen(make_swarm, num_peers, after):
    """Every message of a round is a phase: all but one say farewell right before the n-th delivery, for every n."""
    n, last = 0, 1
    while n < last:
        swarm = make_swarm(num_peers, seed=n)
        leavers = [peer for peer in swarm.members if peer != swarm.members[n % num_peers]]

        def leave(count: int, n: int = n, swarm=swarm, leavers=leavers) -> None:
            if count == n + 1:
                say_farewell(swarm, leavers)
            if count == n + 1 + after:
                for leaver in leavers:  # what they have said still arrives
                    swarm.kill(leaver)

        swarm.on_delivery = leave
        swarm.offer_all()
        swarm.run(lambda swarm=swarm: not swarm.queue)
        last = max(last, min(swarm.delivered, 20 * num_peers))
        for leaver in leavers:
            swarm.kill(leaver)
        assert finish_round(swarm, 2), f"the last one does not go on after farewells before delivery {n}"
        swarm.check_agreement()
        n += 1
    assert n > 4 * num_peers - 4


def test_a_peer_that_said_farewell_votes_no_more_until_it_stays(make_swarm):
    swarm = make_swarm(3)
    leaver = swarm.leaders()[-1]
    swarm.leave(leaver, to=[])
    swarm.offer_all()
    assert finish_round(swarm, 1)
    machine = swarm.machine(leaver)
    voters = {voter for voter, _ in swarm.hosts[swarm.members[0]].disk.log[0].certificate.votes}
    assert leaver not in voters
    assert machine.state.acceptor.accepted is None
    machine.stay()
    assert finish_round(swarm, 5)
    voters = {voter for commit in swarm.hosts[leaver].disk.log for voter, _ in commit.certificate.votes}
    assert leaver in voters


def test_a_peer_that_left_answers_the_leader_of_a_later_ballot_with_its_farewell(make_swarm):
    swarm = make_swarm(3)
    leaver, other = swarm.members[:2]
    machine = swarm.machine(leaver)
    said = machine.leave()
    ballot = next(b for b in range(1, 4) if machine.state.leader_of(b) == other)
    effects = machine.receive(other, m.Prepare(0, 1, ballot), 0.0)
    assert [effect.message for effect in effects] == [said]


def test_a_record_whose_frames_left_with_their_owner_stalls_nobody_who_knows_that_it_was_not_chosen(make_swarm):
    swarm = make_swarm(3)
    leader, owner, stays = swarm.leaders()
    swarm.lose = lambda sender, to, message: to == stays
    swarm.offer_all()
    assert swarm.run(lambda: swarm.machine(leader).state.acceptor.accepted is not None)
    swarm.queue.clear()
    swarm.lose = lambda sender, to, message: False
    for leaver in (leader, owner):
        swarm.leave(leaver, to=[stays])
        swarm.kill(leaver)
    assert finish_round(swarm, 2, limit=30.0)
    assert swarm.named(stays) == [stays]


def test_who_is_behind_does_not_decide_without_those_who_left_from_a_later_round(make_swarm):
    swarm = make_swarm(3)
    *others, late = swarm.members
    swarm.lose = lambda sender, to, message: late in (sender, to)
    while min(swarm.rounds_done(peer) for peer in others) < 1:
        swarm.offer_all()
        swarm.run(lambda: not swarm.queue)
        swarm.run(lambda: False, 1.0)
    swarm.lose = lambda sender, to, message: False
    for leaver in others:
        swarm.kill(leaver)
        swarm.leave(leaver, to=[late])
    swarm.offer(late)
    assert not swarm.run(lambda: swarm.rounds_done(late) > 0, 60.0), "it decided a round that others had decided"
    swarm.lose_leases(gone=True)
    assert finish_round(swarm, 1), "those who know the commit are gone for good"


def test_who_voted_in_a_later_round_than_that_of_its_farewell_is_back_though_it_said_nothing_here(make_swarm):
    swarm = make_swarm(3)
    stays, leaver, away = swarm.members
    presence = swarm.machine(away).state.presence
    swarm.leave(leaver, to=[away])
    swarm.machine(leaver).stay()
    swarm.lose = lambda sender, to, message: away in (sender, to)
    for rounds in (1, 2):
        while min(swarm.rounds_done(peer) for peer in (stays, leaver)) < rounds:
            swarm.offer(stays)
            swarm.offer(leaver)
            swarm.run(lambda: False, 1.0)
        swarm.catch_up(away, stays)
        assert swarm.rounds_done(away) == rounds
        assert leaver in {voter for voter, _ in swarm.hosts[away].disk.log[-1].certificate.votes}
        assert (leaver in presence.leaving) == (rounds == 1), "a vote in the same round may be older than the farewell"
    assert swarm.machine(away).state.farewells.votes(3, but=()) == {}


def test_a_farewell_whose_vote_another_peer_signed_is_refused(make_swarm):
    swarm = make_swarm(3)
    assert finish_round(swarm, 1)
    one, other, third = swarm.members
    record = swarm.hosts[one].disk.log[0].record
    machine = swarm.machine(one)
    voted = Acceptor(1, 0, 0, record, vote_of(swarm.signer(machine.state.leader_of(0)), 0, record))
    said = farewell(voted, record.run, record.epoch, swarm.signer(other))
    for forged in (
        farewell(voted, record.run, record.epoch, swarm.signer(third)),
        replace(said, vote=swarm.signer(third).sign(b"another vote")),
        replace(said, round=2),
        replace(said, epoch=7),
        replace(said, signature=bytes(64)),
    ):
        with pytest.raises(PayloadError):
            machine.receive(other, forged, 0.0)
    assert machine.state.presence.present(other)


def test_a_farewell_binds_its_own_round_and_says_nothing_of_an_earlier_one(make_swarm):
    swarm = make_swarm(3)
    assert finish_round(swarm, 2)
    one, other, _ = swarm.members
    record = swarm.hosts[one].disk.log[1].record
    voted = Acceptor(2, 0, 0, record, bytes(64))
    farewells = swarm.machine(one).state.farewells
    farewells.take(other, farewell(voted, record.run, record.epoch, swarm.signer(other)))
    assert farewells.votes(1, but=()) == {}
    assert farewells.votes(2, but=()) == {other: (0, record)}
    assert farewells.votes(3, but=()) == {other: (-1, None)}
    assert farewells.votes(2, but={other}) == {}


@pytest.mark.parametrize(
    "broken",
    [{"vote": b"\1" * 64}, {"proposed": b"\1" * 64}, {"accepted_ballot": 0}, {"accepted_ballot": -2}],
    ids=["voted for nothing", "nothing was proposed", "ballot of nothing", "below nothing"],
)
def test_a_farewell_of_nothing_has_no_ballot_and_no_vote(broken):
    with pytest.raises(PayloadError):
        m.encode(replace(m.Farewell(0, 1, -1, None, bytes(64), bytes(64), bytes(64)), **broken))


def test_a_peer_whose_disk_forgot_rounds_does_not_deny_how_it_voted_in_them(make_swarm):
    swarm = make_swarm(3)
    machine = swarm.machine(after_a_lost_tail(swarm))
    said = machine.leave()
    assert machine.state.forgetful
    assert said.round > machine.head.round + 1
    assert said.accepted is not None


def test_who_left_and_is_back_in_the_same_round_is_asked_for_the_frames_of_what_it_accepted(make_swarm):
    """The third may have accepted it, too, and is gone: so it may be chosen and must be carried on."""
    swarm = make_swarm(3)
    leader, stays, gone = swarm.leaders()
    swarm.kill(gone)
    swarm.lose = lambda sender, to, message: True
    swarm.offer(leader)
    assert swarm.run(lambda: swarm.machine(leader).state.acceptor.accepted is not None and not swarm.queue)
    swarm.lose_leases(gone=True)
    swarm.leave(leader, to=[stays])
    swarm.restart(leader)
    swarm.lose_leases(gone=True)
    swarm.lose = lambda sender, to, message: False
    swarm.asks_again = True
    assert finish_round(swarm, 2, limit=60.0)
    assert set(swarm.machine(stays).head.members) >= {leader, stays}
