"""Peers of ours of each kind, and js-libp2p peers for them to meet."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.daemon.process import DaemonOptions
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.native.links import LinkOptions
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.protocols.circuit import RelayLimits
from decentral.transport.pylibp2p.transport import PyLibp2pTransport
from decentral.transport.requests import serve_requests
from decentral.wire.keys import PeerId, Signer, peer_name

ECHO = "/interop/echo"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
NOWHERE = ("/ip4/127.0.0.1/tcp/1",)  # what a hidden native announces, so that nobody dials it directly
BODY = os.urandom(16 << 20)
DIGEST = hashlib.sha256(BODY).hexdigest()
KINDS = ("native", "daemon", "py-libp2p")
LIMIT = 60.0  # s for one script; each takes a few


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
        announce = NOWHERE if relays else ()
        if self.kind == "py-libp2p":
            libp2p_options = LinkOptions(relays=relays, announce=announce, punch=not relays)
            return PyLibp2pTransport(identity.signer, listen=LOOPBACK, options=libp2p_options)
        native_options = NativeOptions(relays=relays, announce=announce, punch=not relays)
        return NativeTransport(identity.signer, listen=LOOPBACK, options=native_options)

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


def relay_of_ours() -> NativeTransport:
    """What ``decentral relay`` runs."""
    return NativeTransport(Signer.generate(), listen=LOOPBACK, options=NativeOptions(relay=RelayLimits()))


def run(script: Callable[[], Awaitable[None]]) -> None:
    """Run a script, which may not take for ever."""

    async def bounded() -> None:
        with anyio.fail_after(LIMIT):
            await script()

    anyio.run(bounded)


def through(relay: str, peer: PeerId) -> tuple[str, ...]:
    """Where a relay's guest can be dialled."""
    return (f"{relay}/p2p-circuit/p2p/{peer_name(peer)}",)
