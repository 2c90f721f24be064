"""Worlds to run the same laws in: memory (also with caps), native and py-libp2p on both loops, daemons, mixed ones."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest

from decentral.flow.budget import Limits
from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.memory import MemoryNetwork
from decentral.transport.native.transport import NativeTransport
from decentral.transport.throttle import Caps, ThrottledTransport
from decentral.wire.keys import Signer
from tests.kit.relays import LOOPBACK, connected


class World:
    """Makes transports that can reach each other, of its kinds in turns, on its loop."""

    def __init__(self, kinds: tuple[str, ...], backend: str, folder: Path) -> None:
        self.kinds, self.backend, self.folder = itertools.cycle(kinds), backend, folder
        self.network, self.numbers = MemoryNetwork(latency=0.001), itertools.count()

    def identity(self) -> Identity:
        return Identity.load_or_create(self.folder / f"identity-{next(self.numbers)}.key")

    def transport(self, limits: Limits | None = None) -> Transport:
        kind = next(self.kinds)
        if kind == "daemon":
            return DaemonTransport(self.identity(), listen=LOOPBACK, limits=limits)
        if kind == "native":
            return NativeTransport(Signer.generate(), listen=LOOPBACK, limits=limits)
        if kind == "py-libp2p":
            from decentral.transport.pylibp2p.transport import PyLibp2pTransport

            return PyLibp2pTransport(Signer.generate(), listen=LOOPBACK, limits=limits)
        plain = self.network.transport(Signer.generate(), limits=limits)
        if kind == "throttled":  # caps that are felt, and yet let a law be tried in a moment
            return ThrottledTransport(plain, Caps(up=5e7, down=5e7), urgent=())
        return plain

    def pair(self, **about):
        """Two that are connected (tests/kit/relays.py)."""
        return connected(self.transport(), self.transport(), **about)


LONG = (
    *("memory on trio", "throttled on asyncio", "native on asyncio", "py-libp2p on trio"),
    *("daemon to native", "native to daemon", "daemon to py-libp2p", "py-libp2p to daemon", "py-libp2p to native"),
)
WORLDS = (
    *("memory on asyncio", "throttled on trio", "daemon", "native on trio", "py-libp2p on asyncio"),
    "native to py-libp2p",
    *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
)
if importlib.util.find_spec("libp2p") is None:  # an extra, which is not asked for on Windows and macOS
    WORLDS = tuple(world for world in WORLDS if "py-libp2p" not in str(world))
    collect_ignore = ["pylibp2p"]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    kind, how, which = (request.param + " on asyncio").split(" ")[:3]
    return World((kind, which), "asyncio", tmp_path) if how == "to" else World((kind,), which, tmp_path)


@pytest.fixture
def daemons(tmp_path: Path) -> World:
    return World(("daemon",), "asyncio", tmp_path)
