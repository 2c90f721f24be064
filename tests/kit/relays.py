"""Peers on sockets of our own, relays and their guests: for the tests of the native transport, py-libp2p and relays."""

from __future__ import annotations

import importlib.util
import os
from contextlib import asynccontextmanager

import anyio

from decentral.transport import Transport
from decentral.transport.daemon.process import DaemonOptions
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.native.links import LinkOptions, Links
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.protocols.circuit import HOP, RelayLimits, read_message, reserve, write_message
from decentral.transport.protocols.messages import bytes_field, number_field, number_fields, peer_to_id
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer, peer_name

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ECHO, NOTE = "/test/echo", "/test/note"
BODY = os.urandom(16 << 20)
KINDS = ("native", "py-libp2p") if importlib.util.find_spec("libp2p") else ("native",)  # on sockets of our own
NOWHERE = ("/ip4/127.0.0.1/tcp/1",)  # what a peer announces that nobody can dial


def relay(signer=None, listen=LOOPBACK, **limits) -> NativeTransport:
    options = NativeOptions(relay=RelayLimits(**limits))
    return NativeTransport(signer or Signer.generate(), listen=listen, options=options)


def native(signer=None, listen=LOOPBACK, **options) -> NativeTransport:
    return NativeTransport(signer or Signer.generate(), listen=listen, options=NativeOptions(**options))


def on_libp2p(signer=None, listen=LOOPBACK, **options) -> Transport:
    from decentral.transport.pylibp2p.transport import PyLibp2pTransport

    return PyLibp2pTransport(signer or Signer.generate(), listen=listen, options=LinkOptions(**options))


MAKERS = {"native": native, "py-libp2p": on_libp2p}


def links(transport: Transport) -> Links:
    return transport.links if isinstance(transport, NativeTransport) else transport.node.links


def hidden_native(at: NativeTransport) -> NativeTransport:
    return native(relays=at.addresses()[:1], announce=NOWHERE, punch=False)


def hidden_daemon(at: NativeTransport, daemons) -> DaemonTransport:
    options = DaemonOptions(reachability="private", relays=at.addresses()[:1], announce=NOWHERE)
    return DaemonTransport(daemons.identity(), listen=LOOPBACK, options=options)


def hidden(kind: str, at: NativeTransport, daemons) -> Transport:
    """A guest of a relay whom nobody can dial."""
    if kind == "daemon":
        return hidden_daemon(at, daemons)
    return MAKERS[kind](relays=at.addresses()[:1], announce=NOWHERE, punch=False)


def visible(kind: str, daemons) -> Transport:
    return daemons.transport() if kind == "daemon" else MAKERS[kind]()


async def echo(peer, body):
    return body


@asynccontextmanager
async def connected(a: Transport, b: Transport, *, serves=None, answers=None, limit=1 << 20):
    """Both, of which the first has dialled the second, which serves streams or answers requests under ``ECHO``."""
    if serves is not None:
        b.serve(ECHO, serves)
    if answers is not None:
        serve_requests(b, ECHO, answers, limit=limit)
    async with a, b:
        await a.connect(b.peer, b.addresses())
        yield a, b


async def is_served(a: Transport, b: Transport) -> bool:
    return await request(a, b.peer, ECHO, b"fine", limit=100, timeout=10) == b"fine"


async def sleep_for_ever(stream) -> None:
    """Hold a stream, and never read it."""
    await anyio.sleep_forever()


async def until(condition) -> None:
    while not condition():
        await anyio.sleep(0.01)


def through(at: NativeTransport, peer) -> tuple[str, ...]:
    return (f"{at.addresses()[0]}/p2p-circuit/p2p/{peer_name(peer)}",)


async def exchange(at, guest, other) -> None:
    """16 MiB each way, through the relay."""
    where = (f"{at.addresses()[0]}/p2p-circuit/p2p/{peer_name(guest.peer)}",)
    await other.connect(guest.peer, where)
    assert all("/p2p-circuit" in path for path in (await other.paths())[guest.peer])
    for one, two in ((other, guest), (guest, other)):
        assert await request(one, two.peer, ECHO, BODY, limit=len(BODY), timeout=30) == BODY


@asynccontextmanager
async def asking(at: NativeTransport, transport: NativeTransport):
    """A stream on which a peer may ask the relay."""
    await transport.connect(at.peer, at.addresses())
    stream = await transport.open(at.peer, HOP)
    try:
        yield stream
    finally:
        stream.reset()


async def status(at: NativeTransport, transport: NativeTransport, message: bytes) -> int | None:
    """What the relay says to a question."""
    async with asking(at, transport) as stream:
        await write_message(stream, message)
        return number_fields(await read_message(stream)).get(5)


async def take_place(at: NativeTransport, transport: NativeTransport):
    async with asking(at, transport) as stream:
        return await reserve(stream)


def connect_to(peer) -> bytes:
    return number_field(1, 1) + bytes_field(2, bytes_field(1, peer_to_id(peer)))


RESERVE = number_field(1, 0)
