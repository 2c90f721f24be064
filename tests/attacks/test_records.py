"""One vote of one peer: a record that drops all others counts as signed by all who are left, and nobody takes it."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from decentral.consensus.chain import VOTING, leaders
from decentral.wire import messages as m
from decentral.wire.frames import Frame
from tests.kit.liars import (
    CLEAN_ENOUGH,
    at_a_head,
    check_nobody_is_out,
    commit_of,
    contribution_frame,
    honest,
    one_after_the_other,
    record_after,
    rounds_in,
    say,
    say_to_all,
)
from tests.kit.nodes import tiny_model

SIZES = [3, 4, 5]
SECONDS = 60.0


async def again_and_again(lab, liar, make) -> None:
    """One lie for each head that the honest peers come to."""
    told = None
    while True:
        head = await at_a_head(honest(lab, liar)[0])
        if head.hash != told:
            told = head.hash
            await make(head)
        await anyio.sleep(0.1)


async def expel(lab, liar, **changes) -> None:
    me = liar.signer

    async def one(head) -> None:
        record = record_after(head, next_members=(me.peer,), **changes)
        await say_to_all(lab, liar, commit_of(record, [me]))

    await again_and_again(lab, liar, one)


async def commit_own_frame(lab, liar) -> None:
    """Its frame is given to all, and named alone in a record that drops everybody."""

    async def one(head) -> None:
        frame = contribution_frame(liar, head, 1000.0)
        await liar.node.driver.frames.broadcast.give(frame, [o.signer.peer for o in honest(lab, liar)], nobody)
        record = record_after(head, frames=(named(frame),), next_members=(liar.signer.peer,))
        await say_to_all(lab, liar, commit_of(record, [liar.signer]))

    await again_and_again(lab, liar, one)


async def nobody(peer: bytes) -> None:
    """Whom it cannot reach it does not mourn."""


def named(frame: Frame) -> m.FrameRef:
    header = frame.header
    return m.FrameRef(header.sender, frame.hash, 0, header.steps, header.tokens, 0)


async def tell_two_stories(lab, liar) -> None:
    """Two records of one round, each with its own one vote, told to one half each."""

    async def one(head) -> None:
        first = record_after(head, next_members=(liar.signer.peer,))
        second = record_after(head, next_members=(liar.signer.peer,), final=True)
        for number, member in enumerate(honest(lab, liar)):
            await say(liar, member, commit_of((first, second)[number % 2], [liar.signer]))

    await again_and_again(lab, liar, one)


LIES = {
    "drops-the-others": expel,
    "ends-the-run": partial(expel, final=True),
    "commits-its-own-frame": commit_own_frame,
    "tells-two-stories": tell_two_stories,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("n", SIZES)
def test_a_record_that_drops_all_others_by_one_vote_is_taken_by_nobody(run_lab, terms, n, lie):
    manifest = terms("sparseloco")
    clean = rounds_in(run_lab, manifest, n, SECONDS, None)
    made = rounds_in(run_lab, manifest, n, SECONDS, LIES[lie], check_nobody_is_out)
    assert made >= CLEAN_ENOUGH * clean


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("n", [10, 24])
def test_in_a_large_swarm_nobody_takes_such_a_record_either(run_lab, terms, n):
    one_after_the_other(run_lab, terms("sparseloco"), n, list(LIES.values()), 10.0, check_nobody_is_out)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_vote_of_a_member_without_a_seat_puts_nobody_out(run_lab, terms):
    async def lie(lab, liar) -> None:
        head = await at_a_head(liar)
        assert liar.signer.peer not in VOTING.committee(head)
        await expel(lab, liar)

    async def script(lab) -> None:
        for _ in range(24):
            lab.add()
        await lab.all_members()
        await lab.rounds(2)
        head = await at_a_head(lab.members[0])
        liar = next(one for one in lab.members if one.signer.peer not in VOTING.committee(head))
        with anyio.move_on_after(5.0):
            await lie(lab, liar)
        check_nobody_is_out(lab, liar)
        await lab.rounds(1)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_a_stranger_that_is_let_in_ends_no_open_run(run_lab, terms):
    """It asks to come in, is a member with the next commit, and has one vote for a record that ends the run."""

    async def script(lab) -> None:
        for _ in range(5):
            lab.add()
        await lab.all_members()
        await lab.rounds(2)
        stranger = lab.add()
        await lab.until(lambda: all(stranger.signer.peer in one.node.driver.head.members for one in lab.members))
        with anyio.move_on_after(20.0):
            await expel(lab, stranger, final=True)
        check_nobody_is_out(lab, stranger)
        await lab.rounds(2)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


@pytest.mark.parametrize("n", [3, 5])
def test_a_record_whose_frame_is_nowhere_stops_no_round(run_lab, terms, n):
    async def lie(lab, liar) -> None:
        async def one(head) -> None:
            nowhere = m.FrameRef(liar.signer.peer, bytes(32), 0, 30, 100, head.outer_step)
            record = record_after(head, frames=(nowhere,), next_members=(liar.signer.peer,))
            await say_to_all(lab, liar, commit_of(record, [liar.signer]))

        await again_and_again(lab, liar, one)

    manifest = terms("sparseloco")
    clean = rounds_in(run_lab, manifest, n, SECONDS, None)
    assert rounds_in(run_lab, manifest, n, SECONDS, lie, check_nobody_is_out) >= CLEAN_ENOUGH * clean


def test_a_commit_that_all_signed_and_whose_frame_is_nowhere_is_put_back(run_lab, terms):
    """Whoever signed it, the frame is gone: the round is decided anew, by another record."""

    async def script(lab) -> None:
        for _ in range(4):
            lab.add()
        await lab.all_members()
        await lab.rounds(2)
        for member in lab.members:
            member.idle = True
        await lab.until(lambda: all(m.node.driver.pending is None for m in lab.members))
        await lab.until(lambda: len({m.node.driver.head.hash for m in lab.members}) == 1)
        head = await at_a_head(lab.members[0])
        nowhere = m.FrameRef(lab.members[-1].signer.peer, bytes(32), 0, 30, 100, head.outer_step)
        commit = commit_of(record_after(head, frames=(nowhere,)), [member.signer for member in lab.members])
        await say_to_all(lab, lab.members[-1], commit)
        for member in lab.members:
            member.idle = False
        await lab.rounds(3)
        assert leaders(head)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
