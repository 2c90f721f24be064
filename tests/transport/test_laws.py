"""What every transport promises, tried on each of them (decentral/transport/base.py states the laws)."""

from __future__ import annotations

from contextlib import AsyncExitStack, nullcontext

import anyio
import pytest

from decentral.errors import ConfigError, PayloadError, PeerUnreachable, StreamClosed, TransportError
from decentral.flow.budget import Limits
from decentral.flow.pacing import SECONDS, Window
from decentral.transport.requests import notify, request, sequence, serve_requests, serve_sequences
from decentral.wire.keys import Signer
from tests.kit.relays import ECHO, connected, echo, until

BLOCK = bytes(range(256)) * 1024  # 256 KiB


async def test_bytes_arrive_whole_and_in_order_whatever_the_pieces(world):
    sizes = [1, 70_000, 0, 262_144, 3, 1_000_000]
    data = (BLOCK * 6)[: sum(sizes)]

    async def back(stream):
        await stream.send(await stream.receive_exactly(len(data)))

    async with world.pair(serves=back) as (a, b):
        stream = await a.open(b.peer, ECHO)
        at = 0
        for size in sizes:
            await stream.send(memoryview(data)[at : at + size])
            at += size
        assert await stream.receive_exactly(5) == data[:5]
        assert await stream.receive_exactly(len(data) - 5) == data[5:]
        await stream.aclose()


async def test_both_ends_know_who_the_other_is(world):
    seen = []

    async def note(stream):
        seen.append(stream.peer)
        await stream.send(b"!")

    async with world.pair(serves=note) as (a, b):
        stream = await a.open(b.peer, ECHO)
        await stream.receive_exactly(1)
        assert (stream.peer, seen) == (b.peer, [a.peer])
        await stream.aclose()


async def test_reading_beyond_the_end_raises_stream_closed(world):
    async def three(stream):
        await stream.send(b"abc")

    async with world.pair(serves=three) as (a, b):
        stream = await a.open(b.peer, ECHO)
        with pytest.raises(StreamClosed, match="3 of 4 bytes came"):
            await stream.receive_exactly(4)
        await stream.aclose()
        await stream.aclose()


async def test_what_was_sent_before_closing_still_arrives_at_a_slow_reader(world):
    got, done = [], anyio.Event()

    async def later(stream):
        for _ in range(32):
            got.append(await stream.receive_exactly(len(BLOCK)))
        done.set()

    async with world.pair(serves=later) as (a, b):
        stream = await a.open(b.peer, ECHO)
        await stream.send(BLOCK * 32)
        await stream.aclose()
        await done.wait()
    assert b"".join(got) == BLOCK * 32


async def test_a_reader_that_does_not_read_holds_the_sender_back(world):
    release = anyio.Event()

    async def deaf(stream):
        await release.wait()

    async with world.pair(serves=deaf) as (a, b):
        stream = await a.open(b.peer, ECHO)
        with anyio.move_on_after(1.0) as scope:
            for _ in range(256):
                await stream.send(BLOCK)
        assert scope.cancelled_caught, "64 MiB went to nobody"
        assert a.traffic.of(b.peer).sent < 32 << 20
        release.set()
        with pytest.raises(StreamClosed):
            await stream.send(BLOCK * 256)
        await stream.aclose()


async def test_no_path_and_no_such_protocol_are_peer_unreachable(world):
    stranger = Signer.generate().peer
    async with world.pair() as (a, b):
        for peer, protocol in ((stranger, ECHO), (a.peer, ECHO), (b.peer, "/test/nobody-serves-this")):
            with pytest.raises(PeerUnreachable):
                await a.open(peer, protocol)
        for addresses in ((), ("rubbish",), ("/ip4/127.0.0.1/tcp/1",)):
            with pytest.raises(PeerUnreachable):
                await a.connect(stranger, addresses)


async def test_an_error_in_a_handler_ends_its_stream_and_nothing_else(world, caplog):
    async def wrong(peer, body):
        if body == b"bug":
            raise ZeroDivisionError
        if body == b"rule":
            raise PayloadError("breaks a rule")
        return body

    async with world.pair(answers=wrong) as (a, b):
        for body in (b"bug", b"rule"):
            with pytest.raises(StreamClosed):
                await request(a, b.peer, ECHO, body, limit=100, timeout=20)
        assert await request(a, b.peer, ECHO, b"fine", limit=100, timeout=20) == b"fine"
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


