"""js-libp2p, which shares no code with any transport of ours, and peers of each kind: requests, relays, both ways."""

from __future__ import annotations

import pytest

from decentral.transport.protocols.identify import IDENTIFY
from decentral.transport.protocols.identify import ask as ask_identity
from decentral.transport.requests import request
from decentral.wire.keys import peer_name
from tests.kit.relays import BODY, LOOPBACK, relay

from .conftest import DIGEST, ECHO, KINDS, through
from .javascript import javascript_peer


async def ask(transport, peer, body=BODY):
    return await request(transport, peer, ECHO, body, limit=len(BODY), timeout=20)


async def test_a_js_peer_that_is_dialled_answers_a_request_of_16_MiB_unchanged(kind, ours):
    us = ours(kind)
    async with us.transport, javascript_peer(*LOOPBACK) as js:
        await us.transport.connect(js.peer, js.addresses)
        assert await ask(us.transport, js.peer) == BODY
        assert await js.order("served") == {"bodies": [DIGEST]}


async def test_a_js_peer_that_dials_gets_16_MiB_back_unchanged(kind, ours):
    us = ours(kind)
    async with us.transport, javascript_peer(*LOOPBACK) as js:
        said = await js.order("ask", address=us.transport.addresses()[0], nbytes=len(BODY))
        assert said["received"] == said["sent"]
        assert us.served == [said["sent"]]


async def test_one_connection_carries_requests_of_both_sides(kind, ours):
    us = ours(kind)
    async with us.transport, javascript_peer(*LOOPBACK) as js:
        said = await js.order("ask", address=us.transport.addresses()[0], nbytes=1000)
        assert us.served == [said["sent"]]
        assert await ask(us.transport, js.peer, b"back") == b"back"  # nobody told us where it listens


async def test_an_empty_body_is_answered_by_an_empty_body(kind, ours):
    us = ours(kind)
    async with us.transport, javascript_peer(*LOOPBACK) as js:
        await us.transport.connect(js.peer, js.addresses)
        assert await ask(us.transport, js.peer, b"") == b""
        said = await js.order("ask", address=us.transport.addresses()[0], nbytes=0)
        assert said["received"] == said["sent"] == us.served[0]


async def test_identify_tells_a_js_peer_what_is_served_here(kind, ours):
    us = ours(kind)
    async with us.transport, javascript_peer(*LOOPBACK) as js:
        await js.order("ask", address=us.transport.addresses()[0], nbytes=1)
        said = await js.order("protocols", peer=peer_name(us.transport.peer))
        assert ECHO in said["protocols"]


class Agreed:
    """A stream whose protocol the transport has agreed on already: who proposes it is answered from here."""

    def __init__(self, stream, protocol) -> None:
        self.peer, self._stream = stream.peer, stream
        self._said = b"".join(bytes([len(one) + 1]) + one + b"\n" for one in (b"/multistream/1.0.0", protocol.encode()))

    async def send(self, data: bytes) -> None:
        """The proposal."""

    async def receive_exactly(self, nbytes: int) -> bytes:
        if not self._said:
            return await self._stream.receive_exactly(nbytes)
        taken, self._said = self._said[:nbytes], self._said[nbytes:]
        return taken

    async def aclose(self) -> None:
        await self._stream.aclose()


async def test_what_a_js_peer_tells_by_identify_is_read(kind, ours):
    us = ours(kind)
    async with us.transport, javascript_peer(*LOOPBACK) as js:
        await us.transport.connect(js.peer, js.addresses)
        stream = await us.transport.open(js.peer, IDENTIFY)
        told = await ask_identity(Agreed(stream, IDENTIFY))
        await stream.aclose()
        assert told.addresses == tuple(address.rpartition("/p2p/")[0] for address in js.addresses)
        assert told.observed is not None
        assert told.observed.startswith("/ip4/127.0.0.1/tcp/")


@pytest.mark.parametrize("dials", KINDS)
@pytest.mark.parametrize("hides", KINDS)
async def test_two_peers_of_ours_meet_through_a_js_relay(hides, dials, ours):
    async with javascript_peer(*LOOPBACK) as js:
        hidden, other = ours(hides, js.addresses).transport, ours(dials).transport
        async with hidden, other:
            await js.until_guest(hidden.peer)
            await other.connect(hidden.peer, through(js.addresses[0], hidden.peer))
            assert await ask(other, hidden.peer) == BODY
            assert await ask(hidden, other.peer) == BODY
            assert all("/p2p-circuit" in path for path in (await other.paths())[hidden.peer])


async def test_a_js_peer_is_dialled_through_a_relay_of_ours_and_dials_through_it(kind, ours):
    async with relay() as at:
        hidden, other = ours(kind, at.addresses()), ours(kind)
        async with hidden.transport, other.transport, javascript_peer(f"{at.addresses()[0]}/p2p-circuit") as js:
            await other.transport.connect(js.peer, through(at.addresses()[0], js.peer))
            assert await ask(other.transport, js.peer) == BODY
            (address,) = through(at.addresses()[0], hidden.transport.peer)
            said = await js.order("ask", address=address, nbytes=len(BODY))
            assert hidden.served == [said["sent"]] == [said["received"]]
