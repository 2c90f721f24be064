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
from decentral.transport.requests import serve_requests
from decentral.wire.keys import Signer
from tests.kit.relays import (
    BODY,
    ECHO,
    LOOPBACK,
    connected,
    echo,
    exchange,
    hidden,
    native,
    through,
    until,
    visible,
)

RELAYS = DaemonOptions(reachability="public")


@asynccontextmanager
async def large_relay(daemons):
    """A relay that carries more than 128 KiB a connection: the daemon grants 4 GiB in four of six starts."""
    while True:
        async with DaemonTransport(daemons.identity(), listen=LOOPBACK, options=RELAYS) as relay:
            async with native(relays=relay.addresses()) as probe:
                with anyio.move_on_after(2) as scope:
                    await until(lambda probe=probe: through_relays(probe))
            if not scope.cancelled_caught:
                yield relay
                return


def through_relays(transport: NativeTransport) -> list[str]:
    return [address for address in transport.addresses() if "/p2p-circuit/" in address]


@pytest.mark.parametrize(("hides", "dials"), [("native", "native"), ("native", "daemon"), ("daemon", "native")])
async def test_peers_reach_each_other_through_a_relay_that_is_a_daemon_with_large_bodies(daemons, hides, dials):
    async with large_relay(daemons) as relay:
        guest, other = hidden(hides, relay, daemons), visible(dials, daemons)
        for transport in (guest, other):
            serve_requests(transport, ECHO, echo, limit=len(BODY))
        async with guest, other:
            await guest.connect(relay.peer, relay.addresses())
            await until_reached(other, guest.peer, through(relay, guest.peer))
            await exchange(relay, guest, other)


async def until_reached(transport, peer, addresses):
    while True:
        try:
            return await transport.connect(peer, addresses)
        except PeerUnreachable:  # its place is not kept yet
            await anyio.sleep(0.1)


@pytest.mark.long
async def test_a_place_is_asked_for_again_when_the_relay_was_away(daemons, monkeypatch):
    identity = daemons.identity()
    monkeypatch.setattr("decentral.transport.native.dialling.LEAST_NBYTES", 0)  # it may carry little
    async with DaemonTransport(identity, listen=LOOPBACK, options=RELAYS) as relay:
        addresses = relay.addresses()
    where = tuple(address.rpartition("/p2p/")[0] for address in addresses)
    async with native(relays=addresses) as hidden:
        for _ in range(2):
            async with DaemonTransport(identity, listen=where, options=RELAYS):
                await until(lambda: through_relays(hidden))
            await until(lambda: not through_relays(hidden))


@pytest.mark.long
async def test_a_relay_that_carries_too_little_is_passed_over(daemons, monkeypatch, caplog):
    monkeypatch.setattr("decentral.transport.native.dialling.LEAST_NBYTES", 1 << 62)
    async with (
        DaemonTransport(daemons.identity(), listen=LOOPBACK, options=RELAYS) as relay,
        native(relays=relay.addresses()) as hidden,
    ):
        await until(lambda: "use another relay" in caplog.text)
        assert not through_relays(hidden)


async def test_nobody_but_its_relay_may_bring_it_connections():
    a, b = native(), native()
    async with connected(a, b):
        stream = await a.open(b.peer, STOP)
        with pytest.raises(StreamClosed):
            await offer(stream, Signer.generate().peer, Reservation(0, None, None))
