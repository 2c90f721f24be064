"""The relay: peers of both kinds reach each other through it, whole, and it holds no more than it says."""

from __future__ import annotations

import inspect
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
import psutil
import pytest

from decentral.errors import ConfigError, PeerUnreachable, StreamClosed, TransportError
from decentral.transport.daemon import supervisor
from decentral.transport.native.links import LinkOptions
from decentral.transport.native.relay import Relay
from decentral.transport.native.transport import NativeTransport
from decentral.transport.protocols.circuit import (
    HOP,
    HopStatus,
    RelayLimits,
    admit,
    network_of,
    pass_through,
    read_message,
    write_message,
)
from decentral.transport.protocols.messages import bytes_fields, multiaddr_to_text, number_field, number_fields
from decentral.transport.requests import notify, request, serve_requests
from decentral.wire.keys import Signer
from tests.kit.relays import (
    BODY,
    ECHO,
    KINDS,
    LOOPBACK,
    NOTE,
    NOWHERE,
    RESERVE,
    asking,
    connect_to,
    connected,
    echo,
    exchange,
    hidden,
    hidden_daemon,
    hidden_native,
    native,
    relay,
    status,
    take_place,
    through,
    until,
    visible,
)

EVERY = (*KINDS, "daemon")
EACH_ONCE = list(zip(EVERY, (*EVERY[1:], EVERY[0]), strict=True))
OTHERS = [(hides, dials) for hides in EVERY for dials in EVERY if (hides, dials) not in EACH_ONCE]


@pytest.mark.parametrize(
    ("hides", "dials"), [*EACH_ONCE, *(pytest.param(*pair, marks=pytest.mark.long) for pair in OTHERS)]
)
async def test_peers_of_each_kind_reach_those_of_each_kind_through_it(daemons, hides, dials):
    at = relay()
    async with at:
        guest, other = hidden(hides, at, daemons), visible(dials, daemons)
        for transport in (guest, other):
            serve_requests(transport, ECHO, echo, limit=len(BODY))
        async with guest, other:
            await until(lambda: at.relay.places == 1)
            await exchange(at, guest, other)
            assert at.relay.connections == 1
            assert at.relay.counts.nbytes > 4 * len(BODY)
        await until(lambda: at.relay.connections == 0)
        await until(lambda: at.relay.places == 0)


# ---- connections by hand, below the handshake between their ends ----


class Taker(NativeTransport):
    """A peer that takes what a relay brings and does with it what the test says."""

    def __init__(self):
        super().__init__(Signer.generate(), listen=LOOPBACK)
        self.taken = []
        self.links.admit = self._take

    async def _take(self, stream):
        await admit(stream)
        self.taken.append(stream)


@asynccontextmanager
async def by_hand(at, a, b: Taker, count=1):
    """``count`` connections of a to b: the ends here and the ends there."""
    await take_place(at, b)
    ends = []
    for n in range(count):
        stream = await a.open(at.peer, HOP)
        await pass_through(stream, b.peer)
        ends.append(stream)
        await until(lambda n=n: len(b.taken) == n + 1)
    yield ends, b.taken


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.long)])
async def test_who_does_not_read_holds_the_sender_back_and_the_relay_holds_little(backend):
    at, a, b = relay(), native(), Taker()
    async with connected(a, at), b, by_hand(at, a, b, 4) as (ends, _):
        before = psutil.Process().memory_info().rss
        with anyio.move_on_after(1.5):
            async with anyio.create_task_group() as group:
                for end in ends:
                    group.start_soon(end.send, BODY)
        assert at.relay.counts.nbytes <= 4 * (1 << 18)  # what b's windows take unread
        assert psutil.Process().memory_info().rss - before < 24 << 20  # of all three, which live here
        assert at.relay.connections == 4


@pytest.mark.parametrize(
    ("limits", "count", "who"),
    [({"connections_per_pair": 2}, 2, 0), ({"connections": 1}, 1, 1), ({"connections_per_peer": 1}, 1, 1)],
)
async def test_connections_above_a_bound_are_refused_and_room_is_made_when_one_ends(limits, count, who):
    at, a, other, b = relay(**limits), native(), native(), Taker()
    async with connected(a, at), other, b, by_hand(at, a, b, count) as (ends, _):
        asks = (a, other)[who]
        await asks.connect(at.peer, at.addresses())
        assert await status(at, asks, connect_to(b.peer)) == HopStatus.RESOURCE_LIMIT_EXCEEDED
        with pytest.raises(PeerUnreachable, match="201"):
            await pass_through(await asks.open(at.peer, HOP), b.peer)
        ends[0].reset()
        await until(lambda: at.relay.connections == count - 1)
        assert await status(at, asks, connect_to(b.peer)) == HopStatus.OK


