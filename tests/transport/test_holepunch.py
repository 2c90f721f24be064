"""What is said before two peers dial at once: the messages byte for byte, and whose addresses may be dialled."""

from __future__ import annotations

import errno
import os
from contextlib import asynccontextmanager

import anyio
import pytest

from decentral.errors import PayloadError, StreamClosed
from decentral.transport import Transport, holepunch
from decentral.transport.holepunch import (
    DCUTR,
    PunchMessage,
    plausible,
    punch_message,
    read_punch,
    receive_punch,
    send_punch,
)
from decentral.transport.native import dialling
from decentral.transport.native.transport import NativeTransport
from decentral.transport.protocols.messages import bytes_field, multiaddr_to_bytes, number_field
from decentral.transport.protocols.yamux import Session
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer, peer_name
from tests.kit.relays import ECHO, KINDS, MAKERS, NOWHERE, connected, echo, links, native, relay, through, until

HERE, THERE = "/ip4/45.67.0.9/tcp/4001", "/ip6/2a02:45:67::9/tcp/4001"
CONNECT = number_field(1, 100)
NAME = peer_name(Signer(bytes(32)).peer)
EVERY = {"45.67.0.1", "10.0.0.1", "127.0.0.1", "relay.example.org", None}  # hosts of relays


class Sent:
    """A stream of which all has come already."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def send(self, data: bytes) -> None:
        raise AssertionError("nothing is sent")

    async def receive_exactly(self, nbytes: int, on_bytes=None) -> bytes:
        if nbytes > len(self.data):
            raise StreamClosed("it ended")
        taken, self.data = self.data[:nbytes], self.data[nbytes:]
        return taken


def test_messages_are_those_of_the_specification() -> None:
    assert punch_message(PunchMessage.SYNC).hex() == "08ac02"
    assert punch_message(PunchMessage.CONNECT, [HERE]).hex() == "08641208" + "042d430009060fa1"
    assert read_punch(punch_message(PunchMessage.CONNECT, [HERE, THERE]), PunchMessage.CONNECT) == (HERE, THERE)
    assert read_punch(punch_message(PunchMessage.SYNC), PunchMessage.SYNC) == ()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x08",
        b"\x00" * 9,
        punch_message(PunchMessage.SYNC),
        CONNECT + b"\x12\x7f",
        CONNECT + bytes_field(2, b"") * 64,
        b"\xff" * 9,
        CONNECT + b"\x18" + b"\xff" * 9 + b"\x02",
    ],
    ids=["nothing", "half a field", "zeros", "the other kind", "cut short", "too many fields", "no number", "65 bits"],
)
def test_a_message_that_makes_no_sense_is_refused(message: bytes) -> None:
    with pytest.raises(PayloadError, match="drop"):
        read_punch(message, PunchMessage.CONNECT)


def test_addresses_that_are_none_are_passed_over_and_few_are_looked_at() -> None:
    useless = [b"", b"\xff" * 40, multiaddr_to_bytes("/dns4/example.org/udp/1/quic-v1")]
    message = CONNECT + b"".join(bytes_field(2, one) for one in [*useless, multiaddr_to_bytes(HERE)])
    assert read_punch(message, PunchMessage.CONNECT)[-1] == HERE
    assert len(read_punch(CONNECT + bytes_field(2, multiaddr_to_bytes(HERE)) * 60, PunchMessage.CONNECT)) == 16


async def test_a_length_beyond_the_bound_is_refused_before_anything_is_read() -> None:
    with pytest.raises(PayloadError, match="more than 4096 bytes"):
        await receive_punch(Sent(b"\xff\x7f"), PunchMessage.CONNECT)


@pytest.mark.parametrize(
    ("address", "relays"),
    [
        (HERE, EVERY),
        (THERE, EVERY),
        (f"{HERE}/p2p/{NAME}", EVERY),
        ("/ip4/192.168.7.7/tcp/22", {"10.0.0.1"}),
        ("/ip4/100.64.1.2/tcp/22", {"10.0.0.1"}),
        ("/ip6/fd00::7/tcp/22", {"10.0.0.1"}),
        ("/ip4/127.0.0.1/tcp/22", {"127.0.0.1"}),
        ("/ip6/::1/tcp/22", {"127.0.0.1"}),
        ("/ip4/0.0.0.0/tcp/22", set()),
        ("/ip4/224.0.0.1/tcp/22", set()),
        ("/ip4/255.255.255.255/tcp/22", set()),
        ("/ip4/169.254.169.254/tcp/80", set()),
        ("/ip6/::ffff:127.0.0.1/tcp/22", set()),
        ("/ip6/2002:7f00:1::/tcp/22", {"127.0.0.1"}),
        ("/ip6/64:ff9b::7f00:1/tcp/22", set()),
        ("/ip6/fe80::1/tcp/22", set()),
        ("/dns4/example.org/tcp/443", set()),
        ("/ip4/45.67.0.9/udp/4001/quic-v1", set()),
        ("/ip4/45.67.0.9/tcp/0", set()),
        (f"/ip4/45.67.0.1/tcp/4001/p2p/{NAME}/p2p-circuit", set()),
    ],
)
def test_only_addresses_as_public_as_the_relay_may_be_dialled(address: str, relays: set[str | None]) -> None:
    assert {relay for relay in EVERY if plausible([address], relay)} == relays


def test_few_of_many_addresses_are_dialled_and_each_once() -> None:
    many = [f"/ip4/45.67.0.{n}/tcp/4001" for n in range(200)]
    assert plausible([HERE, HERE, *many], None)[:2] == [("45.67.0.9", 4001), ("45.67.0.0", 4001)]
    assert len(plausible(many, None)) == 4


# ---- punching ----
#
# Relayed connections become direct ones: between real sockets, without losing a byte, and at nobody else's bidding.

BODY = os.urandom(4 << 20)
PIECE = 1 << 18


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """The same in less time."""
    for name, value in {"PAUSES": (0.1, 0.2), "GRACE": 0.2, "_LOOK": 0.05, "_DIALLING": 1.0}.items():
        monkeypatch.setattr(holepunch, name, value)
    monkeypatch.setattr(dialling, "_HEAD_START", 0.0)


def hidden(at: NativeTransport, kind: str = "native", **options) -> Transport:
    """One that nobody can dial at what it announces."""
    one = MAKERS[kind](relays=at.addresses()[:1], announce=NOWHERE, **options)
    serve_requests(one, ECHO, echo, limit=len(BODY))
    return one


def relayed(one: Transport, peer) -> list[Session]:
    return [session for session in links(one).sessions.of(peer) if links(one).sessions.relay_of(session)]


@asynccontextmanager
async def met(dials: str = "native", hides: str = "native", *, serves=None, **options):
    """A relay, and two peers of which the first has just dialled the second, of these options, through it."""
    async with relay() as at:
        a, b = hidden(at, dials), hidden(at, hides, **options)
        if serves is not None:
            b.serve("/test/serves", serves)
        async with a, b:
            await until(lambda: at.relay.places == 2)
            await a.connect(b.peer, through(at, b.peer))
            assert relayed(a, b.peer)
            yield at, a, b


async def until_direct(a: Transport, b: Transport) -> None:
    await until(lambda: links(a).sessions.is_direct(b.peer) and links(b).sessions.is_direct(a.peer))


def slow(one: Transport) -> None:
    """Have it dial late, so that the other side's connection comes in at its listener."""
    leave = links(one).ports.leave

    async def late(host, port):
        await anyio.sleep(0.3)
        return await leave(host, port)

    links(one).ports.leave = late


