"""Beside py-libp2p as it is shipped, with its own Noise and muxer: large bodies both ways, each side dialling."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


# ---- what libp2p shares with the rest of a process: names of protobuf messages, and the log ----


OURS = "import decentral.transport.pylibp2p.transport, libp2p.relay.circuit_v2, libp2p.kad_dht.kad_dht"
HIVEMIND = "import hivemind, hivemind.dht.node"
USED = """
from hivemind.proto import crypto_pb2 as theirs
from libp2p.crypto.pb import crypto_pb2 as own
key = own.PublicKey(key_type=own.KeyType.Ed25519, data=b"x" * 32)
assert theirs.PublicKey.FromString(key.SerializeToString()).data == key.data
"""


@pytest.mark.parametrize(
    "first",
    [pytest.param(OURS, id="libp2p first"), pytest.param(HIVEMIND, id="hivemind first", marks=pytest.mark.long)],
)
def test_hivemind_and_libp2p_live_in_one_process(first: str, tmp_path: Path) -> None:
    code = "\n".join([first, *sorted({OURS, HIVEMIND} - {first}), USED])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SPEAK = """
import anyio, logging
from decentral.transport.pylibp2p.transport import PyLibp2pTransport
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer

async def echo(peer, body):
    return body

async def main():
    a, b = (PyLibp2pTransport(Signer.generate(), listen=["/ip4/127.0.0.1/tcp/0"]) for _ in range(2))
    serve_requests(b, "/test/echo", echo, limit=9)
    async with a, b:
        await a.connect(b.peer, b.addresses())
        assert await request(a, b.peer, "/test/echo", b"fine", limit=9, timeout=10) == b"fine"
    assert not logging.root.handlers, logging.root.handlers

anyio.run(main)
"""


def test_its_logging_leaves_the_root_alone_so_that_no_line_of_ours_is_written_twice(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SPEAK], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
