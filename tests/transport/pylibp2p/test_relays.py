"""Through a relay of ours and through one of py-libp2p's: peers on it reach the others and are reached."""

from __future__ import annotations

import pytest

from decentral.transport.native.links import LinkOptions
from decentral.transport.pylibp2p.transport import PyLibp2pTransport
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer, peer_name
from tests.transport.conftest import LOOPBACK
from tests.transport.pylibp2p.stock import Stock, running
from tests.transport.relays import BODY, ECHO, NOWHERE, echo, hidden_daemon, hidden_native, native, relay, run, until

KINDS = ("native", "daemon", "py-libp2p")
WITH_US = [(hides, dials) for hides in KINDS for dials in KINDS if "py-libp2p" in (hides, dials)]


def on_libp2p(**options) -> PyLibp2pTransport:
    return PyLibp2pTransport(Signer.generate(), listen=LOOPBACK, options=LinkOptions(**options))


def hidden(kind, at, daemons):
    if kind == "native":
        return hidden_native(at)
    if kind == "daemon":
        return hidden_daemon(at, daemons)
    return on_libp2p(relays=at.addresses()[:1], announce=NOWHERE, punch=False)


def open_one(kind, daemons):
    return {"native": native, "daemon": daemons.transport, "py-libp2p": on_libp2p}[kind]()


async def exchange(at, guest, other) -> None:
    """16 MiB each way, through the relay."""
    where = (f"{at.addresses()[0]}/p2p-circuit/p2p/{peer_name(guest.peer)}",)
    await other.connect(guest.peer, where)
    assert all("/p2p-circuit" in path for path in (await other.paths())[guest.peer])
    for one, two in ((other, guest), (guest, other)):
        assert await request(one, two.peer, ECHO, BODY, limit=len(BODY), timeout=30) == BODY


@pytest.mark.parametrize(("hides", "dials"), WITH_US)
def test_peers_on_it_and_all_others_meet_through_a_relay_of_ours(daemons, hides, dials):
    at = relay()

    async def script():
        async with at:
            guest, other = hidden(hides, at, daemons), open_one(dials, daemons)
            for transport in (guest, other):
                serve_requests(transport, ECHO, echo, limit=len(BODY))
            async with guest, other:
                await until(lambda: at.relay.places == 1)
                await exchange(at, guest, other)
            await until(lambda: at.relay.places == 0)

    run(script)


@pytest.mark.parametrize(
    ("hides", "dials"),
    [("native", "native"), WITH_US[0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in WITH_US[1:])],
)
def test_peers_meet_through_a_relay_of_py_libp2p_as_it_is_shipped(daemons, hides, dials):
    at = Stock(relays=True)

    async def script():
        async with running(at):
            guest, other = hidden(hides, at, daemons), open_one(dials, daemons)
            for transport in (guest, other):
                serve_requests(transport, ECHO, echo, limit=len(BODY))
            async with guest, other:
                await until(lambda: at.keeps_a_place_for(guest.peer))
                await exchange(at, guest, other)

    run(script)
