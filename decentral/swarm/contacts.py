"""Peers contacted in the background: of each kind of contact one with a peer at a time, and few with all together.

A contact that fails is no error: the peer is tried again when its turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from decentral.errors import PayloadError, TransportError
from decentral.wire.keys import PeerId, peer_name

_AT_ONCE = 32  # peers contacted at the same time

logger = logging.getLogger("decentral.swarm")

Contact = Callable[[PeerId], Awaitable[None]]


class Contacts:
    """Those of one directory."""

    def __init__(self) -> None:
        self.group: anyio.abc.TaskGroup | None = None  # that they run in; None: none are begun
        self._ended = False
        self._busy: set[tuple[str, PeerId]] = set()
        self._limiter = anyio.CapacityLimiter(_AT_ONCE)

    def end(self) -> None:
        """Make no new ones from now on."""
        self._ended = True

    def spawn(self, kind: str, peer: PeerId, contact: Contact) -> None:
        """Contact a peer in the background, unless a contact of that kind is under way."""

        async def work() -> None:
            try:
                await self.make(peer, contact)
            finally:
                self._busy.discard((kind, peer))

        if self.group is not None and (kind, peer) not in self._busy:
            self._busy.add((kind, peer))
            self.group.start_soon(work)

    async def make(self, peer: PeerId, contact: Contact) -> None:
        """Contact a peer when it is its turn; returns also when that failed."""
        try:
            async with self._limiter:
                if not self._ended:
                    await contact(peer)
        except (TransportError, PayloadError) as error:
            logger.debug("%s", error)
        except Exception:  # of what a peer answered, say: as in every handler, it must not end this one
            logger.exception("a contact with %s failed, and this is a bug: please report it", peer_name(peer))
