"""Peers on py-libp2p that met through a relay are soon connected directly, with native ones, too, and lose no byte."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager

import anyio
import pytest

from decentral.errors import StreamClosed
from decentral.transport import holepunch
from decentral.transport.holepunch import DCUTR, PunchMessage, send_punch
from decentral.transport.native import dialling
from decentral.transport.native.links import LinkOptions
from decentral.transport.protocols.messages import propose
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.pylibp2p.transport import PyLibp2pTransport
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer
from tests.transport.conftest import LOOPBACK
from tests.transport.relays import ECHO, NOWHERE, echo, native, relay, run, through, until

BODY = os.urandom(4 << 20)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """The same in less time."""
    for name, value in {"PAUSES": (0.1, 0.2), "GRACE": 0.2, "_LOOK": 0.05, "_DIALLING": 1.0}.items():
        monkeypatch.setattr(holepunch, name, value)
    monkeypatch.setattr(dialling, "_HEAD_START", 0.0)


def on_libp2p(**options) -> PyLibp2pTransport:
    return PyLibp2pTransport(Signer.generate(), listen=LOOPBACK, options=LinkOptions(**options))


def hidden(kind, at):
    """One that nobody can dial at what it announces."""
    one = {"py-libp2p": on_libp2p, "native": native}[kind](relays=at.addresses()[:1], announce=NOWHERE)
    serve_requests(one, ECHO, echo, limit=len(BODY))
    return one


@asynccontextmanager
async def met(dials, hides):
    """A relay, and two peers of which the first has just dialled the second through it."""
    at = relay()
    async with at:
        a, b = hidden(dials, at), hidden(hides, at)
        async with a, b:
            await until(lambda: at.relay.places == 2)
            await a.connect(b.peer, through(at, b.peer))
            yield at, a, b


async def until_direct(a, b) -> None:
    for one, other in ((a, b), (b, a)):
        while "/p2p-circuit" in (await one.paths())[other.peer][0]:
            await anyio.sleep(0.01)


PAIRS = [("py-libp2p", "py-libp2p"), ("py-libp2p", "native"), ("native", "py-libp2p")]


@pytest.mark.parametrize(("dials", "hides"), PAIRS)
def test_two_that_met_through_a_relay_are_soon_connected_directly_and_the_relay_carries_nothing_more(dials, hides):
    async def script():
        async with met(dials, hides) as (at, a, b):
            await until_direct(a, b)
            await until(lambda: at.relay.connections == 0)
            before = at.relay.counts.nbytes
            for x, y in ((a, b), (b, a)):
                assert await request(x, y.peer, ECHO, BODY, limit=len(BODY), timeout=20) == BODY
            assert at.relay.counts.nbytes - before < 100_000

    run(script)


@pytest.mark.parametrize(("dials", "hides"), PAIRS)
@pytest.mark.parametrize("late", ["who dialled", "who was dialled"])
def test_it_is_so_when_one_side_dials_late_and_the_others_connection_comes_in_at_its_listener(dials, hides, late):
    async def script():
        async with met(dials, hides) as (_, a, b):
            slow(a if late == "who dialled" else b)
            await until_direct(a, b)
            assert await request(a, b.peer, ECHO, BODY, limit=len(BODY), timeout=20) == BODY

    run(script)


def slow(one) -> None:
    """Have it dial late."""
    ports = one.node.links.ports if isinstance(one, PyLibp2pTransport) else one.links.ports
    leave = ports.leave

    async def late(host, port):
        await anyio.sleep(0.3)
        return await leave(host, port)

    ports.leave = late


def test_requests_that_never_pause_lose_nothing_while_connections_are_exchanged():
    async def script():
        async with met("py-libp2p", "py-libp2p") as (at, a, b):
            for n in range(10**6):
                x, y = ((a, b), (b, a))[n % 2]
                body = n.to_bytes(8, "little") * 500
                assert await request(x, y.peer, ECHO, body, limit=len(body), timeout=10) == body
                if not at.relay.connections:
                    break

    run(script)


def test_over_a_direct_connection_nobody_may_ask_it_to_dial():
    a, b = native(), on_libp2p()

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            session = a.links.sessions.standing(b.peer)
            stream = NativeStream(session.peer, session.open())
            await propose(stream, DCUTR)
            await send_punch(stream, PunchMessage.CONNECT, ["/ip4/127.0.0.1/tcp/1"])
            with pytest.raises(StreamClosed):
                await stream.receive_exactly(1)

    run(script)


def test_without_punching_it_answers_none_and_stays_relayed():
    at = relay()

    async def script():
        async with at:
            a, b = hidden("native", at), on_libp2p(relays=at.addresses()[:1], announce=NOWHERE, punch=False)
            serve_requests(b, ECHO, echo, limit=len(BODY))
            async with a, b:
                await until(lambda: at.relay.places == 2)
                await a.connect(b.peer, through(at, b.peer))
                await anyio.sleep(1)  # more than both attempts
                assert all("/p2p-circuit" in path for path in (await a.paths())[b.peer])
                assert await request(a, b.peer, ECHO, b"on", limit=9, timeout=5) == b"on"

    run(script)
