"""The transport without a daemon: beside daemons, with large bodies, and when connections die."""

from __future__ import annotations

import anyio
import pytest

from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.native.transport import NativeTransport
from decentral.transport.requests import notify, request, serve_requests
from decentral.wire.keys import Signer
from tests.kit.relays import BODY, ECHO, NOTE, echo, native, run


@pytest.mark.parametrize("who_dials", ["native", "daemon"])
def test_a_native_peer_and_a_daemon_exchange_large_bodies_whoever_dials(daemons, who_dials):
    a, b = native(), daemons.transport()
    assert isinstance(b, DaemonTransport)
    notes = {}

    for transport in (a, b):

        async def note(peer, body, at=transport):
            notes[at.peer] = (peer, body)
            return b""

        serve_requests(transport, ECHO, echo, limit=len(BODY))
        serve_requests(transport, NOTE, note, limit=100)

    async def script():
        async with a, b:
            dials, dialled = (a, b) if who_dials == "native" else (b, a)
            await dials.connect(dialled.peer, dialled.addresses())
            for x, y in ((a, b), (b, a)):
                assert await request(x, y.peer, ECHO, BODY, limit=len(BODY), timeout=20) == BODY
                await notify(x, y.peer, NOTE, b"noted", 20)
            while len(notes) < 2:
                await anyio.sleep(0.01)

    run(script)
    assert notes == {a.peer: (b.peer, b"noted"), b.peer: (a.peer, b"noted")}


def test_a_stream_nobody_reads_holds_up_no_other_stream_of_its_connection():
    a, b = native(), native()

    async def deaf(stream):
        await anyio.sleep_forever()

    b.serve("/test/deaf", deaf)
    serve_requests(b, ECHO, echo, limit=1 << 20)

    async def script():
        async with a, b, anyio.create_task_group() as group:
            await a.connect(b.peer, b.addresses())
            for _ in range(8):
                group.start_soon((await a.open(b.peer, "/test/deaf")).send, BODY)
            for size in (1, 1 << 20):
                assert await request(a, b.peer, ECHO, bytes(size), limit=size, timeout=10) == bytes(size)
            group.cancel_scope.cancel()

    run(script)


def test_all_interfaces_are_named_one_by_one():
    async def script():
        async with NativeTransport(Signer.generate()) as a:
            assert a.addresses()
            assert not any("/0.0.0.0/" in address or "/::/" in address for address in a.addresses())

    run(script)


def test_streams_closed_while_their_connection_is_finished_disturb_nothing(caplog):
    a, b = native(), native()

    async def linger(stream):
        await anyio.sleep_forever()

    b.serve("/test/linger", linger)

    async def script():
        async with b, a:
            await a.connect(b.peer, b.addresses())
            streams = [await a.open(b.peer, "/test/linger") for _ in range(5)]
            (session,) = a.links.sessions.of(b.peer)
            async with anyio.create_task_group() as group:
                group.start_soon(session.finish, 5)
                while not session.outgoing._shut:
                    await anyio.lowlevel.checkpoint()
                for stream in streams:
                    await stream.aclose()

    run(script)
    assert not caplog.records
