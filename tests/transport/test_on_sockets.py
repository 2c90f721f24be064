"""The transports on sockets of our own, native and on py-libp2p: what both promise, tried on each of them.

Among it: what strangers may do who break rules, say nothing, or come in great number.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import anyio
import anyio.to_thread
import psutil
import pytest

from decentral.errors import ConfigError, ListenError, PeerUnreachable, StreamClosed
from decentral.transport import Transport
from decentral.transport.native.tcp import endpoint
from decentral.transport.protocols.noise import Plain
from decentral.transport.requests import serve_requests
from decentral.wire.keys import Signer
from tests.kit.relays import BODY, ECHO, KINDS, MAKERS, connected, echo, is_served, links, native, sleep_for_ever
from tests.transport.raw import BROKEN_FRAMES, raw_connection, until_dropped

HEADER = b"\x13/multistream/1.0.0\n"


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[..., Transport]:
    return MAKERS[request.param]


async def test_a_peer_that_comes_back_is_dialled_again_at_its_addresses(make):
    signer = Signer.generate()
    a, b = make(), make(signer)
    async with a:
        async with b:
            where = b.addresses()[0].rpartition("/p2p/")[0]
            await a.connect(b.peer, b.addresses())
        with pytest.raises(PeerUnreachable):
            await a.open(b.peer, ECHO)
        again = make(signer, (where,))
        serve_requests(again, ECHO, echo, limit=100)
        async with again:
            assert await is_served(a, again)


async def test_what_it_cannot_listen_on_is_said_before_anything_starts(make):
    """py-libp2p's own listeners share a port, so that a second peer would get some of the first one's connections."""
    with pytest.raises(ConfigError, match="TCP only"):
        await make(None, ("/ip4/127.0.0.1/udp/0/quic-v1",)).__aenter__()
    async with make() as a:
        with pytest.raises(ListenError, match="cannot listen"):
            await make(None, (a.addresses()[0].rpartition("/p2p/")[0],)).__aenter__()


@pytest.mark.parametrize("frame", BROKEN_FRAMES.values(), ids=BROKEN_FRAMES)
async def test_a_frame_that_breaks_a_rule_ends_its_connection_and_no_other(make, frame):
    async with connected(native(), make(), answers=echo) as (a, b):
        async with raw_connection(b, Signer.generate()) as secured:
            await secured.send(frame)
            with pytest.raises(StreamClosed):
                await until_dropped(secured)
        assert await is_served(a, b)


async def test_who_says_nothing_or_something_else_is_dropped(make):
    async with make(dial_timeout=0.5) as b:
        for words in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
            b"\xff" * 64,
            HEADER + b"\x04/tls\n" + b"\x00" * 9,
            HEADER + b"\x11/plaintext/2.0.0\n",
        ):
            async with await anyio.connect_tcp(*endpoint(b.addresses()[0])) as tcp:
                plain = Plain(tcp)
                await plain.send(words)
                with pytest.raises(StreamClosed):
                    await plain.receive_exactly(1000)


@pytest.mark.parametrize(("kind", "backend"), list(zip(KINDS, ("trio", "asyncio"), strict=False)))
async def test_a_thousand_silent_connections_keep_nobody_out_and_cost_little(kind, backend):
    a, b = native(), MAKERS[kind]()
    serve_requests(b, ECHO, echo, limit=100)
    async with a, b:
        before = psutil.Process().memory_info().rss
        sockets = [socket.socket() for _ in range(1000)]
        try:
            for one in sockets:
                await anyio.to_thread.run_sync(one.connect, endpoint(b.addresses()[0]))
            await a.connect(b.peer, b.addresses())
            assert await is_served(a, b)
            assert len(links(b).handshakes.strangers) <= 64
            assert psutil.Process().memory_info().rss - before < 64 << 20
        finally:
            for one in sockets:
                one.close()


async def test_another_peer_at_the_address_is_not_taken_for_the_one_that_was_dialled(make):
    a, b, stranger = make(), native(), Signer.generate()
    async with a, b:
        with pytest.raises(PeerUnreachable, match="answers in its place"):
            await a.connect(stranger.peer, b.addresses())


async def test_who_sends_more_than_the_window_loses_the_connection(make):
    async with connected(native(), make(), serves=sleep_for_ever) as (a, b):
        stream = await a.open(b.peer, ECHO)
        stream.muxed.send_window = 1 << 30
        with pytest.raises(StreamClosed):
            await stream.send(BODY)
