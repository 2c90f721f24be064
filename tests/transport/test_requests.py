"""Transfers under virtual time: a long one is fine while bytes flow; a silent one and a dribbler are cut."""

from __future__ import annotations

from collections.abc import Awaitable

import anyio
import pytest

from decentral.errors import PeerUnreachable, StreamClosed
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import (
    GRACE,
    LEAST_RATE,
    PREFIX_NBYTES,
    SENDING_STALL,
    STALL,
    Holdable,
    Watchdog,
    notify,
    request,
    serve_requests,
)
from decentral.wire.keys import Signer

ECHO = "/test/echo"
UPLINK = 625_000  # bytes/s: 5 Mbit/s


pytestmark = pytest.mark.usefixtures("virtual_time")


def pair(bandwidth: float | None = None):
    network = MemoryNetwork(latency=0.05, bandwidth=bandwidth)
    return network.transport(Signer.generate()), network.transport(Signer.generate())


async def seconds_until(error: type[Exception], work: Awaitable[object]) -> float:
    began = anyio.current_time()
    with pytest.raises(error, match="stood still"):
        await work
    return anyio.current_time() - began


async def test_a_frame_of_100_mb_over_5_mbit_is_pushed_though_it_takes_160_seconds():
    a, b = pair(UPLINK)
    came = []

    async def keep(peer, body):
        came.append(len(body))
        return b""

    serve_requests(b, ECHO, keep, limit=1 << 30)
    async with a, b:
        began = anyio.current_time()
        await notify(a, b.peer, ECHO, bytes(100_000_000), timeout=10.0)
        while not came:
            await anyio.sleep(0.1)
        assert 159 < anyio.current_time() - began < 165
    assert came == [100_000_000]


async def test_a_long_answer_is_waited_for_beyond_the_timeout_and_a_missing_one_is_not():
    a, b = pair(UPLINK)

    async def serve(peer, body):
        if body == b"think":
            await anyio.sleep(60)
        return bytes(20_000_000)

    serve_requests(b, ECHO, serve, limit=100)
    async with a, b:
        answer = await request(a, b.peer, ECHO, b"long", limit=1 << 30, timeout=5.0)
        assert len(answer) == 20_000_000
        began = anyio.current_time()
        with pytest.raises(PeerUnreachable, match="not done within 5 s"):
            await request(a, b.peer, ECHO, b"think", limit=1 << 30, timeout=5.0)
        assert anyio.current_time() - began == pytest.approx(5.1, abs=0.1)


async def answer_then(stream, nbytes: int, gap: float, piece: int) -> None:
    """Announce a megabyte, send ``nbytes`` of it at once, then ``piece`` bytes every ``gap`` seconds."""
    await stream.receive_exactly(PREFIX_NBYTES)
    await stream.send((1 << 20).to_bytes(PREFIX_NBYTES, "little"))
    await stream.send(bytes(nbytes))
    while True:
        await anyio.sleep(gap)
        await stream.send(bytes(piece))


@pytest.mark.parametrize(
    ("gap", "piece", "longest"),
    [(1000.0, 1, STALL), (STALL - 1, 1, GRACE), (1.0, LEAST_RATE // 2, 2 * GRACE)],
    ids=["silent", "a byte every nine seconds", "half the least rate"],
)
async def test_a_silent_or_creeping_donor_is_cut(gap, piece, longest):
    a, b = pair()
    b.serve(ECHO, lambda stream: answer_then(stream, 1000, gap, piece))
    async with a, b:
        took = await seconds_until(StreamClosed, request(a, b.peer, ECHO, b"", limit=1 << 20, timeout=5.0))
        assert longest - 1 <= took <= longest + 2


async def test_a_peer_that_reads_nothing_does_not_hold_its_sender():
    a, b = pair()

    async def deaf(stream):
        await anyio.sleep_forever()

    b.serve(ECHO, deaf)
    async with a, b:
        took = await seconds_until(StreamClosed, notify(a, b.peer, ECHO, bytes(4 << 20), timeout=5.0))
        assert took == pytest.approx(SENDING_STALL, abs=1)


class Held(Holdable):
    """A stream that somebody holds up."""

    peer = Signer.generate().peer


async def creep(stream: Held) -> None:
    """A byte every nine seconds, and a hundred seconds of our own before each."""
    with Watchdog(stream, "a body") as on_bytes:
        while True:
            with stream.held():
                await anyio.sleep(100)
            await anyio.sleep(STALL - 1)
            on_bytes(1)


async def test_the_time_that_a_stream_is_held_here_is_left_out_and_no_other():
    stream = Held()
    took = await seconds_until(StreamClosed, creep(stream))
    assert took - 400 == pytest.approx(GRACE, abs=1), "the least rate counts the time between, and that only"
    assert not stream.watchdogs


async def test_a_dribbling_stranger_gives_its_stream_and_its_memory_back():
    a, b = pair()

    async def never(peer, body):
        raise AssertionError("the body never came whole")

    serve_requests(b, ECHO, never, limit=1 << 26)
    async with a, b:
        silent, dribbler = await a.open(b.peer, ECHO), await a.open(b.peer, ECHO)
        await dribbler.send((1 << 26).to_bytes(PREFIX_NBYTES, "little"))
        await dribbler.send(bytes(1000))
        await anyio.sleep(1)
        assert b.budget.held(a.peer) == (2, 1 << 26)
        for _ in range(int(GRACE // (STALL - 1)) + 1):
            await anyio.sleep(STALL - 1)
            if b.budget.held(a.peer)[0]:
                await dribbler.send(b"x")
        assert b.budget.held(a.peer) == (0, 0)
        await silent.aclose()
        await dribbler.aclose()


async def test_an_uplink_that_slows_down_forty_times_is_not_taken_for_a_dead_one():
    network = MemoryNetwork(latency=0.05, bandwidth=8_000_000)
    a, b = network.transport(Signer.generate()), network.transport(Signer.generate())
    serve_requests(b, ECHO, lambda peer, body: _length(body), limit=1 << 30)
    async with a, b, anyio.create_task_group() as group:

        async def slow_down():
            await anyio.sleep(1.0)
            network.set_uplink(a.peer, 200_000)  # also of the streams that are open

        group.start_soon(slow_down)
        began = anyio.current_time()
        answer = await request(a, b.peer, ECHO, bytes(12_000_000), limit=100, timeout=10.0)
        assert answer == b"12000000"
        assert anyio.current_time() - began > 15


async def _length(body: bytes) -> bytes:
    return str(len(body)).encode()
