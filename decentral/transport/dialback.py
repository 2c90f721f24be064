"""Can this machine be dialled? Others know: each is asked to dial back the address that it sees the question come from.

Crosses the wire: a port, and back who I seem to be, whether I answered there, and what time it is: 60 bytes. Nobody is
dialled but who asks, at the host the question came from, so nobody can be made to knock at a third one's door.

Source: the idea is that of libp2p's AutoNAT (libp2p/specs, autonat-v1.md), whose answers the daemon keeps to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import anyio

from decentral.errors import DecentralError
from decentral.transport.base import Transport
from decentral.transport.native.secured import close_now, secure_outbound
from decentral.transport.native.tcp import endpoint
from decentral.transport.requests import request, serve_requests
from decentral.wire.codecs import U8, U16, U64, Text, from_bytes, to_bytes
from decentral.wire.keys import PeerId, Signer

DIALBACK = "/decentral/dialback/1"
ANSWERED, SILENT, NOT_TRIED = 1, 0, 2
_PATIENCE = 3.0  # s for a TCP connection and a handshake: a filtered port says nothing, ever
_AT_ONCE = 8  # dials under way for all who ask; the next is told that it was not tried
_LONGEST_ADDRESS = 64  # characters of /ip6/HOST/tcp/PORT
_ANSWER_NBYTES = 128


@dataclass(frozen=True, slots=True)
class Question:
    """Where I listen."""

    port: U16


@dataclass(frozen=True, slots=True)
class DialbackAnswer:
    """How the other side sees me."""

    seen: Annotated[str, Text(_LONGEST_ADDRESS)]  # multiaddr of my end of the connection; empty: it is relayed
    outcome: U8  # ANSWERED, SILENT or NOT_TRIED
    milliseconds: U64  # since 1970 by its clock, when it answered

    def check(self) -> str | None:
        """The rule that this answer breaks."""
        return None if self.outcome in (ANSWERED, SILENT, NOT_TRIED) else f"outcome {self.outcome}"


async def ask_dialback(transport: Transport, peer: PeerId, port: int) -> DialbackAnswer:
    """Ask ``peer``, who is connected directly. Raises TransportError, PayloadError."""
    body = to_bytes(Question(port))
    data = await request(transport, peer, DIALBACK, body, limit=_ANSWER_NBYTES, timeout=2 * _PATIENCE)
    return from_bytes(DialbackAnswer, data)


def serve_dialback(transport: Transport, clock: Callable[[], float] = time.time) -> None:
    """Dial back whoever asks. Before the transport is entered."""
    dialling: set[PeerId] = set()

    async def answer(peer: PeerId, body: bytes) -> bytes:
        port = from_bytes(Question, body).port
        seen = next(filter(endpoint, (await transport.paths()).get(peer, ())), "")
        outcome = NOT_TRIED
        if seen and port and peer not in dialling and len(dialling) < _AT_ONCE:
            dialling.add(peer)
            try:
                outcome = ANSWERED if await _answers(seen, port, peer) else SILENT
            finally:
                dialling.discard(peer)
        return to_bytes(DialbackAnswer(seen[:_LONGEST_ADDRESS], outcome, int(1000 * clock())))

    serve_requests(transport, DIALBACK, answer, limit=2)


async def _answers(seen: str, port: int, peer: PeerId) -> bool:
    """Whether ``peer`` shakes hands at that port: by a key of its own, so that no daemon mistakes it for this peer."""
    end = endpoint(seen)
    assert end is not None, "chosen before"
    try:
        with anyio.fail_after(_PATIENCE):
            socket = await anyio.connect_tcp(end[0], port)
            try:
                await secure_outbound(socket, Signer.generate(), peer)
            finally:
                await close_now(socket)
    except (OSError, TimeoutError, DecentralError):
        return False
    return True
