"""The transport without a daemon: beside daemons, against peers that break its rules, and when connections die."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.to_thread
import psutil
import pytest

from decentral.errors import ConfigError, ListenError, PeerUnreachable, StreamClosed
from decentral.transport.circuit import STOP, admit
from decentral.transport.daemon import DaemonTransport
from decentral.transport.daemon_options import DaemonOptions
from decentral.transport.multistream import propose
from decentral.transport.native import NativeOptions, NativeTransport
from decentral.transport.requests import notify, request, serve_requests
from decentral.transport.secured import Plain, secure_outbound
from decentral.transport.tcp import endpoint
from decentral.transport.yamux import PROTOCOL
from decentral.wire.keys import Signer, peer_name

from .conftest import LOOPBACK

ECHO, NOTE = "/test/echo", "/test/note"
BODY = os.urandom(16 << 20)


def native(listen=LOOPBACK, options=None) -> NativeTransport:
    return NativeTransport(Signer.generate(), listen=listen, options=options)


async def echo(peer, body):
    return body


def run(script, backend="asyncio"):
    async def bounded():
        with anyio.fail_after(60):
            await script()

    anyio.run(bounded, backend=backend)


@asynccontextmanager
async def raw_connection(b: NativeTransport, signer: Signer):
    """What a stranger has who shook hands and now says what it likes."""
    host, port = endpoint(b.addresses()[0])
    async with await anyio.connect_tcp(host, port) as tcp:
        secured = await secure_outbound(tcp, signer, b.peer)
        await propose(secured, PROTOCOL)
        yield secured


async def until_dropped(secured) -> None:
    """Read on; StreamClosed when the other side has had enough."""
    while True:
        await secured.receive()


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


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_bodies_that_cross_do_not_block_each_other(backend):
    a, b = native(), native()
    for transport in (a, b):
        serve_requests(transport, ECHO, echo, limit=len(BODY))
    answers = []

    async def ask(x, y):
        answers.append(await request(x, y.peer, ECHO, BODY, limit=len(BODY), timeout=30))

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(ask, a, b)
                    group.start_soon(ask, b, a)

    run(script, backend)
    assert answers == [BODY] * 4


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


def test_a_transfer_cancelled_half_way_leaves_the_connection_whole():
    a, b = native(), native()
    serve_requests(b, ECHO, echo, limit=len(BODY))

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            for milliseconds in range(12):
                with anyio.move_on_after(milliseconds / 1000):
                    await request(a, b.peer, ECHO, BODY, limit=len(BODY), timeout=10)
            assert await request(a, b.peer, ECHO, BODY, limit=len(BODY), timeout=10) == BODY
            while b.budget.held(a.peer) != (0, 0):  # until it has seen the last stream's end
                await anyio.sleep(0.01)

    run(script)


def test_who_sends_more_than_the_window_loses_the_connection():
    b = native()

    async def deaf(stream):
        await anyio.sleep_forever()

    b.serve("/test/deaf", deaf)

    async def script():
        a = native()
        async with a, b:
            await a.connect(b.peer, b.addresses())
            stream = await a.open(b.peer, "/test/deaf")
            stream.muxed.send_window = 1 << 30
            with pytest.raises(StreamClosed):
                await stream.send(BODY)

    run(script)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!BBHII", 0, 0, 1, 1, (1 << 32) - 1),
        struct.pack("!BBHII", 0, 0, 0, 7, (1 << 32) - 1),
        struct.pack("!BBHII", 1, 0, 1, 1, 0),
        struct.pack("!BBHII", 0, 9, 0, 0, 0),
        struct.pack("!BBHII", 0, 1, 1, 2, 0),
        struct.pack("!BBHII", 0, 1, 1, 1, 0) * 2,
        struct.pack("!BBHII", 0, 1, 1, 1, (1 << 32) - 1),
    ],
    ids=["4 GiB", "4 GiB to nobody", "version", "type", "our number", "number twice", "window of 4 GiB"],
)
def test_a_frame_that_breaks_a_rule_ends_its_connection_and_no_other(frame):
    a, b = native(), native()
    serve_requests(b, ECHO, echo, limit=100)

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            async with raw_connection(b, Signer.generate()) as secured:
                await secured.send(frame)
                with pytest.raises(StreamClosed):
                    await until_dropped(secured)
            assert await request(a, b.peer, ECHO, b"fine", limit=100, timeout=10) == b"fine"

    run(script)


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


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_thousand_silent_connections_keep_nobody_out_and_cost_little(backend):
    a, b = native(), native()
    serve_requests(b, ECHO, echo, limit=100)

    async def script():
        async with a, b:
            host, port = endpoint(b.addresses()[0])
            before = psutil.Process().memory_info().rss
            sockets = [socket.socket() for _ in range(1000)]
            try:
                for one in sockets:
                    await anyio.to_thread.run_sync(one.connect, (host, port))
                await a.connect(b.peer, b.addresses())
                assert await request(a, b.peer, ECHO, b"fine", limit=100, timeout=10) == b"fine"
                assert b._links.handshakes.num_strangers <= 64
                assert psutil.Process().memory_info().rss - before < 64 << 20
            finally:
                for one in sockets:
                    one.close()

    run(script, backend)


def test_one_peer_holds_only_so_many_connections():
    b, signer = native(), Signer.generate()

    async def script():
        async with b, raw_connection(b, signer) as first, AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(raw_connection(b, signer))
            with pytest.raises(StreamClosed):
                await until_dropped(first)

    run(script)


def test_another_peer_at_the_address_is_not_taken_for_the_one_that_was_dialled():
    a, b, stranger = native(), native(), Signer.generate()

    async def script():
        async with a, b:
            with pytest.raises(PeerUnreachable, match="answers in its place"):
                await a.connect(stranger.peer, b.addresses())

    run(script)


def test_who_speaks_something_else_or_nothing_is_dropped():
    b = native(options=NativeOptions(dial_timeout=0.5))

    async def script():
        async with b:
            host, port = endpoint(b.addresses()[0])
            for words in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"",
                b"\xff" * 64,
                b"\x13/multistream/1.0.0\n\x04/tls\n" + b"\x00" * 9,
            ):
                async with await anyio.connect_tcp(host, port) as tcp:
                    plain = Plain(tcp)
                    await plain.send(words)
                    with pytest.raises(StreamClosed):
                        await plain.receive_exactly(1000)

    run(script)


def test_a_peer_that_comes_back_is_dialled_again_at_its_addresses():
    signer = Signer.generate()
    a, b = native(), NativeTransport(signer, listen=LOOPBACK)

    async def script():
        async with a:
            async with b:
                serve_port = b.addresses()[0]
                await a.connect(b.peer, b.addresses())
            with pytest.raises(PeerUnreachable):
                await a.open(b.peer, ECHO)
            again = NativeTransport(signer, listen=(serve_port.rpartition("/p2p/")[0],))
            serve_requests(again, ECHO, echo, limit=100)
            async with again:
                assert await request(a, b.peer, ECHO, b"back", limit=100, timeout=10) == b"back"

    run(script)


def test_what_it_cannot_listen_on_is_said_before_anything_starts():
    async def script():
        with pytest.raises(ConfigError, match="TCP only"):
            await native(("/ip4/127.0.0.1/udp/0/quic-v1",)).__aenter__()
        async with native() as a:
            with pytest.raises(ListenError, match="cannot listen"):
                await native((a.addresses()[0].rpartition("/p2p/")[0],)).__aenter__()

    run(script)


def test_all_interfaces_are_named_one_by_one():
    async def script():
        async with NativeTransport(Signer.generate()) as a:
            assert a.addresses()
            assert not any("/0.0.0.0/" in address or "/::/" in address for address in a.addresses())

    run(script)


RELAYS = DaemonOptions(reachability="public")


@asynccontextmanager
async def large_relay(daemons):
    """A relay that carries more than 128 KiB a connection: the daemon grants 4 GiB in four of six starts."""
    while True:
        async with DaemonTransport(daemons.identity(), listen=LOOPBACK, options=RELAYS) as relay:
            async with native(options=NativeOptions(relays=relay.addresses())) as probe:
                with anyio.move_on_after(2) as scope:
                    await placed(probe)
            if not scope.cancelled_caught:
                yield relay
                return


async def placed(transport: NativeTransport) -> tuple[str, ...]:
    """Its addresses through a relay, once it has one."""
    while True:
        if found := tuple(address for address in transport.addresses() if "/p2p-circuit/" in address):
            return found
        await anyio.sleep(0.02)


@pytest.mark.parametrize("who_dials", ["native", "daemon"])
def test_a_native_peer_is_reached_through_a_relay_and_carries_large_bodies(daemons, who_dials):
    b = native()

    async def script():
        async with large_relay(daemons) as relay:
            hidden = native(options=NativeOptions(relays=relay.addresses(), announce=("/ip4/127.0.0.1/tcp/1",)))
            dials = b if who_dials == "native" else daemons.transport()
            for transport in (hidden, dials):
                serve_requests(transport, ECHO, echo, limit=len(BODY))
            async with hidden, dials:
                await dials.connect(hidden.peer, await placed(hidden))
                assert await request(dials, hidden.peer, ECHO, BODY, limit=len(BODY), timeout=20) == BODY
                assert await request(hidden, dials.peer, ECHO, BODY, limit=len(BODY), timeout=20) == BODY
                assert hidden.traffic.of(dials.peer).sent == 2 * len(BODY) + 8

    run(script)


def test_a_native_peer_dials_a_daemon_through_a_relay(daemons):
    a = native()

    async def script():
        async with large_relay(daemons) as relay:
            options = DaemonOptions(reachability="private", relays=relay.addresses())
            hidden = DaemonTransport(daemons.identity(), listen=LOOPBACK, options=options)
            serve_requests(hidden, ECHO, echo, limit=len(BODY))
            async with hidden, a:
                (address,) = relay.addresses()
                through = f"{address}/p2p-circuit/p2p/{peer_name(hidden.peer)}"
                await hidden.connect(relay.peer, relay.addresses())
                with anyio.fail_after(30):
                    while True:
                        try:
                            await a.connect(hidden.peer, (through,))
                            break
                        except PeerUnreachable:  # its place is not kept yet
                            await anyio.sleep(0.1)
                assert await request(a, hidden.peer, ECHO, BODY, limit=len(BODY), timeout=20) == BODY

    run(script)


def test_a_place_is_asked_for_again_when_the_relay_was_away(daemons, monkeypatch):
    identity = daemons.identity()
    monkeypatch.setattr("decentral.transport.places.LEAST", 0)  # what it carries is not the question here

    async def script():
        async with AsyncExitStack() as stack:
            async with DaemonTransport(identity, listen=LOOPBACK, options=RELAYS) as relay:
                hidden = native(options=NativeOptions(relays=relay.addresses()))
                where = tuple(address.rpartition("/p2p/")[0] for address in relay.addresses())
                await stack.enter_async_context(hidden)
                await placed(hidden)
            while any("/p2p-circuit/" in address for address in hidden.addresses()):
                await anyio.sleep(0.02)
            async with DaemonTransport(identity, listen=where, options=RELAYS):
                await placed(hidden)


def test_a_relay_that_carries_too_little_is_passed_over(daemons, monkeypatch, caplog):
    monkeypatch.setattr("decentral.transport.places.LEAST", 1 << 62)

    async def script():
        async with (
            DaemonTransport(daemons.identity(), listen=LOOPBACK, options=RELAYS) as relay,
            native(options=NativeOptions(relays=relay.addresses())) as hidden,
        ):
            while "use another relay" not in caplog.text:
                await anyio.sleep(0.02)
            assert not any("/p2p-circuit/" in address for address in hidden.addresses())

    run(script)


def test_nobody_but_its_relay_may_bring_it_connections():
    a, b = native(), native()

    async def script():
        async with a, b:
            await a.connect(b.peer, b.addresses())
            stream = await a.open(b.peer, STOP)
            with pytest.raises(StreamClosed):
                await admit(stream)

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
            (session,) = a._links.sessions.of(b.peer)
            async with anyio.create_task_group() as group:
                group.start_soon(session.finish, 5)
                while not session._shut:
                    await anyio.lowlevel.checkpoint()
                for stream in streams:
                    await stream.aclose()

    run(script)
    assert not caplog.records


def test_when_there_are_too_many_connections_idle_ones_go_and_those_in_use_stay(monkeypatch):
    monkeypatch.setattr("decentral.transport.sessions._CONNECTIONS", 8)
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
                while b._links.sessions.num_peers > 8:
                    await anyio.sleep(0.01)
            await used.send(b"?")
            assert await used.receive_exactly(1) == b"!"

    run(script)
