"""Worlds to run the same laws in: memory (also with caps) and native on both event loops, daemons, and mixed ones."""

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
from decentral.transport.native import NativeTransport
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


class NativeWorld(World):
    def __init__(self, backend: str) -> None:
        self.backend = backend

    def transport(self, limits: Limits | None = None) -> NativeTransport:
        return NativeTransport(Signer.generate(), listen=LOOPBACK, limits=limits)


class MixedWorld(DaemonWorld):
    """Every other transport is a daemon's; ``first`` says whether the first one is."""

    def __init__(self, folder: Path, first: str) -> None:
        super().__init__(folder)
        self.daemon_next = first == "daemon"

    def transport(self, limits: Limits | None = None) -> Transport:
        self.daemon_next = not self.daemon_next
        if not self.daemon_next:
            return super().transport(limits)
        return NativeTransport(Signer.generate(), listen=LOOPBACK, limits=limits)


WORLDS = (
    *("memory on asyncio", "memory on trio", "throttled on asyncio", "throttled on trio", "daemon"),
    *("native on asyncio", "native on trio"),
    *("daemon to native", "native to daemon"),
)


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param == "daemon":
        return DaemonWorld(tmp_path)
    kind, how, which = request.param.split(" ")
    if how == "to":
        return MixedWorld(tmp_path, kind)
    return {"memory": MemoryWorld, "throttled": ThrottledWorld, "native": NativeWorld}[kind](which)


@pytest.fixture
def daemons(tmp_path: Path) -> DaemonWorld:
    return DaemonWorld(tmp_path)
