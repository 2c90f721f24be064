"""A muxed stream as the rest of the package sees streams: exact reads, counted bytes, and one error."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel

from decentral.errors import StreamClosed
from decentral.transport.base import Traffic
from decentral.transport.protocols.yamux import MuxedStream
from decentral.wire.keys import PeerId, peer_name

_PIECE = 1 << 18  # bytes taken from the stream at a time


class NativeStream:
    """See Stream. Counts nothing while it has no ``traffic``: which protocol is spoken is no payload."""

    def __init__(self, peer: PeerId, muxed: MuxedStream) -> None:
        self.peer = peer
        self.traffic: Traffic | None = None
        self.muxed = muxed

    async def send(self, data: bytes | memoryview) -> None:
        """See Stream."""
        try:
            await self.muxed.send(data, self._sent)
        except StreamClosed as error:
            raise StreamClosed(f"{peer_name(self.peer)}: {error}") from None

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """See Stream."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        pieces, missing = [], nbytes
        while missing:
            piece = await self.muxed.receive(min(missing, _PIECE))
            if not piece:
                raise StreamClosed(
                    f"{peer_name(self.peer)}: {nbytes - missing} of {nbytes} bytes came before it ended the stream"
                )
            missing -= len(piece)
            pieces.append(piece)
            if self.traffic is not None:
                self.traffic.add(self.peer, received=len(piece))
            if on_bytes is not None:
                on_bytes(len(piece))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def aclose(self) -> None:
        """See Stream."""
        self.muxed.close()
        await anyio.lowlevel.checkpoint()

    def reset(self) -> None:
        """End both directions at once; what was sent may be lost."""
        self.muxed.reset()

    def _sent(self, nbytes: int) -> None:
        if self.traffic is not None:
            self.traffic.add(self.peer, sent=nbytes)
