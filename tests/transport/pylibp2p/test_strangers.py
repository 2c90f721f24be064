"""The transport on py-libp2p against who breaks its rules, says nothing, or comes in great number: it serves on."""

from __future__ import annotations

import os
import threading
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import psutil
import pytest

from decentral.errors import PeerUnreachable, StreamClosed
from decentral.transport.holepunch import DCUTR
from decentral.transport.native.tcp import endpoint
from decentral.transport.protocols.circuit import STOP
from decentral.transport.protocols.identify import IDENTIFY, ask
from decentral.transport.protocols.noise import Plain
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.requests import serve_requests
from decentral.wire.keys import Signer
from tests.kit.relays import BODY, ECHO, connected, echo, is_served, native, on_libp2p, sleep_for_ever, until
from tests.transport.pylibp2p.stock import Stock
from tests.transport.raw import opening, piece, raw_connection, until_dropped, until_fed

PING = "/ipfs/ping/1.0.0"
HANDLERS = (PING, IDENTIFY, STOP, DCUTR, ECHO)
HEADER = b"\x13/multistream/1.0.0\n"


def line(name: bytes) -> bytes:
    return bytes([len(name) + 1]) + name + b"\n"


NEGOTIATIONS = {
    "not utf-8": HEADER + line(b"\xff\xfe no name in utf-8"),
    "header not utf-8": line(b"\xff" * 40),
    "4 GiB": HEADER + b"\xff\xff\xff\xff\x0f",
    "no length": HEADER + b"\x00",
    "empty": HEADER + line(b""),
    "ls": HEADER + line(b"ls"),
    "forty": HEADER + line(b"/nobody/serves/this") * 40,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "noise": os.urandom(4096),
}


async def test_garbage_in_a_streams_negotiation_ends_nothing_but_the_stream(caplog):
    async with connected(native(), on_libp2p(dial_timeout=2), answers=echo) as (a, b):
        for kind, words in NEGOTIATIONS.items():
            async with raw_connection(b, Signer.generate()) as secured:
                for number in range(1, 40, 2):
                    await secured.send(opening(number) + piece(number, words))
                assert await is_served(a, b), kind
    assert not caplog.records


GARBAGE = {
    "noise": os.urandom(2048),
    "4 GiB": b"\xff\xff\xff\xff\x0f" + bytes(100),
    "no varint": b"\xff" * 100,
    "nothing": b"\x00" * 100,
    "no message": b"\x04\xff\xff\xff\xff",
    "a message of nobody's": b"\x06\x08\x7f\x12\x02ab",
}


@pytest.mark.parametrize("protocol", HANDLERS)
@pytest.mark.parametrize("ending", [4, 8, 0], ids=["closed", "reset", "left open"])
async def test_garbage_in_any_handler_ends_nothing_but_the_stream(protocol, ending, caplog):
    async with connected(native(), on_libp2p(dial_timeout=2), answers=echo) as (a, b):
        async with raw_connection(b, Signer.generate()) as secured:
            for number, words in enumerate([*GARBAGE.values()] * 3):
                asked = HEADER + line(protocol.encode()) + words
                await secured.send(opening(2 * number + 1) + piece(2 * number + 1, asked, ending))
            await until_fed(secured)
            await until(lambda: not b.node.host.num_negotiating)
            assert await is_served(a, b)
        await until(lambda: len(b.node.links.sessions.paths()) == 1)
        assert await is_served(a, b)
        async with native() as newcomer:
            await newcomer.connect(b.peer, b.addresses())
            assert await is_served(newcomer, b)
    assert not caplog.records


async def test_garbage_of_the_relay_where_it_has_a_place_ends_nothing_but_the_stream(caplog):
    a = native()
    serve_requests(a, ECHO, echo, limit=100)
    async with a, on_libp2p(relays=a.addresses()[:1], dial_timeout=2) as b:
        await until(lambda: b.node.links.sessions.of(a.peer))
        for kind, words in GARBAGE.items():
            for _ in range(3):
                stream = await a.open(b.peer, STOP)
                await stream.send(words)
                await stream.aclose()
            assert await is_served(b, a), kind
    assert not [record for record in caplog.records if record.exc_info]


async def test_no_handler_is_left_out_of_that():
    b = on_libp2p()
    serve_requests(b, ECHO, echo, limit=100)
    async with b:
        assert {str(one) for one in b.node.host.multiselect.get_protocols()} == set(HANDLERS)


async def test_nobody_writes_into_its_store_of_peers_and_it_dials_nobody_on_its_own():
    """As shipped it takes addresses that are pushed at it, and an auto-dialler goes there."""
    push = "/ipfs/id/push/1.0.0"
    shipped = Stock().host
    assert push in shipped.multiselect.get_protocols()
    assert hasattr(shipped.get_network(), "auto_connector")
    async with connected(native(), on_libp2p()) as (a, b):
        with pytest.raises(PeerUnreachable):
            await a.open(b.peer, push)
        assert not hasattr(b.node.host.get_network(), "auto_connector")


async def test_a_bug_in_a_handler_of_the_host_ends_its_stream_and_nothing_else(caplog):
    a, b = native(), on_libp2p()
    serve_requests(b, ECHO, echo, limit=100)

    async def wrong(stream):
        raise ZeroDivisionError

    async with a, b:
        b.node.host.set_stream_handler("/test/wrong", wrong)
        await a.connect(b.peer, b.addresses())
        for _ in range(3):
            stream = await a.open(b.peer, "/test/wrong")
            with pytest.raises(StreamClosed):
                await stream.receive_exactly(1)
        assert await is_served(a, b)
    assert {record.exc_info[0] for record in caplog.records} == {ZeroDivisionError}


