"""Beside py-libp2p as it is shipped, with its own Noise and muxer: large bodies both ways, each side dialling."""

from __future__ import annotations

import pytest

from decentral.transport.requests import request, serve_requests
from tests.kit.relays import BODY, ECHO, exchange, hidden, native, on_libp2p, until, visible
from tests.kit.relays import echo as ours_echo
from tests.transport.pylibp2p.stock import Stock, ask, echo, running


@pytest.mark.parametrize("make", [native, on_libp2p], ids=["native", "py-libp2p"])
async def test_16_mib_go_both_ways_between_a_stock_host_and_each_of_ours_whoever_dials(make):
    us, stock = make(), Stock()
    serve_requests(us, ECHO, ours_echo, limit=len(BODY))
    stock.host.set_stream_handler(ECHO, echo)
    async with us, running(stock) as thread:
        assert await thread.call(ask, stock.host, us.addresses()[0], ECHO, BODY) == BODY
    async with make() as other, running(again := Stock()):
        again.host.set_stream_handler(ECHO, echo)
        await other.connect(again.peer, again.addresses())
        assert await request(other, again.peer, ECHO, BODY, limit=len(BODY), timeout=30) == BODY


KINDS = ("native", "daemon", "py-libp2p")
WITH_US = [(hides, dials) for hides in KINDS for dials in KINDS if "py-libp2p" in (hides, dials)]


@pytest.mark.parametrize(
    ("hides", "dials"),
    [("native", "native"), WITH_US[0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in WITH_US[1:])],
)
async def test_peers_meet_through_a_relay_of_py_libp2p_as_it_is_shipped(daemons, hides, dials):
    at = Stock(relays=True)
    async with running(at):
        guest, other = hidden(hides, at, daemons), visible(dials, daemons)
        for transport in (guest, other):
            serve_requests(transport, ECHO, ours_echo, limit=len(BODY))
        async with guest, other:
            await until(lambda: at.keeps_a_place_for(guest.peer))
            await exchange(at, guest, other)
