"""The native transport against who breaks its rules, says nothing, or comes in great number."""

from __future__ import annotations

import struct
from contextlib import AsyncExitStack, suppress

import anyio
import anyio.to_thread
import psutil
import pytest

from decentral.errors import PeerUnreachable, StreamClosed
from decentral.transport.native import sessions
from decentral.transport.native.sessions import Strangers
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer
from tests.kit.relays import ECHO, echo, native, run
from tests.transport.raw import raw_connection, until_dropped


def test_questions_whose_answers_are_not_read_do_not_pile_up():
    b = native()
    ping = struct.pack("!BBHII", 0, 2, 1, 0, 0) * 5000

    async def ask_on(secured):
        for _ in range(2000):  # 120 MB of questions
            await secured.send(ping)

    async def script():
        async with b, raw_connection(b, Signer.generate()) as secured:
            before = psutil.Process().memory_info().rss
            with pytest.raises(StreamClosed):
                await ask_on(secured)
            assert psutil.Process().memory_info().rss - before < 32 << 20

    run(script)


def test_streams_beyond_a_bound_are_refused_and_cost_nothing():
    b = native()
    opened = b"".join(struct.pack("!BBHII", 0, 1, 1, number, 0) for number in range(1, 2000, 2))

    async def script():
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

    run(script)


def test_one_peer_holds_only_so_many_connections():
    b, signer = native(), Signer.generate()

    async def script():
        async with b, raw_connection(b, signer) as first, AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(raw_connection(b, signer))
            with pytest.raises(StreamClosed):
                await until_dropped(first)

    run(script)


def test_when_there_are_too_many_connections_idle_ones_go_and_those_in_use_stay(monkeypatch):
    monkeypatch.setattr("decentral.transport.native.sessions._CONNECTIONS", 8)
    a, b = native(), native()

    async def answer_later(stream):
        await stream.receive_exactly(1)
        await stream.send(b"!")

    b.serve("/test/later", answer_later)

    async def script():
        async with a, b, AsyncExitStack() as stack:
            await a.connect(b.peer, b.addresses())
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

    run(script)


@pytest.mark.parametrize("busy", [False, True])
def test_connections_of_members_stay_and_others_make_room_for_them(monkeypatch, busy):
    monkeypatch.setattr(sessions, "_CONNECTIONS", 2)
    a, b, latecomer, outsiders = native(), native(), native(), [native(), native()]
    b.budget.prefer({a.peer, latecomer.peer})
    serve_requests(b, ECHO, echo, limit=100)

    async def script():
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

    run(script)


def test_each_stranger_too_many_drops_another_one_however_fast_they_come():
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

    async def script():
        strangers = Strangers(timeout=60)
        async with anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(shake_hands_for_ever, strangers)
            with anyio.fail_after(20):
                while strangers_begun < 100 or len(strangers) > 64:
                    await anyio.sleep(0.01)
            assert len(strangers) == 64
            group.cancel_scope.cancel()

    run(script, "trio")