MEETINGS = [(dials, hides, "asyncio", "nobody") for dials in KINDS for hides in KINDS]
MEETINGS += [("native", "native", "asyncio", late) for late in ("who dialled", "who was dialled")]
MEETINGS += [("native", "native", "trio", "nobody")]
MORE = [(kind, kind, "asyncio", late) for kind in KINDS[1:] for late in ("who dialled", "who was dialled")]


@pytest.mark.parametrize(
    ("dials", "hides", "backend", "late"), [*MEETINGS, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)]
)
async def test_two_peers_that_met_through_a_relay_are_soon_connected_directly(dials, hides, backend, late):
    async with met(dials, hides) as (at, a, b):
        for one in {"nobody": (), "who dialled": (a,), "who was dialled": (b,)}[late]:
            slow(one)
        await until_direct(a, b)
        if late == "nobody":
            await until(lambda: at.relay.connections == 0)
        before = at.relay.counts.nbytes
        for x, y in ((a, b), (b, a)):
            assert await request(x, y.peer, ECHO, BODY, limit=len(BODY), timeout=20) == BODY
            assert "/p2p-circuit" not in (await x.paths())[y.peer][0]
        assert at.relay.counts.nbytes - before < 100_000


async def test_of_two_that_dialled_each_other_through_the_relay_one_begins_and_they_are_connected_directly(monkeypatch):
    monkeypatch.setattr(holepunch, "PAUSES", (0.5,))
    async with met() as (at, a, b):
        await b.links.dialler._try(a.peer, *through(at, a.peer), anyio.CancelScope(), [])
        await until(lambda: len(relayed(a, b.peer)) == 2)
        await until_direct(a, b)


