"""A stream of the network in memory: a pipe each way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from decentral.transport.base import Traffic
from decentral.transport.memory.pipe import Pipe, Weight
from decentral.transport.watchdog import Holdable, Watchdog
from decentral.wire.keys import PeerId


@dataclass(eq=False)
class MemoryStream(Holdable):
    """One end of two pipes. Where a byte stands for many, watchdogs rest: they count bytes, and hardly any move."""

    peer: PeerId
    outgoing: Pipe
    incoming: Pipe
    traffic: Traffic
    weight: Weight
    kind: str | None  # under which its bytes are booked, too; None: whoever wraps the transport does that
    watchdogs: list[Watchdog] = field(default_factory=list)

    async def send(self, data: bytes | memoryview) -> None:
        """See Stream."""
        start = self.outgoing.written
        with self._counted():
            await self.outgoing.write(data)
        self.traffic.add(self.peer, sent=round(self.weight.of(start, len(data))), kind=self.kind)

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """See Stream."""
        start = self.incoming.read_so_far
        with self._counted():
            data = await self.incoming.read(nbytes, on_bytes)
        self.traffic.add(self.peer, received=round(self.weight.of(start, nbytes)), kind=self.kind)
        return data

    async def aclose(self) -> None:
        """See Stream."""
        self.outgoing.end()
        self.incoming.refuse()

    def _counted(self) -> AbstractContextManager[None]:
        return nullcontext() if self.weight.each == 1.0 else self.held()