async def test_leaving_a_transport_ends_its_streams_and_makes_it_unreachable(world):
    a, b = world.transport(), world.transport()

    async def wait_for_ever(stream):
        await anyio.sleep_forever()

    b.serve(ECHO, wait_for_ever)
    async with a:
        async with b:
            await a.connect(b.peer, b.addresses())
            stream = await a.open(b.peer, ECHO)
        with pytest.raises(StreamClosed):
            await stream.receive_exactly(1)
        await stream.aclose()
        with pytest.raises(PeerUnreachable):
            await a.open(b.peer, ECHO)


async def test_an_error_of_the_body_leaves_the_transport_as_it_is(world):
    with pytest.raises(KeyError, match="mine"):
        async with world.transport():
            raise KeyError("mine")


async def test_a_protocol_is_served_once_and_before_the_start(world):
    a = world.transport()
    serve_requests(a, ECHO, echo, limit=1)
    with pytest.raises(ConfigError, match="served already"):
        serve_requests(a, ECHO, echo, limit=1)
    async with a:
        with pytest.raises(ConfigError, match="has started"):
            serve_requests(a, "/test/late", echo, limit=1)


async def test_both_sides_count_every_byte_length_prefixes_included(world):
    a, b = world.transport(), world.transport()
    came = anyio.Event()

    async def note(peer, body):
        came.set()
        return b""

    serve_requests(b, "/test/note", note, limit=100)
    async with connected(a, b, answers=echo):
        await request(a, b.peer, ECHO, bytes(300_000), limit=1 << 20, timeout=20)
        for count in (a.traffic.of(b.peer), b.traffic.of(a.peer)):
            assert (count.sent, count.received) == (300_004, 300_004)
        await notify(a, b.peer, "/test/note", b"12345", 20)
        await came.wait()
        assert (a.traffic.total.sent, b.traffic.total.received) == (300_013, 300_013)


async def test_a_body_longer_than_the_limit_is_refused_before_it_is_read(world):
    async with world.pair(answers=echo, limit=1000) as (a, b):
        with pytest.raises(PayloadError, match="1000 bytes announced, at most 999"):
            await request(a, b.peer, ECHO, bytes(1000), limit=999, timeout=20)
        with pytest.raises(TransportError):
            await request(a, b.peer, ECHO, bytes(8 << 20), limit=1 << 30, timeout=20)
        assert b.traffic.total.received < 2000


async def test_an_answer_that_does_not_come_in_time_is_peer_unreachable(world):
    async def think(peer, body):
        await anyio.sleep_forever()

    async with world.pair(answers=think) as (a, b):
        with pytest.raises(PeerUnreachable, match=r"not done within 0\.2 s"):
            await request(a, b.peer, ECHO, b"?", limit=100, timeout=0.2)


async def test_one_peer_may_hold_only_so_many_streams(world):
    a, b = world.transport(), world.transport(Limits(peer_streams=2))
    opened, started = [], []

    async def hold(stream):
        started.append(stream)
        await stream.send(b"!")
        await stream.receive_exactly(1)
        await stream.send(b"?")

    async def one_more():
        opened.append(await a.open(b.peer, ECHO))
        await opened[-1].receive_exactly(1)

    async with connected(a, b, serves=hold):
        await one_more()
        await one_more()
        with pytest.raises(StreamClosed):
            await one_more()
        assert b.budget.held(a.peer) == (2, 0)
        await opened[0].send(b".")
        await opened[0].receive_exactly(1)
        with pytest.raises(StreamClosed):  # its handler has returned
            await opened[0].receive_exactly(1)
        await one_more()
        for stream in opened:
            await stream.aclose()
    assert len(started) == 3


async def test_outsiders_who_hold_streams_and_bodies_keep_no_member_waiting_and_a_newcomer_gets_a_turn(world):
    member, newcomer, sybils = world.transport(), world.transport(), [world.transport() for _ in range(2)]
    b = world.transport(Limits(outsider_streams=4, outsider_nbytes=100_000))
    b.budget.prefer({member.peer})
    serve_requests(b, ECHO, echo, limit=100_000)
    async with AsyncExitStack() as stack:
        for one in (b, member, newcomer, *sybils):
            await stack.enter_async_context(one)
        for one in (member, newcomer, *sybils):
            await one.connect(b.peer, b.addresses())
        withheld = []
        for one in sybils * 3:
            withheld.append(await one.open(b.peer, ECHO))
            await withheld[-1].send((100_000).to_bytes(4, "little") + b"and no more")
        await until(lambda: sum(b.budget.held(one.peer)[0] for one in sybils) >= 4)
        body = bytes(99_999)
        assert await request(member, b.peer, ECHO, body, limit=len(body), timeout=5) == body
        assert await request(newcomer, b.peer, ECHO, b"?", limit=9, timeout=5) == b"?"
        for stream in withheld:
            await stream.aclose()


