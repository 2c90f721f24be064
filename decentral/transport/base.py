"""What every transport promises: streams to a peer id, with back-pressure and three errors.

The laws, the same on every transport and tested on all of them:

- bytes arrive in order and whole, or ``receive_exactly`` raises StreamClosed;
- ``send`` returns once the bytes are on their way, and waits while the other side does not read;
- what was sent before ``aclose`` still arrives; what was in flight when a peer died may not;
- ``open`` and ``connect`` raise PeerUnreachable, never anything else, and never hang;
- ``Stream.peer`` is proven by the transport's handshake, not claimed by the other side;
- a stream a handler returns from is closed; a handler's error ends its stream and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self

from decentral.errors import ConfigError, DecentralError
from decentral.flow.upload import Budget, UplinkMeter
from decentral.transport.letters import Letters
from decentral.wire.keys import PeerId, peer_name

UNREAD = 40.0  # s that what was sent may take to be read: buffers on the way hold about 1 MiB, 32 s at the least rate
_MAX_COUNTED_PEERS = 4096  # identities cost nothing to make, so the table of counts must end somewhere

logger = logging.getLogger("decentral.transport")


class Stream(Protocol):
    """Bytes both ways between this peer and one other, until either closes."""

    @property
    def peer(self) -> PeerId:
        """The other side, authenticated."""
        ...

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``. StreamClosed when the other side is gone."""
        ...

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """The next ``nbytes``; the caller bounds them. StreamClosed when fewer come before the end.

        ``on_bytes`` is told how many came, whenever some do.
        """
        ...

    async def aclose(self) -> None:
        """Close; what was sent still arrives. Closing twice is no error."""
        ...


Handler = Callable[[Stream], Awaitable[None]]


class DhtHost(Protocol):
    """A process beside this one that hivemind's DHT can use, and that may die and be started again."""

    @property
    def is_private(self) -> bool:
        """Whether others cannot dial it, so that it should hold no keys for them."""
        ...

    @property
    def starts(self) -> int:
        """Processes started so far; grows when one died."""
        ...

    async def until_restarted(self, starts: int) -> None:
        """Wait until the process with number ``starts`` is no more and its successor answers."""
        ...

    def attached(self) -> AbstractAsyncContextManager[Any]:  # Any: hivemind.P2P, which has no types
        """hivemind's own client of the process that runs now."""
        ...


class Transport(Protocol):
    """This peer's way to the others; an asynchronous context manager that runs while it is entered."""

    @property
    def peer(self) -> PeerId:
        """This peer."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received so far."""
        ...

    @property
    def budget(self) -> Budget:
        """What the other peers hold of this process."""
        ...

    @property
    def meter(self) -> UplinkMeter:
        """What is learnt of this peer's uplink."""
        ...

    @property
    def dht_host(self) -> DhtHost | None:
        """What hivemind's DHT can run on, which only one kind of transport has."""
        ...

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of ``protocol`` by ``handler``. Before entering; ConfigError afterwards or twice."""
        ...

    async def open(self, peer: PeerId, protocol: str) -> Stream:
        """A new stream to ``peer``. PeerUnreachable when there is no path or nobody serves the protocol."""
        ...

    @property
    def letters(self) -> Letters | None:
        """What carries small bodies whole, where there is such a thing."""
        ...

    def pushing(self, protocol: str) -> AbstractAsyncContextManager[None]:
        """A place among those who push at once: a cap of our own is not the path's fault, so its wait is not timed."""
        ...

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial ``peer`` at its addresses, so that ``open`` finds it. PeerUnreachable when none answers."""
        ...

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """The other ends of the connections there are now; one through a relay has ``/p2p-circuit`` in it."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs ending in ``/p2p/<name>`` that others may dial, best first."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Uncapped:
    """A transport without caps: all who push do so at once, and nobody but they themselves measures the uplink."""

    @cached_property
    def meter(self) -> UplinkMeter:
        """See Transport."""
        return UplinkMeter()

    @property
    def dht_host(self) -> DhtHost | None:
        """See Transport."""
        return None

    @property
    def letters(self) -> Letters | None:
        """See Transport."""
        return None

    def pushing(self, protocol: str) -> AbstractAsyncContextManager[None]:
        """See Transport."""
        return nullcontext()


@dataclass(slots=True)
class Count:
    """Bytes sent and received."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Traffic:
    """Payload bytes that crossed the transport, length prefixes included, encryption and TCP headers not."""

    total: Count = field(default_factory=Count)
    peers: dict[PeerId, Count] = field(default_factory=dict)  # the first 4,096 met; ``total`` has all
    kinds: dict[str, Count] = field(default_factory=dict)  # by protocol, of those that streams are opened for

    def add(self, peer: PeerId, *, sent: int = 0, received: int = 0, kind: str | None = None) -> None:
        """Book bytes exchanged with ``peer``, under a protocol where the transport tells them apart."""
        counts = [self.total, self._of(peer)]
        if kind is not None:
            if kind not in self.kinds:
                self.kinds[kind] = Count()
            counts.append(self.kinds[kind])
        for count in counts:
            count.sent += sent
            count.received += received

    def of(self, peer: PeerId) -> Count:
        """A copy of what was exchanged with ``peer``."""
        count = self.peers.get(peer, Count())
        return Count(count.sent, count.received)

    def _of(self, peer: PeerId) -> Count:
        if peer not in self.peers:
            if len(self.peers) >= _MAX_COUNTED_PEERS:
                return Count()
            self.peers[peer] = Count()
        return self.peers[peer]


async def attend(stream: Stream, protocol: str, handler: Handler) -> None:
    """Run a handler on an inbound stream and close it; breaking a rule costs the peer this stream only."""
    try:
        await handler(stream)
    except DecentralError as error:
        logger.debug("%s from %s: %s", protocol, peer_name(stream.peer), error)
    except Exception:
        # A peer may have found a bug of ours. Say so with the traceback; the other peers' streams go on.
        logger.exception("handler of %s failed on a stream from %s", protocol, peer_name(stream.peer))
    finally:
        await stream.aclose()


class Services:
    """The protocols a transport answers, fixed once it has started."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.fixed = False

    def add(self, protocol: str, handler: Handler) -> None:
        """Answer ``protocol`` by ``handler``; ConfigError when it is taken or the transport has started."""
        if self.fixed or protocol in self.handlers:
            rule = "its transport has started" if self.fixed else "it is served already"
            raise ConfigError(f"serve({protocol!r}): {rule}; serve each protocol once, before entering")
        self.handlers[protocol] = handler
