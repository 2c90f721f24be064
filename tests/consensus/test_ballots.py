"""Who leads, who voted for what, and what a restart must not forget: the ballots of a round."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from decentral.consensus import leader as leading
from decentral.errors import PayloadError
from decentral.wire import messages as m
from tests.kit.machines import after_a_lost_tail, digest_of, finish_round, join_request, signer_of


def test_each_round_is_led_by_the_peer_that_the_hash_chooses(make_swarm):
    swarm = make_swarm(4)
    leaders = set()
    for _ in range(30):
        leaders.add(swarm.leaders()[0])
        assert finish_round(swarm)
    assert leaders == set(swarm.members)


@pytest.mark.parametrize("who", ["leader", "contributor"])
def test_a_peer_restarted_from_its_disk_never_votes_twice_and_comes_back_into_step(make_swarm, who):
    for n in range(30):
        swarm = make_swarm(3, seed=n)
        order = swarm.leaders()
        victim = order[0] if who == "leader" else order[-1]
        swarm.at_delivery(
            {n + 1: functools.partial(swarm.kill, victim), n + 4: functools.partial(swarm.restart, victim)}
        )
        assert finish_round(swarm, 3), f"hang after a restart at delivery {n}"
        swarm.check_agreement()


def test_a_leader_whose_record_cannot_be_written_says_so_and_the_next_one_leads(make_swarm, monkeypatch):
    swarm = make_swarm(4)
    leader = swarm.leaders()[0]
    new_record = leading.new_record

    def made(state, *given):
        return unsorted(new_record(state, *given)) if state.me == leader else new_record(state, *given)

    monkeypatch.setattr(leading, "new_record", made)
    assert finish_round(swarm)
    (mistake,) = swarm.hosts[leader].mistakes
    assert "not sorted" in str(mistake.error)
    assert swarm.hosts[leader].disk.log[0].certificate.ballot > 0
    assert finish_round(swarm, 2)
    swarm.check_agreement()


def unsorted(record: m.Record | None) -> m.Record | None:
    return None if record is None else replace(record, members=record.members[::-1])


def commits(swarm, peer: bytes) -> bool:
    """Whether ``peer`` gets anywhere within a minute."""
    before = swarm.rounds_done(peer)

    def moved() -> bool:
        swarm.offer_all()
        return swarm.rounds_done(peer) > before

    return swarm.run(moved, 60.0)


def test_a_peer_that_lost_its_last_commits_does_not_vote_in_their_rounds_again(make_swarm):
    swarm = make_swarm(3)
    cut = after_a_lost_tail(swarm)
    assert not commits(swarm, cut), "two of three know nothing of rounds that were committed"
    swarm.lose = lambda sender, to, message: False
    assert finish_round(swarm, 3)
    swarm.check_agreement()
    assert not swarm.machine(cut).state.forgetful


def test_what_everybody_forgot_can_be_committed_anew(make_swarm):
    swarm = make_swarm(3)
    cut = after_a_lost_tail(swarm)
    swarm.machine(cut).state.forget()
    assert commits(swarm, cut)


def test_a_vote_with_anothers_signature_is_refused(make_swarm):
    swarm = make_swarm(3)
    leader = swarm.leaders()[0]
    a, b = (peer for peer in swarm.members if peer != leader)
    swarm.offer_all()
    machine = swarm.machine(leader)
    swarm.run(lambda: machine.state.leading is not None and machine.state.leading.proposal is not None)
    record = machine.state.leading.proposal.record
    signer = next(s for s in swarm.signers if s.peer == a)
    text = m.vote_text(record.run, record.epoch, record.round, 0, record.hash)
    with pytest.raises(PayloadError, match="not signed by its sender"):
        machine.receive(b, m.Vote(record.epoch, record.round, 0, record.hash, signer.sign(text)), swarm.now)


def test_a_commit_without_a_majority_of_signatures_is_refused(make_swarm):
    swarm = make_swarm(4)
    assert finish_round(swarm, 1)
    commit = swarm.hosts[swarm.members[0]].disk.log[0]
    thin = m.Commit(commit.record, m.Certificate(commit.certificate.ballot, commit.certificate.votes[:2]))
    fresh = make_swarm(4).hosts[swarm.members[0]].machine
    with pytest.raises(PayloadError):
        fresh.receive(swarm.members[1], thin, 0.0)
    assert fresh.state.decided is None


def test_a_voter_that_restarts_still_has_the_frames_it_voted_for_when_their_owner_is_dead(make_swarm):
    swarm = make_swarm(3)
    leader, owner, third = swarm.leaders()
    swarm.lose = lambda a, b, message: b == third and (isinstance(message, tuple | m.Proposal) or a == owner)
    swarm.offer(leader)
    swarm.offer(owner)
    voter = swarm.hosts[leader]
    assert swarm.run(lambda: voter.machine.state.acceptor.accepted is not None, limit=30)
    assert [ref.peer for ref in voter.machine.state.acceptor.accepted.frames] == sorted([leader, owner])
    swarm.queue.clear()
    swarm.kill(owner)
    swarm.restart(leader)
    swarm.lose = lambda a, b, message: False
    swarm.lose_leases(gone=False)
    assert finish_round(swarm, 2), "bound to a record whose frames nobody has"
    swarm.check_agreement()


def test_a_round_that_restarts_at_a_high_ballot_does_not_wait_for_all_the_ballots_before_it(make_swarm):
    swarm = make_swarm(3)
    for host, signer in zip(list(swarm.hosts.values()), swarm.signers, strict=True):
        host.disk.acceptor = host.machine.state.acceptor.promise(9).to_bytes()
        swarm.start(signer, host.disk)
    swarm.lose = lambda sender, to, message: isinstance(message, m.Proposal) and message.ballot == 9
    assert finish_round(swarm, 1, limit=20.0)


@pytest.mark.parametrize("stalled_for", [5.0, 13.0, 30.0, 60.0, 130.0])
def test_peers_that_restarted_at_different_ballots_agree_on_who_leads(make_swarm, stalled_for):
    """Each took the other's ballot for the one in charge for two minutes, and neither led."""
    swarm = make_swarm(4)
    order = swarm.leaders()
    for peer, ballot in ((order[0], 67), (order[2], 65)):
        swarm.hosts[peer].disk.acceptor = swarm.machine(peer).state.acceptor.promise(ballot).to_bytes()
        swarm.restart(peer)
    for peer in (order[1], order[3]):
        swarm.kill(peer)
    swarm.lose_leases(gone=True)
    swarm.lose = lambda sender, to, message: isinstance(message, m.Proposal | m.Vote)
    assert not finish_round(swarm, limit=stalled_for)
    swarm.lose = lambda sender, to, message: False
    assert finish_round(swarm, limit=20.0)
    swarm.check_agreement()


