"""A transport on py-libp2p's host, hardened. It needs the extra ``libp2p``, and comes by an entry point."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from decentral.errors import UsageError
from decentral.plugins import to_install

if TYPE_CHECKING:
    from decentral.transport.base import Transport
    from decentral.transport.choice import Keys

_PACKAGE = "libp2p"

if importlib.util.find_spec(_PACKAGE) is not None:
    from decentral.transport.pylibp2p.apart import keep_apart

    keep_apart()  # before any module of this folder imports libp2p


def check_installed() -> None:
    """Raise UsageError where the package is missing."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise UsageError(f"transport 'py-libp2p': the package libp2p is not here; {to_install('libp2p')}")


def make_transport(
    keys: Keys, listen: Sequence[str] | None, role: Literal["public", "private"] | None, relays: Sequence[str]
) -> Transport:
    """Return one of this kind; it finds out by itself whether others can dial this machine."""
    check_installed()
    from decentral.transport.native.links import LinkOptions
    from decentral.transport.pylibp2p.transport import PyLibp2pTransport

    return PyLibp2pTransport(keys.signer, listen=listen, options=LinkOptions(relays=tuple(relays)))
