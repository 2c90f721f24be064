"""Two that dial each other at the same time: one connection, of which both must know beforehand who counts as the one
that dialled.

The connection itself does not say: it comes out of this peer's own dialling, or in at its listener, as it happens.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio
import anyio.abc

from decentral.errors import DecentralError
from decentral.transport.native.ports import End
from decentral.transport.native.secured import Socket
from decentral.transport.native.tcp import far_end
from decentral.transport.protocols.yamux import Session
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.transport")

Greet = Callable[[Socket, PeerId], Awaitable[Session]]  # as the one that dialled
Answer = Callable[[Socket, PeerId | None], Awaitable[bool]]  # as the one that was; whether it came to a session


class Meetings:
    """Those of one transport, which shakes hands with ``greet`` within ``timeout`` s, and with ``answer``."""

    def __init__(self, greet: Greet, answer: Answer, timeout: float) -> None:
        self._greet, self._answer, self._timeout = greet, answer, timeout
        self._expected: dict[End, PeerId] = {}

    @contextmanager
    def expecting(self, peer: PeerId, ends: Sequence[End]) -> Iterator[None]:
        """Who comes from there meanwhile is greeted as if it had been dialled."""
        self._expected.update(dict.fromkeys(ends, peer))
        try:
            yield
        finally:
            for end in ends:
                self._expected.pop(end, None)

    async def accept(self, socket: anyio.abc.SocketStream) -> None:
        """Shake hands over a connection that came in."""
        peer = self._expected.get(far_end(socket))
        if peer is None:
            await self._answer(socket, None)
        else:  # it dials at the same time, and counts on being answered as the one who was dialled
            await self.meet(socket, peer, dialled=True)

    async def meet(self, socket: Socket, peer: PeerId, *, dialled: bool) -> bool:
        """Shake hands with ``peer``, who dialled at the same time; whether it came to a session."""
        if not dialled:
            return await self._answer(socket, peer)
        try:
            with anyio.fail_after(self._timeout):
                await self._greet(socket, peer)
        except (DecentralError, TimeoutError) as error:
            logger.debug("%s: %s", peer_name(peer), error)
            return False
        return True
