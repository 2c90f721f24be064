"""Streams over libp2p without a daemon: TCP, Noise and yamux in this process. For systems the daemon is not built for.

Runs on asyncio and on trio. Speaks with daemons and with other implementations of libp2p; has neither QUIC nor a DHT.
What strangers may hold is bounded at every step: connections that have not proven who they are, connections, streams,
windows, and above them the bytes of bodies (``budget``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

import anyio

from decentral.errors import DecentralError
from decentral.flow.budget import Limits
from decentral.transport.base import OwnTransport, attend, everywhere
from decentral.transport.holepunch import DCUTR
from decentral.transport.native.links import LinkOptions, Links
from decentral.transport.native.relay import Relay
from decentral.transport.native.sessions import SessionEvents
from decentral.transport.protocols.circuit import HOP, STOP, RelayLimits
from decentral.transport.protocols.identify import IDENTIFY, tell
from decentral.transport.protocols.messages import Ends, answer
from decentral.transport.protocols.yamux import MuxedStream, NativeStream, Session
from decentral.wire.keys import PeerId, Signer, peer_name

_OF_A_QUESTION = 1 << 14  # bytes that a stream brings to a mere relay before it is joined: proposals and 4 KiB

logger = logging.getLogger("decentral.transport")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions(LinkOptions):
    """A peer's part in the network, and what it relays for others."""

    relay: RelayLimits | None = None  # None: nothing


class NativeTransport(OwnTransport):
    """A peer on libp2p, in this process: see ``Transport``.

    ``listen`` defaults to all interfaces; TCP only. Entering raises ListenError when an address is taken, ConfigError
    when one is malformed.
    """

    def __init__(
        self,
        signer: Signer,
        *,
        listen: Sequence[str] | None = None,
        options: NativeOptions | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(signer.peer, limits)
        self.options = options or NativeOptions()
        self.listen_on = tuple(listen) if listen is not None else everywhere()
        events = SessionEvents(self._on_stream, self._stays, self._on_gone)
        self.links = Links(signer, self.options, self.traffic, events, limits=self.options.relay)
        self.relay = None if self.options.relay is None else Relay(self.links, self.options.relay)
        if self.relay is not None:
            self.serve(HOP, self.relay.attend)
        self._negotiations = Negotiations(self.budget.comes_first, self.options.dial_timeout)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self.links.listen(self.listen_on, stack)
            self.services.fixed = True
            await self.links.run(stack)
            self.stack = stack.pop_all()
        return self

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the other ends of the connections there are."""
        return self.links.sessions.paths()

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses that others may dial."""
        return self.links.addresses()

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial ``peer`` at its addresses. The addresses are remembered for when the connection is gone."""
        await self.links.dialler.connect(peer, addresses)

    async def open(self, peer: PeerId, protocol: str) -> NativeStream:
        """Open a stream to ``peer``."""
        return await self.links.opener.open(peer, protocol)

    # ---- connections ----

    def _stays(self, peer: PeerId) -> bool:
        return self.budget.comes_first(peer) or (self.relay is not None and self.relay.has_place(peer))

    def _on_gone(self, peer: PeerId) -> None:
        if self.relay is not None:
            self.relay.drop_place(peer)

    # ---- inbound ----

    def _on_stream(self, session: Session, muxed: MuxedStream) -> None:
        group = self.links.background
        if group is None or not self._negotiations.begin(session.peer):
            muxed.reset()
            return
        if self.services.handlers.keys() == {HOP}:
            muxed.most_unread = _OF_A_QUESTION
        group.start_soon(self._attend, NativeStream(session.peer, muxed), session)

    async def _attend(self, stream: NativeStream, session: Session) -> None:
        handed_on = False
        try:
            protocol = await self._negotiations.protocol_of(stream, stream.peer, self._protocols)
            if protocol == STOP:
                await self.links.admit(stream)
                handed_on = True
                return
            if protocol == IDENTIFY:
                await self._tell(stream, session)
                return
            if protocol == DCUTR and self.links.puncher is not None:
                await self.links.puncher.attend(stream, session)
                return
            with self.budget.inbound(stream.peer):
                stream.traffic = self.traffic
                await attend(stream, protocol, self.services.handlers[protocol])
        except (DecentralError, TimeoutError) as error:
            logger.debug("inbound stream of %s refused: %s", peer_name(stream.peer), error)
        finally:
            if not handed_on:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()

    async def _tell(self, stream: NativeStream, session: Session) -> None:
        sessions = self.links.sessions
        seen = "" if sessions.relay_of(session) else sessions.ends(session).remote
        await tell(stream, self.peer, self.addresses(), self._protocols, seen)

    @property
    def _protocols(self) -> tuple[str, ...]:
        """The protocols that are answered."""
        own = (IDENTIFY, STOP) if self.links.puncher is None else (IDENTIFY, STOP, DCUTR)
        return own + tuple(self.services.handlers)


# ---- streams whose protocol is not known yet ----
#
# They are bounded: what one costs is spent before anybody is asked for it.

_OF_ALL, _OF_ONE_PEER = 256, 128  # of all, beyond which only members of the run open more; of one peer


class Negotiations:
    """The inbound ones of one transport. ``comes_first``: whether a peer is a member of the run."""

    def __init__(self, comes_first: Callable[[PeerId], bool], timeout: float) -> None:
        self._comes_first, self._timeout = comes_first, timeout
        self._under_way: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        return self._under_way.total()

    def begin(self, peer: PeerId) -> bool:
        """Count one more of ``peer``; False when there are too many, and the stream is to be reset."""
        full = self._under_way.total() >= _OF_ALL and not self._comes_first(peer)
        if full or self._under_way[peer] >= _OF_ONE_PEER:
            return False
        self._under_way[peer] += 1
        return True

    async def protocol_of(self, ends: Ends, peer: PeerId, known: Container[str]) -> str:
        """Read what a stream that has begun is for, one of those ``known``. DecentralError, TimeoutError."""
        try:
            with anyio.fail_after(self._timeout):
                return await answer(ends, known)
        finally:
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]
