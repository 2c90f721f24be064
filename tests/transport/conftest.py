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
    """Makes transports that can reach each other, on its loop."""

    backend = "asyncio"

    def transport(self, limits: Limits | None = None) -> Transport:
        raise NotImplementedError

    def pair(self, **about):
        """Two that are connected (tests/kit/relays.py)."""
        return connected(self.transport(), self.transport(), **about)


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


class PyLibp2pWorld(World):
    def __init__(self, backend: str) -> None:
        self.backend = backend

    def transport(self, limits: Limits | None = None) -> Transport:
        from decentral.transport.pylibp2p.transport import PyLibp2pTransport

        return PyLibp2pTransport(Signer.generate(), listen=LOOPBACK, limits=limits)


class MixedWorld(World):
    """Transports of two kinds, in turns."""

    def __init__(self, first: World, second: World) -> None:
        self.turns = itertools.cycle((first, second))

    def transport(self, limits: Limits | None = None) -> Transport:
        return next(self.turns).transport(limits)


LONG = (
    *("memory on trio", "throttled on asyncio", "native on asyncio", "py-libp2p on trio"),
    *("native to daemon", "daemon to py-libp2p", "native to py-libp2p", "py-libp2p to native"),
)
WORLDS = (
    *("memory on asyncio", "memory on trio", "throttled on asyncio", "throttled on trio", "daemon"),
    *("native on asyncio", "native on trio"),
    *("py-libp2p on asyncio", "py-libp2p on trio"),
    *("daemon to native", "native to daemon", "daemon to py-libp2p", "py-libp2p to daemon"),
    *("native to py-libp2p", "py-libp2p to native"),
)


if importlib.util.find_spec("libp2p") is None:  # an extra, which is not asked for on Windows and macOS
    WORLDS = tuple(name for name in WORLDS if "py-libp2p" not in name)
collect_ignore = [] if importlib.util.find_spec("libp2p") else ["pylibp2p"]


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in WORLDS])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    kind, how, which = (request.param + " on asyncio").split(" ")[:3]
    if how == "to":
        return MixedWorld(_world(kind, "asyncio", tmp_path), _world(which, "asyncio", tmp_path))
    return _world(kind, which, tmp_path)


def _world(kind: str, backend: str, folder: Path) -> World:
    if kind == "daemon":
        return DaemonWorld(folder)
    worlds = {"memory": MemoryWorld, "throttled": ThrottledWorld, "native": NativeWorld, "py-libp2p": PyLibp2pWorld}
    return worlds[kind](backend)


@pytest.fixture
def daemons(tmp_path: Path) -> DaemonWorld:
    return DaemonWorld(tmp_path)
