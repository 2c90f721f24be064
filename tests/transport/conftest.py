"""Worlds to run the same laws in: the network in memory on both event loops, also with caps, and real daemons on
loopback.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.budget import Limits
from decentral.transport.daemon import DaemonTransport
from decentral.transport.memory import MemoryNetwork
from decentral.transport.throttle import Caps, ThrottledTransport
from decentral.wire.keys import Signer

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
LIMIT = 60.0  # s for one script; nothing here should take more than a few


class World:
    """Makes transports that can reach each other, and runs a script among them."""

    backend = "asyncio"

    def transport(self, limits: Limits | None = None) -> Transport:
        raise NotImplementedError

    def run(self, script: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            with anyio.fail_after(LIMIT):
                await script()

        anyio.run(bounded, backend=self.backend)


class MemoryWorld(World):
    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.network = MemoryNetwork(latency=0.001)

    def transport(self, limits: Limits | None = None) -> Transport:
        return self.network.transport(Signer.generate(), limits=limits)


class ThrottledWorld(MemoryWorld):
    """Caps that are felt, and yet let a law be tried in a moment."""

    def transport(self, limits: Limits | None = None) -> Transport:
        return ThrottledTransport(super().transport(limits), Caps(up=5e7, down=5e7), urgent=())


class DaemonWorld(World):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0

    def identity(self) -> Identity:
        self.made += 1
        return Identity.load_or_create(self.folder / f"identity-{self.made}.key")

    def transport(self, limits: Limits | None = None) -> DaemonTransport:
        return DaemonTransport(self.identity(), listen=LOOPBACK, limits=limits)


@pytest.fixture(params=["memory on asyncio", "memory on trio", "throttled on asyncio", "throttled on trio", "daemon"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param == "daemon":
        return DaemonWorld(tmp_path)
    kind, _, backend = request.param.partition(" on ")
    return (ThrottledWorld if kind == "throttled" else MemoryWorld)(backend)


@pytest.fixture
def daemons(tmp_path: Path) -> DaemonWorld:
    return DaemonWorld(tmp_path)
