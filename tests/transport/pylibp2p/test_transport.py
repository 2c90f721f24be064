"""The transport on py-libp2p, in its thread: large bodies, cancelled calls, peers that come back, errors at start."""

from __future__ import annotations

import anyio
import pytest

from decentral.errors import PeerUnreachable, StreamClosed
from decentral.transport.protocols.identify import ask
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.requests import request, serve_requests
from decentral.transport.throttle import Caps, ThrottledTransport
from tests.kit.relays import BODY, ECHO, echo, native, on_libp2p, run


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_call_that_would_wait_for_ever_is_cancelled_in_the_thread_too(backend):
    a, b = on_libp2p(), native()

    async def silent(stream):
        await anyio.sleep_forever()

    b.serve("/test/silent", silent)

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            stream = await a.open(b.peer, "/test/silent")
            for call in (lambda: stream.receive_exactly(1), lambda: stream.send(BODY)):
                with anyio.fail_after(5), anyio.move_on_after(0.05) as scope:
                    await call()
                assert scope.cancelled_caught
            assert not a._thread._calls

    run(script, backend, limit=20)


def test_streams_whose_opening_was_cancelled_are_given_back():
    a, b = on_libp2p(), native()
    serve_requests(b, ECHO, echo, limit=100)

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            for microseconds in range(0, 4000, 20):
                with anyio.move_on_after(microseconds / 1e6):
                    await a.open(b.peer, ECHO)
                    break
            (session,) = a.node.links.sessions.of(b.peer)
            while session.num_streams > 1:  # that of the one that was opened
                await anyio.sleep(0.01)

    run(script)


def test_a_transport_that_was_left_answers_no_call_and_hangs_in_none():
    a, b = on_libp2p(), native()
    serve_requests(b, ECHO, echo, limit=100)

    async def script():
        async with b:
            async with a:
                await a.connect(b.peer, b.addresses())
                stream = await a.open(b.peer, ECHO)
            for call in (lambda: a.open(b.peer, ECHO), lambda: a.connect(b.peer, b.addresses())):
                with pytest.raises(PeerUnreachable):
                    await call()
            with pytest.raises(StreamClosed):
                await stream.send(b"late")
            await stream.aclose()
            assert await a.paths() == {}

    run(script)


def test_identify_tells_what_is_served_and_where_and_how_the_asker_looks():
    a, b = native(), on_libp2p()
    serve_requests(b, ECHO, echo, limit=100)

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            stream = (await a.links.dialler.session(b.peer)).open()
            told = await ask(NativeStream(b.peer, stream))
            assert told.addresses == tuple(where.rpartition("/p2p/")[0] for where in b.addresses())
            assert told.observed is not None
            assert told.observed.startswith("/ip4/127.0.0.1/tcp/")

    run(script)


def test_caps_hold_on_it_as_on_the_others():
    a, b = ThrottledTransport(on_libp2p(), Caps(up=4e6, down=None), urgent=()), on_libp2p()
    serve_requests(b, ECHO, echo, limit=len(BODY))

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            began = anyio.current_time()
            body = BODY[: 4 << 20]
            assert await request(a, b.peer, ECHO, body, limit=len(body), timeout=20) == body
            assert 0.7 < anyio.current_time() - began < 3

    run(script)
