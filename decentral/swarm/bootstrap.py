"""The peers that this one was told of beforehand: each is tried until it answers, for ever, as it may come up tomorrow.

Finding none of them is no error; the pauses grow to half a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import anyio

from decentral.errors import PayloadError
from decentral.swarm.contacts import Contacts
from decentral.wire.keys import PeerId, peer_from_name
from decentral.wire.messages import MAX_ADDRESS

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # s between attempts to reach one
_BOOTSTRAPS = 64

logger = logging.getLogger("decentral.swarm")

Visit = Callable[[PeerId, tuple[str, ...]], Awaitable[None]]


class Bootstrap:
    """Those of the peer ``me``. ``visit`` dials one and asks it; one that ``is_live`` is left alone for ``rest`` s."""

    def __init__(
        self, me: PeerId, contacts: Contacts, visit: Visit, is_live: Callable[[PeerId], bool], rest: float
    ) -> None:
        self._me, self._contacts, self._visit, self._is_live, self._rest = me, contacts, visit, is_live, rest
        self._known: dict[PeerId, tuple[str, ...]] = {}

    def add(self, addresses: Iterable[str]) -> None:
        """Try the peers at these addresses, too; of a peer that is known, these count from now on."""
        for peer, theirs in _by_peer(addresses).items():
            if peer == self._me or len(self._known) >= _BOOTSTRAPS:
                continue
            fresh = peer not in self._known
            self._known[peer] = theirs
            if fresh:
                self._begin(peer)

    def start(self) -> None:
        """Begin with those that are known, in the group of the contacts."""
        for peer in self._known:
            self._begin(peer)

    def _begin(self, peer: PeerId) -> None:
        if self._contacts.group is not None:
            self._contacts.group.start_soon(self._court, peer)

    async def _court(self, peer: PeerId) -> None:
        pause = _FIRST_PAUSE
        while True:
            if self._is_live(peer):
                pause = _FIRST_PAUSE
                await anyio.sleep(self._rest)
                continue
            await self._contacts.make(peer, self._try)
            if not self._is_live(peer):
                await anyio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _try(self, peer: PeerId) -> None:
        await self._visit(peer, self._known[peer])


def _by_peer(addresses: Iterable[str]) -> dict[PeerId, tuple[str, ...]]:
    found: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        try:
            peer = peer_from_name(address.rpartition("/p2p/")[2])
        except PayloadError as error:
            logger.warning("bootstrap address %s is passed over: %s", ascii(address[:MAX_ADDRESS]), error)
            continue
        found[peer] = (*found.get(peer, ()), address)
    return found