async def test_who_can_be_dialled_is_dialled_and_no_hole_is_punched():
    async with relay() as at, native() as a, hidden(at) as b:
        a.links.puncher.attend = None  # it would fail
        await until(lambda: at.relay.places == 1)
        await a.connect(b.peer, through(at, b.peer))
        await until_direct(a, b)


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.long)])
async def test_a_body_under_way_arrives_whole_and_then_the_relayed_connection_is_closed(backend):
    received = []

    async def take(stream):
        received.append(await stream.receive_exactly(len(BODY)))
        await stream.send(b"!")

    async with met(serves=take) as (at, a, b):
        stream = await a.open(b.peer, "/test/serves")
        await stream.send(BODY[:PIECE])
        await until_direct(a, b)
        await anyio.sleep(0.5)  # more than the grace: it is in use
        for start in range(PIECE, len(BODY), PIECE):
            await stream.send(BODY[start : start + PIECE])
        assert await stream.receive_exactly(1) == b"!"
        assert at.relay.counts.nbytes > len(BODY)
        await stream.aclose()
        await until(lambda: at.relay.connections == 0)
        assert await request(a, b.peer, ECHO, b"on", limit=9, timeout=5) == b"on"
    assert received == [BODY]


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_that_never_pause_lose_nothing_while_connections_are_exchanged(kind):
    async with met(kind, kind) as (at, a, b):
        for n in range(10**6):
            x, y = ((a, b), (b, a))[n % 2]
            body = n.to_bytes(8, "little") * 500
            assert await request(x, y.peer, ECHO, body, limit=len(body), timeout=10) == body
            if not at.relay.connections:
                break


async def test_when_the_direct_connection_dies_new_streams_go_through_the_relay_again_and_it_is_exchanged_again():
    async with met() as (at, a, b):
        await until_direct(a, b)
        await until(lambda: at.relay.connections == 0)
        for x, y in ((a, b), (b, a)):
            for session in x.links.sessions.of(y.peer):
                session.abort()
            await until(lambda: not a.links.sessions.has(b.peer) and not b.links.sessions.has(a.peer))
            assert await request(x, y.peer, ECHO, b"back", limit=9, timeout=10) == b"back"
            assert relayed(x, y.peer)
            await until_direct(a, b)
            await until(lambda: at.relay.connections == 0)


async def test_a_peer_that_never_answers_costs_nothing_but_two_questions():
    asked = []

    async def silent(stream, session):
        asked.append(session)
        await anyio.sleep_forever()

    async with met() as (_, a, b):
        a.links.puncher.attend, b.links.puncher._timeout = silent, 0.3
        began = anyio.current_time()
        while anyio.current_time() - began < 1.5:
            assert await request(b, a.peer, ECHO, BODY[:PIECE], limit=PIECE, timeout=2) == BODY[:PIECE]
        assert len(asked) == 2
        assert not b.links.sessions.is_direct(a.peer)
        assert not b.links.puncher.num_under_way


