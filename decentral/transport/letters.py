"""One body out and at most one back, carried whole: what a transport may offer where no bytes have to be moved.

Requests are made of streams everywhere else (`requests.py`). A network in memory has hundreds of peers that say small
things to all others; it puts each on the line, and gives it to the handler when it would be there, without a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol

from decentral.wire.keys import PeerId

OnBytes = Callable[[int], None]
Respond = Callable[[PeerId, bytes], Awaitable[bytes]]
Watch = Callable[[PeerId], AbstractContextManager[OnBytes]]


class Letter(Protocol):
    """A body that was sent."""

    async def answer(self, limit: int) -> bytes:
        """What comes back. StreamClosed when nothing will, PayloadError when it is longer than ``limit``."""
        ...

    async def close(self) -> None:
        """Nobody waits for what comes back."""
        ...


class Letters(Protocol):
    """One peer's letters."""

    def carry(self, protocol: str, nbytes: int) -> bool:
        """Whether a body of ``nbytes`` of that protocol goes as one, rather than on a stream."""
        ...

    def serve(self, protocol: str, respond: Respond, limit: int, watch: Watch | None) -> None:
        """Answer each body of at most ``limit`` bytes with what ``respond`` returns, as ``serve_requests`` does."""
        ...

    async def post(self, peer: PeerId, protocol: str, body: bytes) -> Letter:
        """Send a body. PeerUnreachable when there is no path or nobody serves the protocol."""
        ...
