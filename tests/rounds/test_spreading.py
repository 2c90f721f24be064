"""What is learnt of the own uplink by sending a frame, how fast pieces go, and what is not asked for twice."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest
import trio
import trio.testing

from decentral.errors import PayloadError
from decentral.exchange import gather
from decentral.exchange.arrivals import Arrivals
from decentral.exchange.passing import HASTE, PIECE, Passing
from decentral.exchange.spread import Spread
from decentral.rounds.spreading import Spreading, all_equal
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import serve_requests
from decentral.transport.sequences import serve_sequences
from decentral.transport.throttle import ThrottledTransport
from decentral.wire.frames import Header, Kind, seal
from decentral.wire.keys import Signer

RATE, NBYTES = 250_000.0, 500_000
SIGNERS = [Signer(bytes([number] * 32)) for number in range(1, 7)]


def frame():
    header = Header(Kind.CONTRIBUTION, bytes(32), 0, 1, 0, 0, 1, 0, bytes(32), SIGNERS[0].peer, 1, 1)
    return seal(header, bytes(NBYTES), SIGNERS[0])


def fail(*_):
    raise AssertionError("nothing comes here")


def play(script, take):
    """``script(spreading, others)`` in virtual time; the uplink has RATE, and ``take`` gets what the others get."""
    network = MemoryNetwork(latency=0.02)

    async def answer(peer, data):
        await take(peer, data)
        return b""

    async def main():
        sender, *others = (network.transport(signer) for signer in SIGNERS)
        network.set_uplink(sender.peer, RATE)
        throttled = ThrottledTransport(sender, urgent=())
        spreading = Spreading(throttled, sender.peer, Arrivals(), all_equal, lambda: None, fail, fail, fail)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(throttled)
            for other in others:
                serve_requests(other, gather.PUSH, answer, limit=1 << 20)
                serve_sequences(other, PIECE, take, limit=1 << 20, watch=Arrivals().push)
                await stack.enter_async_context(other)
                await throttled.connect(other.peer, other.addresses())
            await script(spreading, [other.peer for other in others])

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def keep(peer, data):
    """Take it."""


async def refuse(peer, data):
    raise PayloadError("as the test wants it")


def test_one_frame_that_all_have_tells_the_uplink():
    async def script(spreading, others):
        await spreading.give(frame(), others, fail)
        assert spreading.transport.uplink == pytest.approx(RATE, rel=0.05)

    play(script, keep)


def test_a_receiver_that_takes_long_does_not_make_the_uplink_a_thin_one():
    slow: list[bytes] = []

    async def dawdle(peer, data):
        if not slow:
            slow.append(data)
            await anyio.sleep(30.0)

    async def script(spreading, others):
        await spreading.give(frame(), others, fail)
        assert spreading.transport.uplink == pytest.approx(RATE * 4 / 5, rel=0.05)

    play(script, dawdle)


def test_a_frame_that_nobody_takes_tells_nothing_and_fails_nobody():
    async def script(spreading, others):
        await spreading.give(frame(), others, fail)
        assert spreading.transport.uplink is None

    play(script, refuse)


def test_pieces_go_little_faster_than_the_uplink_is_thought_to_be():
    came: list[float] = []

    async def note(peer, data):
        came.append(anyio.current_time())

    async def script(spreading, others):
        data = frame().to_bytes()
        began, arrived = anyio.current_time(), []
        passing = Passing(spreading.transport, others, data, arrived.append, fail)
        share = len(data) // 5
        await passing.send(Spread(0, (0, share, share, share, share, len(data) - 4 * share)), 0, RATE / 10)
        assert len(data) / (HASTE * RATE / 10) <= max(came) - began + 1.0 <= len(data) / (RATE / 10) + 1.0
        assert sum(arrived) == len(data)

    play(script, note)


def test_who_is_not_reached_is_told_of_at_once_and_not_when_the_others_have_it():
    told: list[float] = []

    async def dawdle(peer, data):
        await anyio.sleep(30.0)

    async def script(spreading, others):
        async def note(peer):
            assert peer == bytes(32)
            told.append(anyio.current_time() - began)

        began = anyio.current_time()
        await spreading.give(frame(), [*others, bytes(32)], note)
        assert told
        assert told[0] < 1.0
        assert anyio.current_time() - began > 30.0

    play(script, dawdle)


def test_frames_that_are_sent_at_the_same_time_measure_the_uplink_together():
    """Slices of a reduce go to one peer each: alone, each tells its share of the uplink only."""

    async def take(peer, data):
        pass

    found = []

    async def script(spreading, others):
        async with anyio.create_task_group() as group:
            for other in others:
                group.start_soon(spreading.give, frame(), [other], fail)
        found.append(spreading.transport.uplink)

    play(script, take)
    assert found == [pytest.approx(RATE, rel=0.1)]
