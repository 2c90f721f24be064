"""Connections leave from the port that is listened on, and from another one where that cannot be."""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest

from decentral.errors import DecentralError, ListenError
from decentral.transport.native.tcp import endpoint
from decentral.transport.native.transport import NativeTransport
from decentral.transport.protocols.messages import answer
from decentral.transport.protocols.noise import secure_inbound, secure_outbound
from decentral.transport.protocols.yamux import PROTOCOL
from decentral.transport.reachability import probe
from decentral.transport.requests import serve_requests
from decentral.wire.keys import Signer, peer_name
from tests.kit.relays import LOOPBACK, connected, echo, is_served, native, until

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.long)])


def port_of(transport: NativeTransport) -> int:
    return endpoint(transport.addresses()[0])[1]


@BACKENDS
@pytest.mark.parametrize("listen", [LOOPBACK, ("/ip4/0.0.0.0/tcp/0",), ("/ip6/::1/tcp/0",), None])
async def test_a_connection_leaves_from_the_port_that_is_listened_on(backend, listen):
    a = NativeTransport(Signer.generate(), listen=listen)
    b = NativeTransport(Signer.generate(), listen=("/ip6/::1/tcp/0",) if listen and "ip6" in listen[0] else LOOPBACK)
    async with connected(a, b, answers=echo):
        own = {endpoint(address.partition("/p2p/")[0])[1] for address in a.links.bound}
        assert a.links.sessions.local_port(b.peer) in own
        await until(lambda: b.links.sessions.has(a.peer))
        assert endpoint(b.links.sessions.paths()[a.peer][0])[1] in own
        assert await is_served(a, b)


@BACKENDS
async def test_a_connection_that_exists_already_is_made_from_another_port(backend):
    async with connected(native(), native()) as (a, b):
        async with await a.links.ports.dial("127.0.0.1", port_of(b)) as again:
            assert again.extra(anyio.abc.SocketAttribute.local_port) != port_of(a)
        with pytest.raises(OSError, match="assign requested address"):
            await a.links.ports.leave("127.0.0.1", port_of(b))


async def test_a_name_is_dialled_from_the_own_port_too():
    async with native() as a, native() as b:
        await a.connect(b.peer, [f"/dns4/localhost/tcp/{port_of(b)}/p2p/{peer_name(b.peer)}"])
        assert a.links.sessions.local_port(b.peer) == port_of(a)


@BACKENDS
async def test_where_both_dialled_at_once_and_nobody_answers_it_is_dialled_again_from_another_port(backend):
    a, b, ports = native(), Signer.generate(), []

    async def serve(socket):
        ports.append(socket.extra(anyio.abc.SocketAttribute.remote_port))
        async with socket:
            with suppress(DecentralError):
                if len(ports) == 1:
                    await secure_outbound(socket, b, a.peer)  # it dialled, too
                await answer(await secure_inbound(socket, b), (PROTOCOL,))
                await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with a, listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        await a.connect(b.peer, [f"/ip4/127.0.0.1/tcp/{port}"])
        assert ports[0] == port_of(a)
        assert a.links.sessions.local_port(b.peer) == ports[1] != ports[0]
        group.cancel_scope.cancel()


async def test_a_port_that_is_shared_with_connections_is_not_shared_with_another_listener():
    async with native() as a:
        with pytest.raises(ListenError, match="cannot listen"):
            async with NativeTransport(Signer.generate(), listen=(f"/ip4/127.0.0.1/tcp/{port_of(a)}",)):
                raise AssertionError("two peers at one port")


async def test_who_asks_to_be_dialled_back_does_not_ask_from_that_port():
    """The way back from there would be open to whoever is asked, behind a NAT that nobody else gets through."""
    b, ports = native(), []
    serve_requests(b, "/decentral/dialback/1", echo, limit=100)

    async def watch():
        while True:
            ports.extend(endpoint(end)[1] for ends in b.links.sessions.paths().values() for end in ends)
            await anyio.sleep(0.001)

    async with b:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            found = await probe(LOOPBACK, b.addresses(), lambda: 0.0)
            group.cancel_scope.cancel()
        assert ports
        assert str(ports[0]) not in found.listen[0]


async def test_who_does_not_punch_leaves_from_any_port():
    async with connected(native(punch=False), native()) as (a, b):
        assert a.links.sessions.local_port(b.peer) != port_of(a)
