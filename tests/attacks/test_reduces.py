"""Owners of a reduce that lie: about who sent them what, about their lines, and about what they summed.

The model has blocks for all: of a tiny one a single peer owns everything, and it is not the liar.
"""

from __future__ import annotations

import anyio
import pytest

from decentral.wire import messages as m
from tests.kit.liars import at_a_head, check_it_costs_little, check_nobody_is_out, honest, rounds_in, say
from tests.kit.nodes import small_model
from tests.kit.tables import long_but

SECONDS = 60.0
SIZES = long_but([3], [3, 5])


def lied(liar) -> None:
    """It had the occasion to."""
    liar.lies = getattr(liar, "lies", 0) + 1


def check_it_lied(lab, liar) -> None:
    check_nobody_is_out(lab, liar)
    assert getattr(liar, "lies", 0), "it owned no part of any reduce"


async def blame_everybody(lab, liar) -> None:
    """Tells whoever leads, ten times a second, that nobody sent it anything of the plan."""
    while True:
        head = await at_a_head(liar)
        for member in honest(lab, liar):
            leading = member.node.driver.machine.state.leading
            if leading is not None and leading.planned is not None:
                blamed = tuple(sorted(o.signer.peer for o in honest(lab, liar)))
                missing = m.Missing(head.epoch, head.round + 1, leading.planned.plan.number, blamed)
                if liar.signer.peer in leading.planned.owners:
                    lied(liar)
                lab.group.start_soon(say, liar, member, missing)
        await anyio.sleep(0.1)


async def return_what_it_likes(lab, liar) -> None:
    """Its results are the mean of what it was sent, a billion times."""
    reducer = liar.node.driver.reducer
    true_result = reducer._result

    def result(reduction, head):
        lied(liar)
        for peer, slice_N in list(reduction.slices.items()):
            reduction.slices[peer] = slice_N * 1e9
        return true_result(reduction, head)

    reducer._result = result
    await anyio.sleep_forever()


def check_anchors(lab, liar) -> None:
    check_it_lied(lab, liar)
    for member in honest(lab, liar):
        for anchor_N in member.node.replica.anchors:
            assert anchor_N.abs().max() < 100.0, "targets are of length one"


@pytest.mark.parametrize("n", SIZES)
def test_an_owner_that_blames_everybody_stops_no_round(run_lab, terms, n):
    check_it_costs_little(run_lab, terms("diloco"), n, SECONDS, blame_everybody, check_it_lied, small_model)


# Its owner accepts it in the ballot in which the others refuse it, and carries it on where it leads the next.
@pytest.mark.parametrize("n", SIZES)
def test_a_result_that_is_no_mean_is_applied_by_nobody(run_lab, terms, n):
    check_it_costs_little(run_lab, terms("diloco"), n, SECONDS, return_what_it_likes, check_anchors, small_model)


def test_a_claimed_line_counts_for_what_was_had_from_it(run_lab, terms):
    async def claim(lab, liar) -> None:
        for member in honest(lab, liar):
            member.node.uplink = lambda: 1e6
        liar.node.uplink = lambda: 1e12
        await anyio.sleep_forever()

    def check(lab, liar) -> None:
        check_nobody_is_out(lab, liar)
        for member in honest(lab, liar):
            peers = member.node.driver.head.members
            assert liar.signer.peer in peers
            ranges = member.node.driver.state.terms.partition(0, peers)  # as it plans them where it leads
            owned = sum(stop - start for owner, start, stop in ranges if owner == liar.signer.peer)
            assert owned <= 0.5 * ranges[-1][2], "a fifth is its share"

    rounds_in(run_lab, terms("diloco"), 5, 60.0, claim, check, small_model)
