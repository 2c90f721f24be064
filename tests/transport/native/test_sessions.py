"""Connections of the native transport: how many there may be, whose stay, and how they end."""

from __future__ import annotations

import gc
import socket
import struct
import warnings
from contextlib import AsyncExitStack, suppress

import anyio
import anyio.to_thread
import psutil
import pytest

from decentral.errors import PeerUnreachable, StreamClosed
from decentral.transport.native import sessions
from decentral.transport.native.sessions import Strangers, accept_for_ever
from decentral.transport.native.tcp import bound_addresses, endpoint, listeners
from decentral.transport.native.transport import NativeTransport
from decentral.transport.protocols.noise import close_now
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer
from tests.kit.relays import BODY, ECHO, LOOPBACK, connected, echo, native, sleep_for_ever, until
from tests.transport.raw import raw_connection, until_dropped


async def test_questions_whose_answers_are_not_read_do_not_pile_up():
    b = native()
    ping = struct.pack("!BBHII", 0, 2, 1, 0, 0) * 5000

    async def ask_on(secured):
        for _ in range(2000):  # 120 MB of questions
            await secured.send(ping)

    async with b, raw_connection(b, Signer.generate()) as secured:
        before = psutil.Process().memory_info().rss
        with pytest.raises(StreamClosed):
            await ask_on(secured)
        assert psutil.Process().memory_info().rss - before < 32 << 20


async def test_streams_beyond_a_bound_are_refused_and_cost_nothing():
    b = native()
    opened = b"".join(struct.pack("!BBHII", 0, 1, 1, number, 0) for number in range(1, 2000, 2))
    async with b, raw_connection(b, Signer.generate()) as secured:
        await secured.send(opened)
        flags = []
        while len(flags) < 1000:
            head = struct.unpack("!BBHII", await secured.receive_exactly(12))
            if head[1] == 0:
                await secured.receive_exactly(head[4])  # its part of a negotiation
            elif head[1] == 1:
                flags.append(head[2])
        assert flags.count(8) == 1000 - 128  # reset
        assert flags.count(2) == 128  # taken


async def test_what_a_peer_agreed_to_speak_is_spoken_again_without_asking_first():
    """Of a message that takes one trip, the question made three."""
    async with connected(native(), native(), answers=echo) as (a, b):
        (session,) = a.links.sessions.of(b.peer)
        first = await a.open(b.peer, ECHO)
        assert first.proposed is None, "asked, and answered"
        again = await a.open(b.peer, ECHO)
        assert again.proposed == ECHO, "the answer comes with what the stream is for"
        assert await request(a, b.peer, ECHO, b"again", limit=100, timeout=10) == b"again"
        assert a.traffic.total.sent == len(b"again") + 4, "which protocol is spoken is no payload"
        session.agreed.add("/test/unserved")  # by an older process at that address, say
        with pytest.raises(StreamClosed, match="not served there"):
            await (await a.open(b.peer, "/test/unserved")).receive_exactly(1)
        session.heard -= 30.0  # a path that may be dead
        assert (await a.open(b.peer, ECHO)).proposed is None


async def test_who_is_cancelled_while_it_leaves_ends_the_streams_that_it_kept_and_its_connections():
    a, b = native(), native()
    serve_requests(b, ECHO, echo_body, limit=100)
    async with b:
        with anyio.CancelScope() as scope:
            async with a:
                a.budget.prefer({b.peer})
                await a.connect(b.peer, b.addresses())
                assert await request(a, b.peer, ECHO, b"so", limit=100, timeout=10) == b"so"
                assert len(a.kept) == 1
                scope.cancel()
        assert len(a.kept) == 0
        await until(lambda: not b.links.sessions.of(a.peer))


async def echo_body(peer: bytes, body: bytes) -> bytes:
    return body


async def test_one_peer_holds_only_so_many_connections():
    b, signer = native(), Signer.generate()
    async with b, raw_connection(b, signer) as first, AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(raw_connection(b, signer))
        with pytest.raises(StreamClosed):
            await until_dropped(first)


async def test_when_there_are_too_many_connections_idle_ones_go_and_those_in_use_stay(monkeypatch):
    monkeypatch.setattr("decentral.transport.native.sessions._CONNECTIONS", 8)
    a, b = native(), native()

    async def answer_later(stream):
        await stream.receive_exactly(1)
        await stream.send(b"!")

    b.serve("/test/later", answer_later)
    async with connected(a, b), AsyncExitStack() as stack:
        used = await a.open(b.peer, "/test/later")
        async with anyio.create_task_group() as group:
            for _ in range(40):
                connection = raw_connection(b, Signer.generate())
                group.start_soon(stack.enter_async_context, connection)
        with anyio.fail_after(20):  # silence would end them after 40 s
            while b.links.sessions.num_peers > 8:
                await anyio.sleep(0.01)
        await used.send(b"?")
        assert await used.receive_exactly(1) == b"!"


