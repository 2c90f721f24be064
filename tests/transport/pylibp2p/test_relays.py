"""Through a relay of py-libp2p's, as it is shipped: peers of each kind reach the others and are reached."""

from __future__ import annotations

import pytest

from decentral.transport.requests import serve_requests
from tests.kit.relays import BODY, ECHO, echo, exchange, hidden, run, until, visible
from tests.transport.pylibp2p.stock import Stock, running

KINDS = ("native", "daemon", "py-libp2p")
WITH_US = [(hides, dials) for hides in KINDS for dials in KINDS if "py-libp2p" in (hides, dials)]


@pytest.mark.parametrize(
    ("hides", "dials"),
    [("native", "native"), WITH_US[0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in WITH_US[1:])],
)
def test_peers_meet_through_a_relay_of_py_libp2p_as_it_is_shipped(daemons, hides, dials):
    at = Stock(relays=True)

    async def script():
        async with running(at):
            guest, other = hidden(hides, at, daemons), visible(dials, daemons)
            for transport in (guest, other):
                serve_requests(transport, ECHO, echo, limit=len(BODY))
            async with guest, other:
                await until(lambda: at.keeps_a_place_for(guest.peer))
                await exchange(at, guest, other)

    run(script)
