"""One vote of one peer: a record that drops all others counts as signed by all who are left, and nobody takes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest

from decentral.consensus.chain import VOTING, leaders
from decentral.wire import messages as m
from tests.kit.liars import (
    at_a_head,
    check_it_costs_little,
    check_nobody_is_out,
    commit_of,
    contribution_frame,
    honest,
    one_after_the_other,
    record_after,
    say,
    say_to_all,
    swarm_of,
)
from tests.kit.nodes import tiny_model
from tests.kit.tables import long_but

SIZES = long_but([3], [3, 4, 5])
SECONDS = 60.0


def at_each_head(make: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A lie for each head that the honest peers come to, made by ``make`` of it."""

    async def lie(lab, liar, **changes) -> None:
        told = None
        while True:
            head = await at_a_head(honest(lab, liar)[0])
            if head.hash != told:
                told = head.hash
                await make(lab, liar, head, **changes)
            await anyio.sleep(0.1)

    return lie


def alone_after(liar, head, **changes) -> m.Commit:
    """A record that drops everybody else, by its one vote."""
    return commit_of(record_after(head, next_members=(liar.signer.peer,), **changes), [liar.signer])


def nowhere(liar, head) -> m.FrameRef:
    """A frame that nobody has."""
    return m.FrameRef(liar.signer.peer, bytes(32), 0, 30, 100, head.outer_step)


@at_each_head
async def expel(lab, liar, head, **changes) -> None:
    await say_to_all(lab, liar, alone_after(liar, head, **changes))


@at_each_head
async def commit_own_frame(lab, liar, head) -> None:
    """Its frame is given to all, and named alone in a record that drops everybody."""
    frame = contribution_frame(liar, head, 1000.0)
    await liar.node.driver.frames.broadcast.give(frame, [o.signer.peer for o in honest(lab, liar)], nobody)
    named = m.FrameRef(frame.header.sender, frame.hash, 0, frame.header.steps, frame.header.tokens, 0)
    await say_to_all(lab, liar, alone_after(liar, head, frames=(named,)))


async def nobody(peer: bytes) -> None:
    """Whom it cannot reach it does not mourn."""


@at_each_head
async def tell_two_stories(lab, liar, head) -> None:
    """Two records of one round, each with its own one vote, told to one half each."""
    stories = alone_after(liar, head), alone_after(liar, head, final=True)
    for number, member in enumerate(honest(lab, liar)):
        await say(liar, member, stories[number % 2])


@at_each_head
async def commit_a_frame_that_is_nowhere(lab, liar, head) -> None:
    await say_to_all(lab, liar, alone_after(liar, head, frames=(nowhere(liar, head),)))


LIES = {
    "drops-the-others": expel,
    "ends-the-run": partial(expel, final=True),
    "commits-its-own-frame": commit_own_frame,
    "tells-two-stories": tell_two_stories,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("n", SIZES)
def test_a_record_that_drops_all_others_by_one_vote_is_taken_by_nobody(run_lab, terms, n, lie):
    check_it_costs_little(run_lab, terms("sparseloco"), n, SECONDS, LIES[lie], check_nobody_is_out)


@pytest.mark.long
def test_in_a_swarm_of_which_some_have_no_seat_nobody_takes_such_a_record_either(run_lab, terms):
    one_after_the_other(run_lab, terms("sparseloco"), 24, list(LIES.values()), 10.0, check_nobody_is_out)


@pytest.mark.long
def test_the_vote_of_a_member_without_a_seat_puts_nobody_out(run_lab, terms):
    async def script(lab) -> None:
        await swarm_of(lab, 24)
        head = await at_a_head(lab.members[0])
        liar = next(one for one in lab.members if one.signer.peer not in VOTING.committee(head))
        with anyio.move_on_after(5.0):
            await expel(lab, liar)
        check_nobody_is_out(lab, liar)
        await lab.rounds(1)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_a_stranger_that_is_let_in_ends_no_open_run(run_lab, terms):
    """It asks to come in, is a member with the next commit, and has one vote for a record that ends the run."""

    async def script(lab) -> None:
        await swarm_of(lab, 5)
        stranger = lab.add()
        await lab.until(lambda: all(stranger.signer.peer in one.node.driver.head.members for one in lab.members))
        with anyio.move_on_after(20.0):
            await expel(lab, stranger, final=True)
        check_nobody_is_out(lab, stranger)
        await lab.rounds(2)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


@pytest.mark.parametrize("n", long_but([3], [3, 5]))
def test_a_record_whose_frame_is_nowhere_stops_no_round(run_lab, terms, n):
    lie = commit_a_frame_that_is_nowhere
    check_it_costs_little(run_lab, terms("sparseloco"), n, SECONDS, lie, check_nobody_is_out)


def test_a_commit_that_all_signed_and_whose_frame_is_nowhere_is_put_back(run_lab, terms):
    """Whoever signed it, the frame is gone: the round is decided anew, by another record."""

    async def script(lab) -> None:
        await swarm_of(lab, 4)
        for member in lab.members:
            member.idle = True
        await lab.until(lambda: all(m.node.driver.state.pending is None for m in lab.members))
        await lab.until(lambda: len({m.node.driver.head.hash for m in lab.members}) == 1)
        head = await at_a_head(lab.members[0])
        last = lab.members[-1]
        record = record_after(head, frames=(nowhere(last, head),))
        await say_to_all(lab, last, commit_of(record, [member.signer for member in lab.members]))
        for member in lab.members:
            member.idle = False
        await lab.rounds(3)
        assert leaders(head)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