@pytest.mark.long
async def test_a_peer_that_floods_it_with_questions_keeps_nobody_else_out():
    at, flooder, b = relay(), native(), native(announce=NOWHERE)

    async def ask_on(message):
        while True:
            with suppress(StreamClosed, PeerUnreachable):
                await status(at, flooder, message)

    async with connected(flooder, at), b, anyio.create_task_group() as group:
        for message in (RESERVE, connect_to(b.peer), b"\xff" * 4000, b""):
            for _ in range(50):
                group.start_soon(ask_on, message)
        await anyio.sleep(1)
        before = psutil.Process().memory_info().rss
        hidden, other = hidden_native(at), native()
        serve_requests(hidden, ECHO, echo, limit=1 << 20)
        async with hidden, other:
            await until(lambda: at.relay.has_place(hidden.peer))
            await other.connect(hidden.peer, through(at, hidden.peer))
            body = BODY[: 1 << 20]
            assert await request(other, hidden.peer, ECHO, body, limit=1 << 20, timeout=20) == body
        assert at.relay.places <= 2
        assert psutil.Process().memory_info().rss - before < 48 << 20
        group.cancel_scope.cancel()


async def test_streams_whose_protocol_is_never_said_keep_nobody_else_out():
    at, silent, b = relay(), native(), native()
    async with connected(silent, at), b:
        session = await silent.links.dialler.session(at.peer)
        for _ in range(300):
            session.open()
        await anyio.sleep(0.2)
        await take_place(at, b)


async def test_a_stream_brings_no_more_than_a_question_until_it_is_joined():
    at, a, b = relay(), native(), Taker()
    async with connected(a, at), b:
        async with asking(at, a):
            (session,) = at.links.sessions.of(a.peer)
            assert {stream.most_unread for stream in session.streams} == {1 << 14}
        async with by_hand(at, a, b):
            assert {stream.most_unread for stream in session.streams} == {None}


async def test_who_has_a_place_stays_connected_when_strangers_are_too_many():
    at, guest = relay(places=2, peers=6), native()
    async with at, guest, AsyncExitStack() as stack:
        await take_place(at, guest)
        for _ in range(12):
            stranger = await stack.enter_async_context(native())
            await stranger.connect(at.peer, at.addresses())
        with anyio.fail_after(20):
            await until(lambda: at.relay.peers <= 6)
        assert at.relay.has_place(guest.peer)
        assert at.links.sessions.has(guest.peer)


async def test_one_network_holds_only_so_many_connections_and_the_next_comes_in_when_one_ends():
    at, late = relay(places=2, peers=8, peers_per_network=3), native()
    async with at, late, AsyncExitStack() as stack:
        guest = await stack.enter_async_context(native())
        await take_place(at, guest)
        for _ in range(2):
            stranger = await stack.enter_async_context(native())
            await stranger.connect(at.peer, at.addresses())
        with suppress(PeerUnreachable):
            await late.connect(at.peer, at.addresses())
        with pytest.raises(PeerUnreachable):
            await late.open(at.peer, HOP)
        assert at.relay.has_place(guest.peer)
        await (await stranger.links.dialler.session(at.peer)).finish(5)
        await until(lambda: at.relay.peers == 2)
        await take_place(at, late)


# ---- several relays ----


async def test_who_is_reached_through_one_relay_is_not_brought_by_another_as_well():
    """Each connection that comes and is closed again may cost a daemon its only try at a direct one."""
    relays = first, second = relay(), relay()
    async with first, second:
        places = tuple(at.addresses()[0] for at in relays)
        async with native(relays=places, announce=NOWHERE, punch=False) as hidden:
            await until(lambda: first.relay.places == second.relay.places == 1)
            for _ in range(5):
                async with native() as dials:
                    await dials.connect(hidden.peer, (*through(first, hidden.peer), *through(second, hidden.peer)))
        assert (first.relay.counts.joined, second.relay.counts.joined) == (5, 0)


async def test_when_one_relay_does_not_bring_the_peer_the_next_does():
    without, at = relay(), relay()
    async with without, at, hidden_native(at) as hidden, native() as dials:
        await until(lambda: at.relay.places == 1)
        await dials.connect(hidden.peer, (*through(without, hidden.peer), *through(at, hidden.peer)))
        assert at.relay.counts.joined == 1


# ---- ends, restarts, rates ----