def test_a_ballot_with_a_flipped_bit_is_refused(make_swarm):
    swarm = make_swarm(3)
    machine = swarm.machine(swarm.members[0])
    ballot = next(n for n in range(1 << 29, (1 << 29) + 3) if machine.state.leader_of(n) == swarm.members[1])
    with pytest.raises(PayloadError, match="far above"):
        machine.receive(swarm.members[1], m.Prepare(0, 1, ballot), 0.0)
    head = machine.head
    plan = m.ReducePlan(0, 1, 0, 1 << 16, (m.FrameRef(swarm.members[0], digest_of("f"), 0, 1, 1),), ())
    sender = machine.state.leader_of(0) if machine.state.leader_of(0) != machine.state.me else swarm.members[1]
    with pytest.raises(PayloadError, match="none of ballot"):
        machine.receive(sender, plan, 0.0)
    assert (machine.state.acceptor.promised, machine.head) == (0, head)


def test_who_promised_a_ballot_accepts_nothing_of_a_lower_one(make_swarm):
    swarm = make_swarm(3)
    first, second, voter = swarm.leaders()
    swarm.offer_all()
    swarm.run(lambda: swarm.machine(first).state.proposal is not None)
    machine, (_, proposal) = swarm.machine(voter), swarm.machine(first).state.proposal
    for frame, header in swarm.machine(first).state.held.items():
        machine.hold(frame, header, swarm.now)
    assert machine.state.acceptor.accepted is None
    machine.unreachable(first, swarm.now)
    machine.receive(second, m.Prepare(0, 1, 1), swarm.now)
    effects = machine.receive(first, proposal, swarm.now)
    assert not [effect for effect in effects if isinstance(getattr(effect, "message", None), m.Vote)]
    assert (machine.state.acceptor.promised, machine.state.acceptor.accepted) == (1, None)


def test_a_new_leader_takes_what_may_be_chosen_from_the_promises_it_gets(make_swarm):
    swarm = make_swarm(3)
    leader, successor, voter = swarm.leaders()
    swarm.lose = lambda sender, to, message: successor in (sender, to)
    swarm.offer_all()
    assert swarm.run(lambda: swarm.rounds_done(leader) == 1)
    swarm.kill(leader)  # it alone knows that the voter's vote and its own were enough
    swarm.queue = [one for one in swarm.queue if one[0] != leader]
    assert swarm.rounds_done(voter) == 0
    swarm.lose = lambda sender, to, message: False
    swarm.lose_leases(gone=False)
    assert finish_round(swarm)
    swarm.check_agreement()


@pytest.mark.parametrize("reduce", [False, True])
def test_a_leader_that_restarts_in_its_ballot_proposes_what_it_proposed(make_swarm, reduce):
    """Although the other one's promise says that nothing was chosen, and a newcomer has asked to be let in since."""
    ballot, swarm, newcomer = 9, make_swarm(2, reduce=reduce), signer_of(99).peer
    for host, signer in zip(list(swarm.hosts.values()), swarm.signers, strict=True):
        host.disk.acceptor = host.machine.state.acceptor.promise(ballot).to_bytes()
        swarm.start(signer, host.disk)
    leader = swarm.leaders()[ballot % 2]
    proposed: list[m.Record] = []
    back = False

    def lose(sender: bytes, to: bytes, message: object) -> bool:
        if isinstance(message, m.Proposal) and message.ballot == ballot:
            proposed.append(message.record)
        return to == newcomer or (isinstance(message, m.Proposal) and not back)

    swarm.lose = lose
    swarm.offer_all()
    assert swarm.run(lambda: bool(proposed), limit=60)
    assert swarm.machine(leader).state.acceptor.accepted_ballot == ballot
    first, back = proposed[0], True
    swarm.restart(leader)
    asks = join_request(signer_of(99), first.round - 1, first.previous)
    swarm.do(leader, swarm.machine(leader).receive(newcomer, asks, swarm.now))
    swarm.offer_all()
    assert swarm.run(lambda: len(proposed) >= 2, limit=60)
    assert all(record == first for record in proposed), "one ballot, one record"


def test_a_leader_that_is_there_and_gets_nowhere_is_followed_by_the_next(make_swarm):
    swarm = make_swarm(3)
    leader = swarm.leaders()[0]
    swarm.lose = lambda sender, to, message: sender == leader and isinstance(message, m.Proposal)
    assert finish_round(swarm, limit=60.0)
    swarm.check_agreement()
