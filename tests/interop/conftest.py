"""Peers of ours of each kind, and js-libp2p peers for them to meet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.daemon.process import DaemonOptions
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.requests import serve_requests
from decentral.wire.keys import PeerId, peer_name
from tests.kit.relays import BODY, LOOPBACK, MAKERS, NOWHERE

ECHO = "/interop/echo"
DIGEST = hashlib.sha256(BODY).hexdigest()
KINDS = ("native", "daemon", "py-libp2p")


class Ours:
    """A peer of one kind that echoes, and remembers the digests of what it was asked."""

    def __init__(self, kind: str, identity: Identity, relays: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.served: list[str] = []
        self.transport = self._transport(identity, relays)
        serve_requests(self.transport, ECHO, self._echo, limit=len(BODY))

    def _transport(self, identity: Identity, relays: tuple[str, ...]) -> Transport:
        if self.kind == "daemon":
            options = DaemonOptions(reachability="private" if relays else None, relays=relays)
            return DaemonTransport(identity, listen=LOOPBACK, options=options)
        announce = NOWHERE if relays else ()  # so that nobody dials a hidden one directly
        return MAKERS[self.kind](identity.signer, relays=relays, announce=announce, punch=not relays)

    async def _echo(self, peer: bytes, body: bytes) -> bytes:
        self.served.append(hashlib.sha256(body).hexdigest())
        return body


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ours(tmp_path: Path) -> Callable[..., Ours]:
    """Makes peers of ours; one that is given relays keeps places there."""
    made: list[Ours] = []

    def make(kind: str, relays: tuple[str, ...] = ()) -> Ours:
        made.append(Ours(kind, Identity.load_or_create(tmp_path / f"identity-{len(made)}.key"), relays))
        return made[-1]

    return make


def through(relay: str, peer: PeerId) -> tuple[str, ...]:
    """Where a relay's guest can be dialled."""
    return (f"{relay}/p2p-circuit/p2p/{peer_name(peer)}",)