@pytest.mark.parametrize("who", ["native", "daemon"])
async def test_what_is_said_last_before_leaving_arrives(daemons, who):
    at, heard = relay(), []

    async def note(peer, body):
        heard.append(body)
        return b""

    async with at:
        hidden = hidden_native(at)
        serve_requests(hidden, NOTE, note, limit=len(BODY))
        async with hidden:
            await until(lambda: at.relay.places == 1)
            for n in range(3):
                async with visible(who, daemons) as other:
                    await other.connect(hidden.peer, through(at, hidden.peer))
                    await notify(other, hidden.peer, NOTE, BODY[: 1 << 20] + bytes([n]), 20)
            await until(lambda: len(heard) == 3)
    assert [body[-1] for body in heard] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["native", "daemon"])
async def test_peers_take_their_places_again_when_it_was_away(kind, daemons, monkeypatch):
    """A daemon does so by being started again: sooner here than where a place is worth its connections."""
    monkeypatch.setattr(supervisor, "FIRST_PATIENCE", 1.0)
    monkeypatch.setattr(supervisor, "LOOK_EVERY", 0.2)
    signer, away, gone = Signer.generate(), anyio.Event(), anyio.Event()

    async def serve(at, *, task_status):
        async with at:
            task_status.started()
            await away.wait()
        gone.set()

    async with anyio.create_task_group() as group:
        first = relay(signer)
        await group.start(serve, first)
        where = tuple(address.rpartition("/p2p/")[0] for address in first.addresses())
        hidden, dials = hidden_native(first) if kind == "native" else hidden_daemon(first, daemons), native()
        serve_requests(hidden, ECHO, echo, limit=100)
        async with hidden, dials:
            await until(lambda: first.relay.places == 1)
            away.set()
            await gone.wait()
            async with relay(signer, listen=where) as again:
                await until(lambda: again.relay.has_place(hidden.peer))
                await dials.connect(hidden.peer, through(again, hidden.peer))
                assert await request(dials, hidden.peer, ECHO, b"back", limit=100, timeout=10) == b"back"


@pytest.mark.long
async def test_the_rate_it_is_given_is_kept_over_sockets():
    at, a, b = relay(rate=2e6), native(), Taker()

    async def drain(stream):
        while await stream.muxed.receive(1 << 16):
            pass

    async with connected(a, at), b, anyio.create_task_group() as group, by_hand(at, a, b, 2) as (ends, taken):
        for stream in taken:
            group.start_soon(drain, stream)
        for end in ends:
            group.start_soon(end.send, BODY)
        began, before = anyio.current_time(), at.relay.counts.nbytes
        await anyio.sleep(5)
        rate = (at.relay.counts.nbytes - before) / (anyio.current_time() - began)
        assert 1e6 < rate < 1.05 * 2e6  # a busy machine may make it slower, nothing makes it faster
        group.cancel_scope.cancel()


async def test_a_daemon_is_reached_at_a_place_that_it_does_not_name_and_not_started_again_for_it(daemons, monkeypatch):
    """The relay is on loopback: go-libp2p names places at public addresses only."""
    monkeypatch.setattr(supervisor, "FIRST_PATIENCE", 1.0)
    monkeypatch.setattr(supervisor, "LOOK_EVERY", 0.2)
    at, found_out, find_unnamed_places = relay(), [], supervisor.find_unnamed_places

    async def counted(*about):
        found_out.append(await find_unnamed_places(*about))
        return found_out[-1]

    monkeypatch.setattr(supervisor, "find_unnamed_places", counted)
    async with at, hidden_daemon(at, daemons) as hidden, native() as dials:
        place = through(at, hidden.peer)[0]
        assert place in hidden.addresses()
        await until(lambda: len(found_out) == 3)  # once at the start, and whenever it was without one for too long
        assert all(found_out)
        assert hidden.starts == 1
        await dials.connect(hidden.peer, hidden.addresses()[-1:])
        assert place in hidden.addresses()


# ---- what it refuses, by which word, and the bounds it is given ----


NOBODY = Signer(bytes([77]) * 32).peer