async def test_hundreds_of_connections_over_its_life_let_the_next_one_in():
    """As shipped nobody gets in after 250, though they have left."""
    a, b = native(), on_libp2p()
    serve_requests(b, ECHO, echo, limit=100)

    async def come_and_go(number):
        for _ in range(number):
            async with raw_connection(b, Signer.generate()):
                pass

    async with a, b:
        await come_and_go(100)
        before = psutil.Process().memory_info().rss
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(come_and_go, 75)
        await a.connect(b.peer, b.addresses())
        assert await is_served(a, b)
        await until(lambda: len(b.node.links.sessions.paths()) <= 1)
        await until(lambda: len(b.node.host.get_network().connections) <= 1)
        assert len(b.node.host.peerstore.peer_data_map) <= 1  # no row for each stranger
        assert psutil.Process().memory_info().rss - before < 32 << 20


async def test_silent_streams_of_strangers_keep_no_member_out():
    a, b = native(), on_libp2p()
    b.budget.prefer({a.peer})
    serve_requests(b, ECHO, echo, limit=100)

    async def hold(secured):
        await secured.send(b"".join(map(opening, range(1, 400, 2))))
        await until_dropped(secured)

    async with connected(a, b), anyio.create_task_group() as group, AsyncExitStack() as stack:
        for _ in range(3):
            group.start_soon(hold, await stack.enter_async_context(raw_connection(b, Signer.generate())))
        await until(lambda: b.node.host.num_negotiating >= 256)
        assert await is_served(a, b)
        group.cancel_scope.cancel()


async def test_streams_of_its_own_protocols_are_bounded_too():
    b = on_libp2p()
    words = HEADER + line(PING.encode())
    async with b, raw_connection(b, Signer.generate()) as secured:
        for number in range(1, 200, 2):
            await secured.send(opening(number) + piece(number, words))
        ended = set()
        with anyio.fail_after(8):  # silence ends them after 10 s
            while len(ended) < 100 - 64:  # of one peer
                head = await secured.receive_exactly(12)
                kind, flags, number, length = head[1], head[3], *(int.from_bytes(head[n : n + 4]) for n in (4, 8))
                await secured.receive_exactly(length if kind == 0 else 0)
                if flags & 12:
                    ended.add(number)


async def test_only_noise_is_spoken():
    """Its plaintext believes the peer id that it is told, and its SECIO is broken since 2019."""
    b = on_libp2p()
    async with b, await anyio.connect_tcp(*endpoint(b.addresses()[0])) as tcp:
        plain = Plain(tcp)
        for name in (b"/plaintext/2.0.0", b"/secio/1.0.0", b"/tls/1.0.0"):
            await plain.send((HEADER if name.startswith(b"/plain") else b"") + line(name))
        assert await plain.receive_exactly(20 + 3 * 4) == HEADER + b"\x03na\n" * 3


@pytest.mark.parametrize("reads", ["py-libp2p", "native"])
async def test_a_reader_that_stops_costs_no_memory_at_either_end(reads):
    a, b = (native(), on_libp2p()) if reads == "py-libp2p" else (on_libp2p(), native())

    async def offer():
        stream = await a.open(b.peer, ECHO)
        while True:
            await stream.send(BODY)

    async with connected(a, b, serves=sleep_for_ever), anyio.create_task_group() as group:
        before = psutil.Process().memory_info().rss
        for _ in range(8):  # 128 MiB at once
            group.start_soon(offer)
        await anyio.sleep(2)
        assert psutil.Process().memory_info().rss - before < 32 << 20
        group.cancel_scope.cancel()


async def test_what_was_started_ends_with_it():
    async with on_libp2p() as a, on_libp2p() as b:
        await a.connect(b.peer, b.addresses())
        assert sum(thread.name == "py-libp2p" for thread in threading.enumerate()) == 2
    assert not any(thread.name == "py-libp2p" for thread in threading.enumerate())


# ---- its thread: cancelled calls, and what is left ----


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_a_call_that_would_wait_for_ever_is_cancelled_in_the_thread_too(backend):
    async with connected(on_libp2p(), native(), serves=sleep_for_ever) as (a, b):
        stream = await a.open(b.peer, ECHO)
        for call in (lambda: stream.receive_exactly(1), lambda: stream.send(BODY)):
            with anyio.fail_after(5), anyio.move_on_after(0.05) as scope:
                await call()
            assert scope.cancelled_caught
        assert not a._thread._calls


async def test_streams_whose_opening_was_cancelled_are_given_back():
    async with connected(on_libp2p(), native(), answers=echo) as (a, b):
        for microseconds in range(0, 4000, 20):
            with anyio.move_on_after(microseconds / 1e6):
                await a.open(b.peer, ECHO)
                break
        (session,) = a.node.links.sessions.of(b.peer)
        await until(lambda: session.num_streams <= 1)  # that of the one that was opened


async def test_a_transport_that_was_left_answers_no_call_and_hangs_in_none():
    a, b = on_libp2p(), native()
    serve_requests(b, ECHO, echo, limit=100)
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


async def test_identify_tells_what_is_served_and_where_and_how_the_asker_looks():
    async with connected(native(), on_libp2p(), answers=echo) as (a, b):
        stream = (await a.links.dialler.session(b.peer)).open()
        told = await ask(NativeStream(b.peer, stream))
        assert told.addresses == tuple(where.rpartition("/p2p/")[0] for where in b.addresses())
        assert told.observed is not None
        assert told.observed.startswith("/ip4/127.0.0.1/tcp/")
