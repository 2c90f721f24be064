"""What libp2p shares with the rest of a process: names of protobuf messages, as hivemind does, and the log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
