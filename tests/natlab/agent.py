"""A bare transport in a namespace: does what it is told on stdin and answers on stdout, one JSON object a line each.

python -m tests.natlab.agent daemon FOLDER '["/ip4/0.0.0.0/tcp/4001"]' '{"reachability": "private"}'
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import anyio

from decentral.errors import DecentralError
from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.daemon.process import DaemonOptions
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import PeerId, peer_from_name, peer_name

BYTES = "/natlab/bytes"
_LARGEST = 1 << 26  # bytes of one answer
_PATIENCE = 20.0  # s

Order = dict[str, Any]  # Any: JSON


async def _give(peer: PeerId, body: bytes) -> bytes:
    return bytes(min(int.from_bytes(body, "little"), _LARGEST))


async def _obey(transport: Transport, order: Order) -> Order:
    if order["do"] == "addresses":
        return {"addresses": transport.addresses()}
    peer, began = peer_from_name(order["peer"]), time.monotonic()
    if order["do"] == "connect":
        await transport.connect(peer, order["addresses"])
    else:
        wanted = int(order["nbytes"]).to_bytes(8, "little")
        await request(transport, peer, BYTES, wanted, limit=_LARGEST, timeout=_PATIENCE)
    return {"seconds": time.monotonic() - began}


def _transport(kind: str, folder: str, listen: list[str], options: Order) -> Transport:
    chosen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    identity = Identity.load_or_create(Path(folder) / "identity.key")
    if kind == "native":
        return NativeTransport(identity.signer, listen=listen, options=NativeOptions(**chosen))
    if kind == "py-libp2p":  # an extra
        from decentral.transport.native.links import LinkOptions
        from decentral.transport.pylibp2p.transport import PyLibp2pTransport

        return PyLibp2pTransport(identity.signer, listen=listen, options=LinkOptions(**chosen))
    return DaemonTransport(identity, listen=listen, options=DaemonOptions(**chosen))


async def main(kind: str, folder: str, listen: list[str], options: Order) -> None:
    """Obey until stdin ends."""
    transport = _transport(kind, folder, listen, options)
    serve_requests(transport, BYTES, _give, limit=8)
    async with transport:
        _say(name=peer_name(transport.peer))
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            try:
                _say(**await _obey(transport, json.loads(line)))
            except DecentralError as error:
                _say(error=str(error))


def _say(**answer: Any) -> None:  # Any: JSON
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4]))
