"""A stream of the trio thread as who lives on another loop uses it."""

from __future__ import annotations

from collections.abc import Callable

import anyio.lowlevel

from decentral.transport.native.stream import NativeStream
from decentral.transport.pylibp2p.trio_thread import TrioThread


class ThreadedStream:
    """See Stream. ``inner`` lives in ``thread``, and counts the bytes."""

    def __init__(self, thread: TrioThread, inner: NativeStream) -> None:
        self.peer = inner.peer
        self._thread, self._inner = thread, inner

    async def send(self, data: bytes | memoryview) -> None:
        """See Stream."""
        await self._thread.call(self._inner.send, data)

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """See Stream."""
        receive = self._inner.receive_exactly
        if on_bytes is None:
            return await self._thread.call(receive, nbytes)
        return await self._thread.call_telling(receive, nbytes, tell=on_bytes)

    async def aclose(self) -> None:
        """See Stream. What this peer sent before goes first, as the thread does one thing after another."""
        self._thread.post(self._inner.muxed.close)
        await anyio.lowlevel.checkpoint()

    def reset(self) -> None:
        """End both directions at once; what was sent may be lost."""
        self._thread.post(self._inner.reset)