async def test_bodies_beyond_a_peers_budget_wait_for_each_other_and_all_arrive(world):
    a, b = world.transport(), world.transport(Limits(peer_nbytes=100_000))
    held = []

    async def weigh(peer, body):
        held.append(b.budget.held(peer)[1])
        await anyio.lowlevel.checkpoint()
        return body[:1]

    async with connected(a, b, answers=weigh), anyio.create_task_group() as group:
        for size in [40_000] * 8 + [300_000]:
            group.start_soon(lambda n: request(a, b.peer, ECHO, bytes(n), limit=1, timeout=30), size)
    assert len(held) == 9
    assert max(size for size in held if size != 300_000) <= 80_000


async def test_many_requests_at_once_are_answered_each_with_its_own(world):
    answers = {}

    async def ask(a, b, number):
        answers[number] = int(await request(a, b.peer, ECHO, str(number).encode(), limit=100, timeout=30))

    async with world.pair(answers=echo) as (a, b), anyio.create_task_group() as group:
        for number in range(60):
            group.start_soon(ask, a, b, number)
    assert answers == {number: number for number in range(60)}


async def test_large_bodies_that_cross_do_not_block_each_other(world):
    a, b = world.transport(), world.transport()
    body, answers = BLOCK * 64, []
    serve_requests(a, ECHO, echo, limit=len(body))

    async def ask(x, y):
        answers.append(await request(x, y.peer, ECHO, body, limit=len(body), timeout=30))

    async with connected(a, b, answers=echo, limit=len(body)), anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(ask, a, b)
            group.start_soon(ask, b, a)
    assert answers == [body] * 4


async def test_a_transfer_cancelled_half_way_leaves_the_connection_whole(world):
    body = BLOCK * 32
    async with world.pair(answers=echo, limit=len(body)) as (a, b):
        for milliseconds in range(0, 24, 2):
            with anyio.move_on_after(milliseconds / 1000):
                await request(a, b.peer, ECHO, body, limit=len(body), timeout=10)
        assert await request(a, b.peer, ECHO, body, limit=len(body), timeout=30) == body
        await until(lambda: b.budget.held(a.peer) == (0, 0))  # it has seen the last stream's end


# ---- sequences ----


async def test_bodies_of_a_sequence_arrive_whole_in_order_and_before_it_is_over(world):
    a, b = world.transport(), world.transport()
    bodies, came, moved = [bytes([n]) * (1 << n) for n in range(1, 18)], [], []

    async def take(peer, body):
        assert peer == a.peer
        came.append(body)

    serve_sequences(b, ECHO, take, limit=1 << 17, watch=lambda peer: nullcontext(moved.append))
    async with connected(a, b):
        async with sequence(a, b.peer, ECHO, 10.0, Window(lambda: None)) as send:
            for body in bodies:
                await send(body)
        assert came == bodies
        assert sum(moved) == sum(map(len, bodies))


async def test_no_more_of_a_sequence_is_under_way_than_its_window_allows(world):
    a, b = world.transport(), world.transport()
    sent, handled, under_way = [], [], []

    async def take(peer, body):
        await anyio.sleep(0.05)  # time enough for all that would come
        under_way.append(len(sent) - len(under_way))

    serve_sequences(b, ECHO, take, limit=400, watch=lambda peer: nullcontext(lambda count: None))
    async with connected(a, b):
        for rate, most in ((1000.0 / SECONDS, 2), (10.0 / SECONDS, 1), (None, 8)):
            for kept in (sent, handled, under_way):
                kept.clear()
            async with sequence(a, b.peer, ECHO, 10.0, Window(lambda rate=rate: rate), handled.append) as send:
                for _ in range(8):
                    await send(bytes(400))
                    sent.append(1)
            assert [landing.nbytes for landing in handled] == [400] * 8
            times = [landing.at for landing in handled]
            assert times == sorted(times)
            assert times[-1] - min(landing.opened for landing in handled) >= 0.4
            assert max(under_way) <= most
            assert rate is not None or max(under_way) > 2  # nothing else holds them up


async def test_a_body_of_a_sequence_that_is_refused_ends_it_for_both(world):
    a, b = world.transport(), world.transport()
    came = []

    async def take(peer, body):
        came.append(body)
        if body == b"bad":
            raise PayloadError("as the test wants it")

    async def send_all(bodies):
        async with sequence(a, b.peer, ECHO, 10.0, Window(lambda: None)) as send:
            for body in bodies:
                await send(body)

    serve_sequences(b, ECHO, take, limit=8, watch=lambda peer: nullcontext(lambda count: None))
    async with connected(a, b):
        for bodies in ([b"good", b"bad", b"late"], [b"much too long"]):
            with pytest.raises(TransportError):
                await send_all(bodies)
        assert came == [b"good", b"bad"]
