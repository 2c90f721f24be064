"""Caps on real sockets: a transfer takes as long as its cap says, and a vote beside it does not."""

from __future__ import annotations

import anyio
import pytest

from decentral.transport.requests import request, serve_requests
from decentral.transport.throttle import Caps, ThrottledTransport
from tests.kit.relays import KINDS, connected, visible

BULK, VOTE = "/test/bulk", "/test/vote"
CAP = 2_000_000  # bytes/s; loopback carries 400 times that
NBYTES = 8_000_000
TRIALS = [("daemon", "up"), *((kind, "up") for kind in KINDS if kind == "py-libp2p")]
TRIALS += [pytest.param("daemon", "down", marks=pytest.mark.long)]


async def length(peer: bytes, body: bytes) -> bytes:
    return str(len(body)).encode()


def test_caps_hide_no_daemon_that_the_dht_can_run_on(daemons):
    daemon = daemons.transport()
    assert ThrottledTransport(daemon, Caps(up=float(CAP)), urgent=(VOTE,)).dht_host is daemon


@pytest.mark.parametrize(("kind", "direction"), TRIALS)
async def test_a_capped_transfer_takes_as_long_as_it_should_and_a_vote_beside_it_a_moment(daemons, kind, direction):
    a = ThrottledTransport(visible(kind, daemons), Caps(**{direction: float(CAP)}), urgent=(VOTE,))
    b = visible(kind, daemons)
    for transport in (a, b):
        for protocol in (BULK, VOTE):
            serve_requests(transport, protocol, length, limit=1 << 26)
    sender, receiver = (a, b) if direction == "up" else (b, a)
    votes = []

    async def vote():
        while True:
            await anyio.sleep(0.3)
            asked = anyio.current_time()
            await request(sender, receiver.peer, VOTE, bytes(200), limit=10, timeout=10.0)
            votes.append(anyio.current_time() - asked)

    async def bulk():
        answer = await request(sender, receiver.peer, BULK, bytes(NBYTES // 2), limit=20, timeout=30.0)
        assert answer == str(NBYTES // 2).encode()

    async with connected(sender, receiver):
        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(vote)
            async with anyio.create_task_group() as bodies:
                bodies.start_soon(bulk)
                bodies.start_soon(bulk)
            took = anyio.current_time() - began
            group.cancel_scope.cancel()
    assert took == pytest.approx(NBYTES / CAP, rel=0.05)
    assert len(votes) >= 7
    assert sorted(votes)[len(votes) // 2] < 0.5
