"""Leaders, promises and prepares that lie: what is decided is one record, and soon."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from decentral.consensus import leader, paxos, voter
from decentral.wire import messages as m
from tests.kit.liars import (
    CLEAN_ENOUGH,
    acting_as,
    at_a_head,
    check_it_costs_little,
    check_nobody_is_out,
    honest,
    one_after_the_other,
    record_after,
    rounds_in,
    say,
)
from tests.kit.nodes import signer_of
from tests.kit.tables import long_but

SECONDS = 60.0
SIZES = long_but([3], [3, 4, 5])
INVENTED = {signer_of(9000 + number).peer for number in range(20)}


async def prepare_all_the_time(lab, liar) -> None:
    """Ten times a second, each time for a higher ballot that it leads."""
    ballot, told = 0, 0
    while True:
        head = await at_a_head(liar)
        state = liar.node.driver.machine.state
        ballot = 0 if head.round != told else ballot
        told = head.round
        ballot = next(b for b in range(ballot + 1, ballot + 2000) if state.leader_of(b) == liar.signer.peer)
        for member in honest(lab, liar):
            lab.group.start_soon(say, liar, member, m.Prepare(head.epoch, head.round + 1, ballot))
        await anyio.sleep(0.1)


async def never_lead(lab, liar) -> None:
    """Silent in the ballots that fall to it."""
    with acting_as(liar.signer.peer, leader, lead=lambda state, now: None):
        await anyio.sleep_forever()


async def lie_in_promises(lab, liar) -> None:
    """Never leads, and tells whoever does that it accepted a record of its own in the ballot that it led, of a frame
    that nobody has.
    """
    machine = liar.node.driver.machine

    def promised(acceptor, run, epoch, ballot, signer):
        head = machine.head
        mine = [b for b in range(ballot) if machine.state.leader_of(b) == liar.signer.peer]
        if head.anchor is None or not mine:
            return true_promise(acceptor, run, epoch, ballot, signer)
        nowhere = m.FrameRef(liar.signer.peer, bytes(32), 0, 30, 100, head.outer_step)
        record = record_after(head, frames=(nowhere,))
        text = m.vote_text(record.run, record.epoch, record.round, mine[-1], record.hash)
        false = paxos.Acceptor(head.round + 1, ballot, mine[-1], record, liar.signer.sign(text))
        return true_promise(false, run, epoch, ballot, signer)

    true_promise = paxos.promise

    def of_the_liar_only(acceptor, run, epoch, ballot, signer):
        make = promised if signer.peer == liar.signer.peer else true_promise
        return make(acceptor, run, epoch, ballot, signer)

    voter.promise = of_the_liar_only
    try:
        with acting_as(liar.signer.peer, leader, lead=lambda state, now: None):
            await anyio.sleep_forever()
    finally:
        voter.promise = true_promise


async def propose(lab, liar, change) -> None:
    """Leads as everybody does, and changes something in each record that it makes."""
    made, me = leader.make_record, liar.signer.peer
    with (
        acting_as(me, leader, make_record=lambda *args, **more: change(made(*args, **more))),
        acting_as(me, voter, _stands_behind=lambda state, proposal, now: True),
    ):
        await anyio.sleep_forever()


def final(record: m.Record) -> m.Record:
    return replace(record, final=True)


def of_its_friends(record: m.Record) -> m.Record:
    """Two honest members out, twenty invented ones in."""
    return replace(record, next_members=tuple(sorted({*record.members[2:], *INVENTED})))


def without_two(record: m.Record) -> m.Record:
    return replace(record, next_members=record.members[2:] or record.members)


def check(lab, liar) -> None:
    check_nobody_is_out(lab, liar)
    for member in honest(lab, liar):
        assert not INVENTED & set(member.node.driver.head.members)


LIES = {
    "prepares-all-the-time": prepare_all_the_time,
    "ends-the-run": lambda lab, liar: propose(lab, liar, final),
    "makes-members": lambda lab, liar: propose(lab, liar, of_its_friends),
    "drops-members": lambda lab, liar: propose(lab, liar, without_two),
}


@pytest.mark.long
def test_in_a_swarm_of_which_some_have_no_seat_it_does_not_either(run_lab, terms):
    one_after_the_other(run_lab, terms("sparseloco"), 24, [*LIES.values(), lie_in_promises], 10.0, check)


@pytest.mark.parametrize("n", SIZES)
def test_a_lying_promise_costs_no_more_than_that_its_peer_never_leads(run_lab, terms, n):
    manifest = terms("sparseloco")
    silent = rounds_in(run_lab, manifest, n, SECONDS, never_lead, check)
    made = rounds_in(run_lab, manifest, n, SECONDS, lie_in_promises, check)
    assert made >= CLEAN_ENOUGH * silent, f"{made} rounds, {silent} where it is silent"


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("n", SIZES)
def test_a_liar_among_leaders_and_voters_ends_no_run_puts_nobody_out_and_stops_no_round(run_lab, terms, n, lie):
    check_it_costs_little(run_lab, terms("sparseloco"), n, SECONDS, LIES[lie], check)
