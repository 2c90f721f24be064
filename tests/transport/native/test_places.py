"""Native peers that nobody can dial: reached through daemons that relay, and dialling others through those."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from decentral.errors import PeerUnreachable, StreamClosed
from decentral.transport.daemon.process import DaemonOptions
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.native.transport import NativeTransport
from decentral.transport.protocols.circuit import STOP, Reservation, offer
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer, peer_name
from tests.kit.relays import BODY, ECHO, echo, native, run
from tests.transport.conftest import LOOPBACK

RELAYS = DaemonOptions(reachability="public")


@asynccontextmanager
async def large_relay(daemons):
    """A relay that carries more than 128 KiB a connection: the daemon grants 4 GiB in four of six starts."""
    while True:
        async with DaemonTransport(daemons.identity(), listen=LOOPBACK, options=RELAYS) as relay:
            async with native(relays=relay.addresses()) as probe:
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
            hidden = native(relays=relay.addresses(), announce=("/ip4/127.0.0.1/tcp/1",))
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
    monkeypatch.setattr(
        "decentral.transport.native.dialling.LEAST_NBYTES", 0
    )  # what it carries is not the question here

    async def script():
        async with DaemonTransport(identity, listen=LOOPBACK, options=RELAYS) as relay:
            addresses = relay.addresses()
        where = tuple(address.rpartition("/p2p/")[0] for address in addresses)
        async with native(relays=addresses) as hidden:
            for _ in range(2):
                async with DaemonTransport(identity, listen=where, options=RELAYS):
                    await placed(hidden)
                while any("/p2p-circuit/" in address for address in hidden.addresses()):
                    await anyio.sleep(0.02)

    run(script)


def test_a_relay_that_carries_too_little_is_passed_over(daemons, monkeypatch, caplog):
    monkeypatch.setattr("decentral.transport.native.dialling.LEAST_NBYTES", 1 << 62)

    async def script():
        async with (
            DaemonTransport(daemons.identity(), listen=LOOPBACK, options=RELAYS) as relay,
            native(relays=relay.addresses()) as hidden,
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
                await offer(stream, Signer.generate().peer, Reservation(0, None, None))

    run(script)
