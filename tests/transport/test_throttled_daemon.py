"""Caps over real daemons on loopback: a transfer takes as long as its cap says, and a vote beside it does not."""

from __future__ import annotations

import anyio
import pytest

from decentral.transport.requests import request, serve_requests
from decentral.transport.throttle import Caps, ThrottledTransport

BULK, VOTE = "/test/bulk", "/test/vote"
CAP = 2_000_000  # bytes/s; loopback carries 400 times that
NBYTES = 12_000_000


async def length(peer: bytes, body: bytes) -> bytes:
    return str(len(body)).encode()


def pair(daemons, caps: Caps):
    a = ThrottledTransport(daemons.transport(), caps, urgent=(VOTE,))
    b = daemons.transport()
    for transport in (a, b):
        for protocol in (BULK, VOTE):
            serve_requests(transport, protocol, length, limit=1 << 26)
    return a, b


def test_caps_hide_no_daemon_that_the_dht_can_run_on(daemons):
    daemon = daemons.transport()
    assert ThrottledTransport(daemon, Caps(up=float(CAP)), urgent=(VOTE,)).dht_host is daemon


@pytest.mark.parametrize("direction", ["up", pytest.param("down", marks=pytest.mark.long)])
def test_a_capped_transfer_takes_as_long_as_it_should_and_a_vote_beside_it_a_moment(daemons, direction):
    a, b = pair(daemons, Caps(**{direction: float(CAP)}))

    async def script():
        async with a, b:
            await b.connect(a.peer, a.addresses())
            await a.connect(b.peer, b.addresses())
            sender, receiver = (a, b) if direction == "up" else (b, a)
            votes = []

            async def vote():
                while True:
                    await anyio.sleep(0.3)
                    asked = anyio.current_time()
                    await request(sender, receiver.peer, VOTE, bytes(200), limit=10, timeout=10.0)
                    votes.append(anyio.current_time() - asked)

            began = anyio.current_time()
            async with anyio.create_task_group() as group:
                group.start_soon(vote)
                async with anyio.create_task_group() as bodies:
                    for _ in range(2):
                        bodies.start_soon(bulk, sender, receiver.peer)
                took = anyio.current_time() - began
                group.cancel_scope.cancel()
            assert took == pytest.approx(NBYTES / CAP, rel=0.05)
            assert len(votes) >= 10
            assert sorted(votes)[len(votes) // 2] < 0.5

    daemons.run(script)


async def bulk(sender, peer: bytes) -> None:
    answer = await request(sender, peer, BULK, bytes(NBYTES // 2), limit=20, timeout=30.0)
    assert answer == str(NBYTES // 2).encode()
