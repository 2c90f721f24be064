"""Frames begun one after another: as fast as the uplink carries them, whoever does not take his."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest
import trio
import trio.testing

from decentral.flow.schedule import FEW, HASTE, SendQueue, shifted

RATE, NBYTES = 1e6, 100_000


def begun(uplink, count, takes):
    """When each of ``count`` frames began, in virtual time; ``takes(n)`` seconds after that the n-th has arrived."""
    times = []

    async def one(turns, number):
        await anyio.sleep(takes(number))
        turns.end()

    async def main():
        turns = SendQueue(lambda: uplink)
        async with anyio.create_task_group() as group:
            for number in range(count):
                await turns.begin(NBYTES)
                times.append(anyio.current_time())
                group.start_soon(one, turns, number)

    async def from_zero():
        began = anyio.current_time()
        await main()
        return began

    began = trio.run(from_zero, clock=trio.testing.MockClock(autojump_threshold=0))
    return [time - began for time in times]


def test_all_begin_at_once_while_nobody_knows_what_the_uplink_carries():
    assert begun(None, 7, lambda n: 3.0) == [0.0] * 7


def test_a_few_begin_at_once_and_then_as_many_as_the_uplink_carries():
    each = NBYTES / (HASTE * RATE)
    assert begun(RATE, 6, lambda n: 10.0)[:FEW] == [0.0] * FEW
    times = begun(RATE, 30, lambda n: 10.0)[FEW:]
    assert [b - a for a, b in pairwise(times)] == pytest.approx([each] * (len(times) - 1))


def test_where_the_estimate_is_far_too_low_a_few_are_always_under_way():
    times = begun(RATE / 1000, 12, lambda n: 1.0)
    assert times == pytest.approx([n // FEW for n in range(12)])


def test_peers_that_take_nothing_hold_nobody_up():
    times = begun(RATE, 30, lambda n: 1e6 if n < FEW else 0.1)
    assert times[-1] == pytest.approx((30 - FEW) * NBYTES / (HASTE * RATE), rel=0.1)


def test_each_peer_begins_with_the_next_so_that_nobody_receives_from_two_at_once():
    peers = [bytes([n]) * 32 for n in range(5)]
    orders = [shifted(reversed(peers), peer)[:-1] for peer in peers]
    assert all(set(turn) == set(peers) for turn in zip(*orders, strict=True))
    assert shifted(peers, peers[2]) == [peers[3], peers[4], peers[0], peers[1], peers[2]]
    assert shifted(peers[:2], peers[2]) == peers[:2]