@pytest.mark.parametrize("busy", [False, True])
async def test_connections_of_members_stay_and_others_make_room_for_them(monkeypatch, busy):
    monkeypatch.setattr(sessions, "_CONNECTIONS", 2)
    a, b, latecomer, outsiders = native(), native(), native(), [native(), native()]
    b.budget.prefer({a.peer, latecomer.peer})
    serve_requests(b, ECHO, echo, limit=100)
    async with AsyncExitStack() as stack:
        for one in (b, a, latecomer, *outsiders):
            await stack.enter_async_context(one)
        await a.connect(b.peer, b.addresses())
        first = a.links.sessions.of(b.peer)
        for one in outsiders:
            await one.connect(b.peer, b.addresses())
            if busy:
                with suppress(StreamClosed, PeerUnreachable):
                    await (await one.open(b.peer, ECHO)).send(b"\0")
        await latecomer.connect(b.peer, b.addresses())
        for one in (a, latecomer):
            assert await request(one, b.peer, ECHO, b"fine", limit=100, timeout=10) == b"fine"
        assert a.links.sessions.of(b.peer) == first
        assert not any(b.links.sessions.has(one.peer) for one in outsiders)


async def test_each_stranger_too_many_drops_another_one_however_fast_they_come(virtual_time):
    """They take a moment to end: had the oldest been asked twice, a burst would have stayed beyond the bound."""
    strangers_begun = 0

    async def shake_hands_for_ever(strangers):
        nonlocal strangers_begun
        with strangers.take_in():
            strangers_begun += 1
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.1)

    strangers = Strangers(timeout=60)
    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(shake_hands_for_ever, strangers)
        with anyio.fail_after(20):
            await until(lambda: strangers_begun >= 100 and len(strangers) <= 64)
        assert len(strangers) == 64
        group.cancel_scope.cancel()


# ---- streams and ends of connections ----


async def test_a_stream_nobody_reads_holds_up_no_other_stream_of_its_connection():
    a, b = native(), native()
    b.serve("/test/deaf", sleep_for_ever)
    async with connected(a, b, answers=echo), anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon((await a.open(b.peer, "/test/deaf")).send, BODY)
        for size in (1, 1 << 20):
            assert await request(a, b.peer, ECHO, bytes(size), limit=size, timeout=10) == bytes(size)
        group.cancel_scope.cancel()


async def test_all_interfaces_are_named_one_by_one():
    async with NativeTransport(Signer.generate()) as a:
        assert a.addresses()
        assert not any("/0.0.0.0/" in address or "/::/" in address for address in a.addresses())


async def test_streams_closed_while_their_connection_is_finished_disturb_nothing(caplog):
    async with connected(native(), native(), serves=sleep_for_ever) as (a, b):
        streams = [await a.open(b.peer, ECHO) for _ in range(5)]
        (session,) = a.links.sessions.of(b.peer)
        async with anyio.create_task_group() as group:
            group.start_soon(session.finish, 5)
            while not session.outgoing._shut:
                await anyio.lowlevel.checkpoint()
            for stream in streams:
                await stream.aclose()
    assert not caplog.records


def test_no_socket_is_dropped_whenever_accepting_is_cancelled():
    """Each number of the loop's steps between a connection and the end is another moment of its acceptance."""

    async def held(stream: anyio.abc.SocketStream) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            await close_now(stream)

    async def script(steps: int) -> None:
        (listener,) = await listeners(LOOPBACK)
        end = endpoint(bound_addresses([listener])[0])
        async with listener, anyio.create_task_group() as group:
            group.start_soon(accept_for_ever, listener, group, held)
            await anyio.wait_all_tasks_blocked()
            with socket.create_connection(end):
                for _ in range(steps):
                    await anyio.sleep(0)
                group.cancel_scope.cancel()
        await anyio.sleep(0)  # asyncio closes a transport in the step after

    with warnings.catch_warnings(record=True) as dropped:
        warnings.simplefilter("always")
        for steps in range(8):
            anyio.run(script, steps)
        gc.collect()
    assert [str(one.message) for one in dropped if one.category is ResourceWarning] == []
