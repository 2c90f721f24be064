"""One peer of five says every message of the protocol, with each field of it wrong in turn."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial

import anyio
import pytest

from decentral.consensus import paxos
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.messages import _TYPES
from tests.kit.liars import (
    at_a_head,
    check_it_costs_little,
    check_nobody_is_out,
    commit_of,
    contribution_frame,
    honest,
    record_after,
    say,
)
from tests.kit.nodes import small_model
from tests.kit.tables import rows_but

SECONDS = 160.0  # for all lies among five
PACE = 0.1  # s between two lies


def templates(liar, head) -> list[m.Message]:
    """Each message as it may be said at ``head`` by this peer."""
    me, state = liar.signer, liar.node.driver.machine.state
    frame = contribution_frame(liar, head, 1.0)
    ref = m.FrameRef(me.peer, frame.hash, 0, 30, 100, head.outer_step)
    record = record_after(head, frames=(ref,))
    text = m.vote_text(record.run, record.epoch, record.round, 0, record.hash)
    vote = me.sign(text)
    ballot = next((b for b in range(1, 50) if state.leader_of(b) == me.peer), 1)
    accepted = paxos.Acceptor(record.round, ballot, 0, record, vote)
    asked = m.JoinRequest(head.round, head.hash, me.sign(m.join_text(head.run, head.round, head.hash)))
    return [
        m.Offer(head.epoch, head.round + 1, 0, head.anchor, frame.hash, len(frame.body), 30, 100, head.outer_step),
        m.ReducePlan(head.epoch, head.round + 1, 0, 0, (ref,), ((me.peer, 0, 16),)),
        m.Missing(head.epoch, head.round + 1, 0, head.members),
        m.Proposal(0, record, vote),
        m.Proposal(ballot, record, me.sign(m.vote_text(record.run, record.epoch, record.round, ballot, record.hash))),
        m.Vote(head.epoch, head.round + 1, 0, record.hash, vote),
        m.Prepare(head.epoch, head.round + 1, ballot),
        paxos.promise(accepted, head.run, head.epoch, ballot, me),
        commit_of(record, [me]),
        asked,
        m.Goodbye(),
        m.Behind(head.round),
        m.Refusal(head.epoch, head.round + 1, 0, record.hash, head.members, True),
        paxos.farewell(accepted, head.run, head.epoch, me),
        liar.node.directory.own.seal(),
    ]


def wrong_values(value: object, liar, head) -> list[object]:
    """What may stand in a field instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, value + 1, max(0, value - 1), value + 1000, 2**31 - 1, 2**63]
    if isinstance(value, bytes):
        return [bytes(len(value)), bytes(b ^ 1 for b in value)]
    if isinstance(value, m.Record):
        return [replace(value, **{name: wrong}) for name, wrong in wrong_fields(value, liar, head)]
    if isinstance(value, m.Certificate):
        return [m.Certificate(1, value.votes), m.Certificate(0, ())]
    if isinstance(value, tuple):
        return [(), value[:1], value[1:], (liar.signer.peer,), tuple(sorted(head.members))[:2]]
    return []


def wrong_fields(message: object, liar, head) -> Iterator[tuple[str, object]]:
    for field in fields(message):
        for wrong in wrong_values(getattr(message, field.name), liar, head):
            yield field.name, wrong


def lies(message: m.Message, liar, head) -> Iterator[m.Message]:
    """The message as it is, and with each field wrong; those that can be written down at all."""
    yield message
    for name, wrong in wrong_fields(message, liar, head):
        try:
            lie = signed_again(replace(message, **{name: wrong}), wrong, liar)
            m.encode(lie)
        except (PayloadError, AttributeError, TypeError, ValueError, struct.error):
            continue  # nobody can write that down
        yield lie


def signed_again(lie: m.Message, wrong: object, liar) -> m.Message:
    """With the votes of its sender for a record that is another now."""
    if not isinstance(wrong, m.Record):
        return lie
    if isinstance(lie, m.Commit):
        return commit_of(wrong, [liar.signer])
    if isinstance(lie, m.Proposal):
        text = m.vote_text(wrong.run, wrong.epoch, wrong.round, lie.ballot, wrong.hash)
        return replace(lie, signature=liar.signer.sign(text))
    return lie


async def say_everything(lab, liar, every: int) -> None:
    """A lie out of so many, of each kind of message."""
    count = len(templates(liar, await at_a_head(liar)))
    assert {type(message) for message in templates(liar, await at_a_head(liar))} == set(_TYPES.values())
    for number in range(count):
        told = 0
        while True:
            head = await at_a_head(liar)
            all_of_it = list(lies(templates(liar, head)[number], liar, head))[::every]
            if told >= len(all_of_it):
                break
            for member in honest(lab, liar):
                lab.group.start_soon(say, liar, member, all_of_it[told])
            told += 1
            await anyio.sleep(PACE)
    liar.said_all = True


def check(lab, liar) -> None:
    check_nobody_is_out(lab, liar)
    assert liar.said_all, "there was more to say"
    for member in honest(lab, liar):
        for anchor_N in member.node.replica.anchors:
            assert anchor_N.abs().max() < 50.0


@pytest.mark.parametrize(("n", "every"), rows_but([(3, 4)], [(3, 4), (5, 1)]))
@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
def test_whatever_field_of_whatever_message_is_wrong_the_run_goes_on(run_lab, terms, preset, n, every):
    lie = partial(say_everything, every=every)
    check_it_costs_little(run_lab, terms(preset), n, SECONDS / every, lie, check, small_model)
