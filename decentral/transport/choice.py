"""Which transport a peer runs on: what was asked for, else the daemon where hivemind brings one, else the native one.

The daemon has the DHT; the native one runs wherever Python does, takes less processor time, and punches holes with one
relay where the daemon needs several; py-libp2p does so, too, and is an extra, imported only when it is asked for. They
speak to each other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from decentral.errors import ConfigError, UsageError
from decentral.transport.base import Transport
from decentral.transport.daemon.process import DaemonOptions, KeyFile
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.wire.keys import Signer

Kind = Literal["daemon", "native", "py-libp2p"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_PACKAGES = {"daemon": "hivemind", "py-libp2p": "libp2p"}


class Keys(KeyFile, Protocol):
    """A key file and the key in it: ``decentral.swarm.identity.Identity`` is one."""

    @property
    def signer(self) -> Signer:
        """The private key."""
        ...


def default_kind() -> Kind:
    """The daemon where there is one."""
    return "daemon" if _is_here("daemon") else "native"


def kinds_here() -> tuple[Kind, ...]:
    """All that can be asked for on this system."""
    return tuple(kind for kind in KINDS if _is_here(kind))


def make_transport(
    asked: Transport | str | None,
    identity: Keys,
    listen: Sequence[str] | None,
    *,
    role: Literal["public", "private"] | None = None,
    relays: Sequence[str] = (),
) -> Transport:
    """What was asked for: a transport itself, one of ``KINDS``, or None for this system's. ConfigError.

    ``role``: whether others can dial this machine, None when it is not known; ``relays`` are to keep a place for it.
    """
    kind = default_kind() if asked is None else asked
    if kind == "daemon":
        return DaemonTransport(identity, listen=listen, options=DaemonOptions(reachability=role, relays=tuple(relays)))
    if kind == "native":
        return NativeTransport(identity.signer, listen=listen, options=NativeOptions(relays=tuple(relays)))
    if kind == "py-libp2p":
        return _on_libp2p(identity.signer, listen, tuple(relays))
    if isinstance(kind, str):
        raise ConfigError(f"transport={kind!r}: there are {', '.join(KINDS)}; leave it out for this system's")
    return kind


def check_there(kind: str | None) -> None:
    """UsageError for a transport whose package is not installed."""
    if kind == "py-libp2p" and not _is_here(kind):
        raise UsageError("transport 'py-libp2p': the package libp2p is not here; pip install 'decentral[libp2p]'")


def _on_libp2p(signer: Signer, listen: Sequence[str] | None, relays: tuple[str, ...]) -> Transport:
    check_there("py-libp2p")
    from decentral.transport.native.links import LinkOptions
    from decentral.transport.pylibp2p.transport import PyLibp2pTransport

    return PyLibp2pTransport(signer, listen=listen, options=LinkOptions(relays=relays))


def _is_here(kind: str) -> bool:
    """Whether its package is installed: looked for, not imported."""
    return kind not in _PACKAGES or importlib.util.find_spec(_PACKAGES[kind]) is not None
