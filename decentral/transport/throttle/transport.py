"""Any transport behind caps: what is bulk waits for its turn, and few enough pushes begin at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import anyio

from decentral.flow.upload import Budget, Changes, UplinkMeter
from decentral.transport.base import Count, DhtHost, Handler, Stream, Traffic, Transport
from decentral.transport.letters import Letters
from decentral.transport.throttle.caps import LEAST_CAP, Caps
from decentral.transport.throttle.gate import Gate, changed
from decentral.transport.throttle.stream import ThrottledStream
from decentral.wire.keys import PeerId

_LOOK_EVERY = 0.5  # s between looks whether a push may begin because the others do not use the cap


class ThrottledTransport:
    """See Transport. ``urgent`` names the protocols that never wait for bulk; ``may_upload`` is asked before bulk
    goes.
    """

    def __init__(
        self,
        inner: Transport,
        caps: Caps | None = None,
        *,
        urgent: Collection[str],
        may_upload: Callable[[], bool] = lambda: True,
    ) -> None:
        caps = caps or Caps()
        self.inner, self.caps, self.may_upload = inner, caps, may_upload
        self.peer: PeerId = inner.peer
        self.up = None if caps.up is None else Gate(caps.up)
        self.down = None if caps.down is None else Gate(caps.down)
        self.meter = UplinkMeter()
        self._urgent = frozenset(urgent)
        self._pushes = 0
        self._pushed = Changes()

    @property
    def traffic(self) -> Traffic:
        """See Transport."""
        return self.inner.traffic

    @property
    def budget(self) -> Budget:
        """See Transport."""
        return self.inner.budget

    @property
    def letters(self) -> Letters | None:
        """See Transport: none, as a cap counts what streams move."""
        return None

    @property
    def dht_host(self) -> DhtHost | None:
        """See Transport."""
        return self.inner.dht_host

    @property
    def uplink(self) -> float | None:
        """Bytes per second that this peer was seen to send, at most its cap; None: not measured yet."""
        found = self.meter.bytes_per_second
        return found if found is None or self.caps.up is None else min(found, self.caps.up)

    async def cap(self, caps: Caps) -> None:
        """From now on hold to these. Runs on the transport's loop."""
        self.caps = caps
        self.up, self.down = changed(self.up, caps.up), changed(self.down, caps.down)
        self._pushed.tell()

    def serve(self, protocol: str, handler: Handler) -> None:
        """See Transport."""

        async def throttled(stream: Stream) -> None:
            await handler(self._throttled(stream, protocol))

        self.inner.serve(protocol, throttled)

    async def open(self, peer: PeerId, protocol: str) -> ThrottledStream:
        """See Transport."""
        return self._throttled(await self.inner.open(peer, protocol), protocol)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See Transport."""
        await self.inner.connect(peer, addresses)

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """See Transport."""
        return await self.inner.paths()

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return self.inner.addresses()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self.inner.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def pushing(self, protocol: str) -> AsyncIterator[None]:
        """Hold a place among those who push bulk at once; waits for one before the other side's time begins.

        Who waits goes on, too, when those who push do not use up the cap: they are slow for another reason.
        """
        if self.up is None or protocol in self._urgent:
            yield
            return
        while self.up is not None and self._pushes >= self.up.rate // LEAST_CAP:
            with anyio.move_on_after(_LOOK_EVERY) as look:
                await self._pushed.next()
            if look.cancelled_caught and (self.up is None or self.up.schedule.idle(anyio.current_time())):
                break
        self._pushes += 1
        try:
            yield
        finally:
            self._pushes -= 1
            self._pushed.tell()

    def _throttled(self, stream: Stream, protocol: str) -> ThrottledStream:
        count = self.traffic.kinds.setdefault(protocol, Count())
        return ThrottledStream(stream, self, count, urgent=protocol in self._urgent)
