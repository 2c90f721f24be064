"""What a record says of a contribution is what its sender signed: age, summary, steps and tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind, claims_of
from tests.kit.machines import digest_of, proposal_of

LIES = pytest.mark.parametrize(
    "lie", [{"summary": b"a lie"}, {"based": 0}, {"tokens": 7}], ids=lambda lie: next(iter(lie))
)


def proposed(swarm) -> tuple[bytes, m.Proposal]:
    """What the leader of the open round proposes, told to nobody."""
    kept = []
    swarm.lose = lambda sender, to, message: isinstance(message, m.Proposal) and not kept.append((sender, message))
    for peer in swarm.members:
        swarm.summaries[peer] = b"norm"
    swarm.offer_all()
    assert swarm.run(lambda: kept and not swarm.queue)
    return kept[0]


def two_rounds(make_swarm, **terms):
    swarm = make_swarm(3, max_staleness=2, **terms)
    for _ in range(2):
        swarm.offer_all()
        step = swarm.rounds_done(swarm.members[0])
        assert swarm.run(lambda step=step: all(swarm.rounds_done(peer) > step for peer in swarm.members))
    swarm.run(lambda: not swarm.queue)
    swarm.now += 2.0  # what is said just after a commit is of the round before
    return swarm


@LIES
@pytest.mark.parametrize("is_here", [True, False])
def test_a_record_that_says_of_a_frame_what_its_sender_did_not_sign_gets_no_vote(make_swarm, lie, is_here):
    """Nor does the frame bring one that comes after it."""
    swarm = two_rounds(make_swarm)
    leader, proposal = proposed(swarm)
    first, *rest = proposal.record.frames
    lied = replace(proposal.record, frames=(replace(first, **lie), *rest))
    false = proposal_of(swarm.signer(leader), proposal.ballot, lied)
    voter = swarm.machine(next(peer for peer in swarm.members if peer not in (leader, first.peer)))
    if is_here:
        with pytest.raises(PayloadError, match="what it did not sign"):
            voter.receive(leader, false, swarm.now)
        assert voter.state.acceptor.accepted is None
        voter.receive(leader, proposal, swarm.now)
        assert voter.state.acceptor.accepted == proposal.record
        return
    header = voter.state.held.pop(first.frame)
    voter.receive(leader, false, swarm.now)
    voter.hold(first.frame, header, swarm.now)
    assert voter.state.acceptor.accepted is None


@pytest.mark.parametrize("fragment", [1, 77, 2**32 - 1])
def test_a_record_of_a_fragment_whose_turn_it_is_not_gets_no_vote(make_swarm, fragment):
    swarm = two_rounds(make_swarm)
    leader, proposal = proposed(swarm)
    false = proposal_of(swarm.signer(leader), proposal.ballot, replace(proposal.record, fragment=fragment))
    voter = swarm.machine(next(peer for peer in swarm.members if peer != leader))
    with pytest.raises(PayloadError, match=rf"fragment {fragment} in step {proposal.record.outer_step}: not its turn"):
        voter.receive(leader, false, swarm.now)
    assert voter.state.acceptor.accepted is None


def test_an_offer_that_says_another_thing_than_its_frame_is_left_out_and_the_round_goes_on(make_swarm):
    """A sender that tells the peers different summaries would else have nobody vote for anything."""
    swarm = two_rounds(make_swarm)
    liar = swarm.leaders()[-1]
    head = swarm.machine(liar).head
    frame = digest_of("two-faced")
    header = replace(swarm.header(FrameKind.CONTRIBUTION, liar, head), claims=claims_of(head.outer_step, b"signed"))
    offer = m.Offer(head.epoch, head.round + 1, 0, head.anchor, frame, 100, 5, 50, head.outer_step, b"told")
    for host in swarm.hosts.values():
        host.frames[frame] = header
    for peer in swarm.members:
        swarm.do(peer, swarm.machine(peer).hold(frame, header, swarm.now))
        if peer != liar:
            swarm.do(peer, swarm.machine(peer).receive(liar, offer, swarm.now))
    others = [peer for peer in swarm.members if peer != liar]
    for peer in others:
        swarm.offer(peer)
    assert swarm.run(lambda: all(swarm.rounds_done(peer) == 3 for peer in others))
    assert swarm.named(others[0]) == others


@LIES
@pytest.mark.parametrize("said_in", ["plan", "record"])
def test_a_peer_of_which_a_reduce_says_what_it_did_not_offer_takes_no_part_in_it(make_swarm, lie, said_in):
    swarm = two_rounds(make_swarm, reduce=True)
    leader, proposal = proposed(swarm)
    mine = next(peer for peer in swarm.members if peer != leader)
    record = proposal.record
    false = tuple(replace(ref, **lie) if ref.peer == mine else ref for ref in record.contributors)
    plan = m.ReducePlan(record.epoch, record.round, 0, record.plan + 1, false, record.partition)
    told = (
        plan
        if said_in == "plan"
        else proposal_of(swarm.signer(leader), proposal.ballot, replace(record, contributors=false))
    )
    voter = swarm.machine(mine)
    with pytest.raises(PayloadError, match="what it did not offer"):
        voter.receive(leader, told, swarm.now)
    assert voter.state.acceptor.accepted is None