async def it_takes_a_place_by_hand(at, a, b):
    await take_place(at, b)  # and expects nobody's connections
    return connect_to(b.peer)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        pytest.param(lambda at, a, b: connect_to(NOBODY), HopStatus.NO_RESERVATION, id="nobody is at home"),
        pytest.param(lambda at, a, b: connect_to(b.peer), HopStatus.NO_RESERVATION, id="it has no place"),
        pytest.param(lambda at, a, b: connect_to(a.peer), HopStatus.PERMISSION_DENIED, id="it asks for itself"),
        pytest.param(it_takes_a_place_by_hand, HopStatus.CONNECTION_FAILED, id="the other does not take it"),
        pytest.param(lambda at, a, b: number_field(1, 2), HopStatus.UNEXPECTED_MESSAGE, id="that is no question"),
        pytest.param(lambda at, a, b: b"\xff\xff\xff", HopStatus.MALFORMED_MESSAGE, id="that is no message"),
        pytest.param(lambda at, a, b: number_field(1, 1), HopStatus.MALFORMED_MESSAGE, id="it names nobody"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_own_word(ask, answer):
    at, a, b = relay(), native(), native()
    async with at, a, b:
        await b.connect(at.peer, at.addresses())
        await a.connect(at.peer, at.addresses())
        question = ask(at, a, b)
        assert await status(at, a, await question if inspect.isawaitable(question) else question) == answer
        assert at.relay.counts.refused == {answer: 1}
        assert at.relay.connections == 0


@pytest.mark.parametrize("limits", [{"places": 2}, {"places_per_network": 2}])
async def test_places_are_refused_above_the_bound_and_who_has_one_may_renew_it(limits):
    at = relay(**limits)
    peers = [native() for _ in range(3)]
    async with at, peers[0], peers[1], peers[2]:
        for peer in peers[:2]:
            assert await status(at, peer, RESERVE) == HopStatus.OK
        assert await status(at, peers[2], RESERVE) == HopStatus.RESERVATION_REFUSED
        assert await status(at, peers[0], RESERVE) == HopStatus.OK
        with pytest.raises(TransportError, match="says no"):
            await take_place(at, peers[2])
        assert at.relay.places == 2


async def test_a_place_names_its_end_its_terms_and_where_the_relay_is():
    at, a = relay(nbytes=1 << 40, seconds=600, place_seconds=900), native()
    async with at, a, asking(at, a) as stream:
        await write_message(stream, RESERVE)
        fields = bytes_fields(await read_message(stream))
        addresses = bytes_fields(fields[3][0])[2]
        assert [multiaddr_to_text(address) for address in addresses] == list(at.addresses())
        assert number_fields(fields[4][0]) == {1: 600, 2: 1 << 40}
        assert abs(number_fields(fields[3][0])[1] - time.time() - 900) < 5
        assert (await take_place(at, a)).nbytes == 1 << 40


async def test_a_place_ends_with_the_last_connection_of_its_peer():
    at, a = relay(), native()
    async with at:
        async with a:
            await take_place(at, a)
            assert at.relay.has_place(a.peer)
        await until(lambda: not at.relay.has_place(a.peer))


class Guests:
    """What a relay sees of its transport's links: here the sessions only."""

    def __init__(self, hosts):
        self.hosts, self.sessions, self.dialler, self.options = hosts, self, None, LinkOptions()
        self.addresses = tuple

    def host_of(self, peer):
        return self.hosts.get(peer)


async def test_places_expire_when_they_are_not_renewed(virtual_time):
    one, two = b"1" * 32, b"2" * 32
    served = Relay(Guests({one: "192.0.2.1", two: "192.0.2.2"}), RelayLimits(places=1))
    served.give_place(one)
    await anyio.sleep(3599)
    with pytest.raises(TransportError, match="all 1 places are taken"):
        served.give_place(two)
    await anyio.sleep(2)
    assert (served.places, served.has_place(one)) == (0, False)
    served.give_place(two)
    assert served.has_place(two)


async def test_who_did_not_come_directly_gets_no_place(virtual_time):
    with pytest.raises(TransportError, match="permission_denied"):
        Relay(Guests({}), RelayLimits()).give_place(b"1" * 32)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("relay.example.org", "relay.example.org"),
    ],
)
def test_a_network_is_an_address_or_what_one_customer_gets(host, network):
    assert network_of(host) == network


@pytest.mark.parametrize(
    "wrong",
    [{"places": 0}, {"connections": 0}, {"nbytes": 131072}, {"nbytes": 1 << 64}, {"seconds": 1}, {"rate": 0.0}],
)
def test_limits_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"RelayLimits\\({next(iter(wrong))}="):
        RelayLimits(**wrong)


def test_more_memory_carries_more_connections_and_too_little_none():
    small, large = (RelayLimits.within(mb * 10**6, places=128) for mb in (256, 400))
    assert 1 < small.connections < large.connections
    with pytest.raises(ConfigError, match="allow more memory"):
        RelayLimits.within(64 * 10**6, places=128)
