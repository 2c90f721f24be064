"""Where peers can be dialled, as they or others said: kept for when a connection to them is gone.

Whoever is dialled gets in, so the number of peers is bounded; who was dialled longest ago is forgotten first.
"""

from __future__ import annotations

from collections.abc import Sequence

from decentral.wire.keys import PeerId

_REMEMBERED = 1024  # peers


class AddressBook:
    """The addresses of the peers that were remembered last."""

    def __init__(self) -> None:
        self._known: dict[PeerId, tuple[str, ...]] = {}

    def remember(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """``peer`` is there now, whatever was known before."""
        self._known.pop(peer, None)
        if len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[peer] = tuple(addresses)

    def find(self, peer: PeerId) -> tuple[str, ...] | None:
        """Where ``peer`` was last; None when it is not known, and empty when that was nowhere."""
        return self._known.get(peer)

    def entries(self) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Everybody who is known, as of now."""
        return list(self._known.items())
