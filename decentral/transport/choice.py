"""The transport that a peer runs on: what was asked for, else the daemon where hivemind is installed, else native.

The daemon, an extra, has the DHT; the native one runs wherever Python does, takes less processor time, and punches
holes with one relay where the daemon needs several; py-libp2p does so, too. It and those of other packages come by
entry points, which are loaded only when they are asked for. All speak to each other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Protocol

from decentral.errors import ConfigError, UsageError
from decentral.plugins import added
from decentral.transport.base import Transport
from decentral.transport.daemon.process import DaemonOptions, KeyFile
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.wire.keys import Signer

OURS = ("daemon", "native")
GROUP = "decentral.transports"  # of entry points


class Keys(KeyFile, Protocol):
    """A key file and the key in it: ``decentral.swarm.identity.Identity`` is one."""

    @property
    def signer(self) -> Signer:
        """The private key."""
        ...


class Kind(Protocol):
    """A module that an entry point names: another kind of transport."""

    def check_installed(self) -> None:
        """Raise UsageError where a package is missing."""
        ...

    def make_transport(
        self,
        keys: Keys,
        listen: Sequence[str] | None,
        role: Literal["public", "private"] | None,
        relays: Sequence[str],
    ) -> Transport:
        """Return one, as `make_transport` of this module has its arguments."""
        ...


def default_kind() -> Literal["daemon", "native"]:
    """Return the daemon where there is one."""
    return "daemon" if _has_daemon() else "native"


def kinds_here() -> tuple[str, ...]:
    """Return all that can be asked for on this system."""
    return (*(kind for kind in OURS if kind != "daemon" or _has_daemon()), *filter(_is_installed, added(GROUP)))


def make_transport(
    asked: Transport | str | None,
    identity: Keys,
    listen: Sequence[str] | None,
    *,
    role: Literal["public", "private"] | None = None,
    relays: Sequence[str] = (),
) -> Transport:
    """Return the transport that was asked for: itself, by the name of its kind, or None for this system's. ConfigError.

    ``role``: whether others can dial this machine, None when it is not known; ``relays`` are to keep a place for it.
    """
    kind = default_kind() if asked is None else asked
    if kind == "daemon":
        return DaemonTransport(identity, listen=listen, options=DaemonOptions(reachability=role, relays=tuple(relays)))
    if kind == "native":
        return NativeTransport(identity.signer, listen=listen, options=NativeOptions(relays=tuple(relays)))
    if isinstance(kind, str):
        return _load(kind).make_transport(identity, listen, role, relays)
    return kind


def check_there(kind: str | None) -> None:
    """Raise UsageError for a transport whose package is not installed."""
    if kind == "daemon" and not _has_daemon():
        from decentral.plugins import to_install  # 0.03 s, which only those pay who need it

        raise UsageError(f"transport = 'daemon' needs hivemind's go-libp2p; {to_install('daemon')}")
    if kind is not None and kind not in OURS:
        _load(kind).check_installed()


def _load(name: str) -> Kind:
    point = added(GROUP).get(name)
    if point is None:
        known = ", ".join((*OURS, *added(GROUP)))
        raise ConfigError(f"transport={name!r}: there are {known}; leave it out for this system's")
    kind: Kind = point.load()
    return kind


def _is_installed(name: str) -> bool:
    with suppress(UsageError):
        _load(name).check_installed()
        return True
    return False


def _has_daemon() -> bool:
    """Return whether its package is installed: looked for, not imported."""
    return importlib.util.find_spec("hivemind") is not None