async def test_a_stranger_makes_us_dial_few_addresses_and_only_when_it_was_dialled_through_a_relay(monkeypatch):
    dialled = []

    async def leave(host, port):
        dialled.append((host, port))
        raise OSError("refused")

    async with met() as (_, a, b):
        monkeypatch.setattr(a.links.ports, "leave", leave)
        monkeypatch.setattr(b.links.puncher, "_pursue", anyio.lowlevel.checkpoint)
        (session,) = relayed(b, a.peer)
        many = [f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 30)]
        await say(b, session, ["/ip4/10.0.0.1/tcp/22", "/ip4/224.0.0.1/tcp/9", *many])
        await until(lambda: len(dialled) >= 4)
        assert set(dialled) == {("127.0.0.1", port) for port in range(1, 5)}

        (other,) = relayed(a, b.peer)
        with pytest.raises(StreamClosed):  # b was dialled; it begins, and is not asked
            await say(a, other, many)


async def say(one: NativeTransport, session: Session, addresses: list[str]) -> None:
    """Play the other side's part up to the moment at which both dial."""
    stream = holepunch.NativeStream(session.peer, session.open())
    await holepunch.propose(stream, DCUTR)
    await send_punch(stream, PunchMessage.CONNECT, addresses)
    await receive_punch(stream, PunchMessage.CONNECT)
    await send_punch(stream, PunchMessage.SYNC)
    await stream.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_over_a_direct_connection_nobody_may_ask(kind):
    a, b = native(), MAKERS[kind]()
    async with connected(a, b):
        with pytest.raises(StreamClosed):
            await say(a, a.links.sessions.standing(b.peer), [])


async def test_who_asks_often_is_refused_for_a_minute():
    async with met() as (_, a, b):
        (session,) = relayed(a, b.peer)
        await until_direct(a, b)
        for _ in range(3):
            a.links.puncher._check(session, session.peer)
        with pytest.raises(PayloadError, match="asked 4 times"):
            a.links.puncher._check(session, session.peer)


@pytest.mark.parametrize("who", ["dialled", "was dialled"])
async def test_with_one_that_has_the_roles_the_other_way_round_the_second_attempt_is_direct(who):
    async with met() as (_, a, b):
        (a if who == "dialled" else b).links.puncher._is_second = lambda session: True  # as go-libp2p has them
        await until_direct(a, b)
        other = b if who == "dialled" else a
        assert list(other.links.puncher._rounds.values()) == [2]


async def test_who_still_dials_when_the_other_side_has_given_up_is_there_for_the_second_attempt(monkeypatch):
    monkeypatch.setattr(holepunch, "_DIALLING", 30.0)
    async with met() as (_, a, b):
        a.links.puncher._is_second = lambda session: True
        leave, calls, dial, began = a.links.ports.leave, [], b.links.puncher._dial, anyio.current_time()

        async def soon_given_up(*args, **options):
            with anyio.move_on_after(0.5):
                await dial(*args, **options)

        async def taken_at_first(host, port):
            calls.append(port)
            if len(calls) == 1:
                raise OSError(errno.EADDRNOTAVAIL, "the other side was first")
            return await leave(host, port)

        a.links.ports.leave = taken_at_first
        b.links.puncher._dial = soon_given_up
        await until_direct(a, b)
        assert list(b.links.puncher._rounds.values()) == [2]
        assert anyio.current_time() - began < 20


@pytest.mark.parametrize("kind", KINDS)
async def test_without_punching_it_answers_none_and_stays_relayed(kind):
    async with met(hides=kind, punch=False) as (_, a, b):
        await anyio.sleep(1)  # more than both attempts
        assert all("/p2p-circuit" in path for path in (await a.paths())[b.peer])
        assert await request(a, b.peer, ECHO, b"on", limit=9, timeout=5) == b"on"
