"""Transfers under virtual time: a long one is fine while bytes flow; a silent one and a dribbler are cut."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

import anyio
import pytest

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed
from decentral.flow.budget import Limits
from decentral.transport.base import KEPT_EACH, KEPT_FOR, KeptStreams
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


# ---- streams that are kept ----


def members(**limits):
    """Two members of a run, without letters, and how many streams the first has opened."""
    network = MemoryNetwork(latency=0.05, long=frozenset({ECHO}))
    a, b = (network.transport(Signer.generate(), limits=Limits(**limits)) for _ in range(2))
    for one, other in ((a, b), (b, a)):
        one.budget.prefer({other.peer})
        one.kept = KeptStreams(one.budget.comes_first)
    opened, open_ = [], a.open

    async def count_and_open(peer, protocol):
        opened.append(protocol)
        return await open_(peer, protocol)

    a.open = count_and_open
    return a, b, opened


async def test_members_say_one_thing_after_another_on_one_stream():
    a, b, opened = members()
    serve_requests(b, ECHO, echo, limit=100)
    async with a, b:
        for number in range(20):
            word = b"%d" % number
            if number % 2:
                assert await request(a, b.peer, ECHO, word, limit=100, timeout=5.0) == word
            else:
                await notify(a, b.peer, ECHO, b"", timeout=5.0)
            await anyio.sleep(1.0)
        assert len(opened) == 1
        assert b.budget.held(a.peer) == (1, 0)
        await anyio.sleep(KEPT_FOR)
        assert await request(a, b.peer, ECHO, b"later", limit=100, timeout=5.0) == b"later"
        assert len(opened) == 2, "a stream is kept for a while"
        assert len(a.kept) == 1


async def test_what_is_said_at_once_goes_on_streams_of_its_own_of_which_few_are_kept():
    a, b, opened = members()
    serve_requests(b, ECHO, echo, limit=100)
    async with a, b:
        for _ in range(2):
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(partial(request, a, b.peer, ECHO, b"now", limit=100, timeout=5.0))
        assert len(opened) == 5 + 5 - KEPT_EACH
        assert len(a.kept) == KEPT_EACH
        await anyio.sleep(1.0)
        assert b.budget.held(a.peer)[0] == KEPT_EACH


async def test_outsiders_get_a_stream_for_each_thing_they_say():
    a, b, opened = members()
    a.budget.prefer(())
    b.budget.prefer(())
    serve_requests(b, ECHO, echo, limit=100)
    async with a, b:
        for _ in range(3):
            assert await request(a, b.peer, ECHO, b"hm", limit=100, timeout=5.0) == b"hm"
        assert len(opened) == 3
        await anyio.sleep(1.0)
        assert b.budget.held(a.peer) == (0, 0)


@pytest.mark.parametrize("kind", ["ask", "tell"])
async def test_what_was_said_on_a_stream_that_had_ended_is_said_again(kind):
    a, b, opened = members()
    heard = []

    async def serve(peer, body):
        heard.append(body)
        return body if kind == "ask" else b""

    serve_requests(b, ECHO, serve, limit=100)
    async with a, b:
        for word in (b"one", b"two"):
            if kind == "ask":
                assert await request(a, b.peer, ECHO, word, limit=100, timeout=5.0) == word
            else:
                await notify(a, b.peer, ECHO, word, timeout=5.0)
            b.stop()  # all that it serves, as by a restart
            await anyio.sleep(1.0)
        assert heard == [b"one", b"two"]
        assert len(opened) == 2


async def test_a_body_that_is_refused_ends_its_stream_and_the_next_one_is_served():
    a, b, _ = members()

    async def serve(peer, body):
        if body == b"bad":
            raise PayloadError("drop it")
        return body

    serve_requests(b, ECHO, serve, limit=100)
    async with a, b:
        assert await request(a, b.peer, ECHO, b"good", limit=100, timeout=5.0) == b"good"
        with pytest.raises(StreamClosed):
            await request(a, b.peer, ECHO, b"bad", limit=100, timeout=5.0)
        assert len(a.kept) == 0
        assert await request(a, b.peer, ECHO, b"good", limit=100, timeout=5.0) == b"good"


async def test_a_large_body_goes_on_a_stream_of_its_own():
    """A stream that is kept may have ended, and then it would be sent for the second time."""
    a, b, opened = members()
    serve_requests(b, ECHO, lambda peer, body: _length(body), limit=1 << 20)
    async with a, b:
        assert await request(a, b.peer, ECHO, b"small", limit=100, timeout=5.0) == b"5"
        assert await request(a, b.peer, ECHO, bytes(1 << 20), limit=100, timeout=5.0) == b"1048576"
        assert len(opened) == 2


async def test_streams_that_rest_make_room_for_those_that_do_not():
    a, b, _ = members(peer_streams=2)
    serve_requests(b, ECHO, echo, limit=100)
    b.serve("/test/other", lambda stream: stream.receive_exactly(1))
    async with a, b:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(partial(request, a, b.peer, ECHO, b"now", limit=100, timeout=5.0))
        await anyio.sleep(1.0)
        assert b.budget.held(a.peer)[0] == 2
        others = [await a.open(b.peer, "/test/other") for _ in range(3)]
        await anyio.sleep(1.0)
        assert b.budget.held(a.peer)[0] == 2, "and no more than that"
        for stream in others:
            await stream.aclose()


async def echo(peer, body: bytes) -> bytes:
    return body


async def _length(body: bytes) -> bytes:
    return str(len(body)).encode()
