"""A direct connection instead of a relayed one: tried in the background, while streams go through the relay.

Who was reached through the relay dials the other side's public addresses, if it has any; else both dial at the same
time from the ports they listen on, so that each NAT takes what comes in for an answer. Once a direct connection stands
new streams use it, and the relayed one is closed when no stream is left on it.

Others can make this peer dial: at most four addresses of each, as public as the relay is (``plausible``), eight peers
at a time, and only peers that share a relayed connection with it.

Of the two who dial at once, the one that dialled through the relay plays the one that dials, as the specification has
it and js-libp2p does. go-libp2p has it the other way round (its issue 3171), so the second attempt swaps the roles.

Source: libp2p/specs, relay/DCUtR.md.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from decentral.errors import DecentralError, PayloadError, StreamClosed, TransportError
from decentral.transport.holepunch.dcutr import DCUTR, PunchMessage, plausible, receive, send
from decentral.transport.holepunch.observed import Observed
from decentral.transport.native.dialling import Dialler
from decentral.transport.native.meeting import Meetings
from decentral.transport.native.ports import TAKEN, End
from decentral.transport.native.sessions import Sessions
from decentral.transport.native.stream import NativeStream
from decentral.transport.protocols.identify import Told, ask
from decentral.transport.protocols.multistream import propose
from decentral.transport.protocols.yamux import Session
from decentral.transport.relay.circuit import relay_of
from decentral.wire.keys import PeerId, peer_name

PAUSES = (0.5, 3.0)  # s before each attempt: a handshake and an identify take less, a daemon learns its address later
GRACE = 10.0  # s for which a direct connection has proven itself before the relayed one may go
_REACHING = 2.0  # s for an address without a NAT in front of it
_DIALLING = 4.0  # s: the first SYN may be dropped by the other NAT, the second comes after 1 s, the third after 3 s
_AGAIN = 0.2  # s after a refusal: a NAT that answers strangers with a RST
_LOOK = 1.0  # s between looks whether the relayed connection is still needed
_GLANCE = 0.05  # s between looks whether the other side came through
_PARTING = 1.0  # s for what is queued to leave
_AT_ONCE = 8  # peers that are dialled in either role
_MOST_ASKED, _ASKED_WITHIN = 4, 60.0  # times that one peer may ask within so many s; go-libp2p tries three times

logger = logging.getLogger("decentral.transport")


class Puncher:
    """Does so for every relayed connection of one transport that it is given."""

    def __init__(self, me: PeerId, sessions: Sessions, dialler: Dialler, meetings: Meetings, timeout: float) -> None:
        self._me, self._timeout = me, timeout
        self._sessions, self._dialler, self._meetings, self._ports = sessions, dialler, meetings, dialler.ports
        self._observed = Observed(sessions, dialler.ports, timeout)
        self._slots = anyio.Semaphore(_AT_ONCE)
        self._under_way: dict[PeerId, tuple[anyio.CancelScope, bool]] = {}  # and whether the other side asked for it
        self._asked: dict[PeerId, list[float]] = {}
        self._rounds: dict[Session, int] = {}  # in which both sides said CONNECT

    @property
    def num_under_way(self) -> int:
        """Peers with which a hole is being punched."""
        return len(self._under_way)

    async def upgrade(self, session: Session, dialled: bool) -> None:
        """All that is done for one relayed connection, until it ends; ``dialled``: from here."""
        relay = self._sessions.relay_of(session)
        if relay is None:
            return
        try:
            if dialled:
                await self._observed.at(relay)  # so that it is known when the other side asks
            else:
                await self._pursue(session, relay)
            await self._until_idle(session)
        finally:
            self._rounds.pop(session, None)

    # ---- who was reached through the relay ----

    async def _pursue(self, session: Session, relay: PeerId) -> None:
        for pause in PAUSES:
            await anyio.sleep(pause)
            if not session.usable or self._sessions.is_direct(session.peer) or self._other_side_begins(session.peer):
                return
            async with self._slots:
                try:
                    await self._attempt(session, relay)
                except (DecentralError, TimeoutError, OSError) as error:
                    logger.debug("%s: no direct connection: %s", peer_name(session.peer), error)

    def _other_side_begins(self, peer: PeerId) -> bool:
        """Both dialled through a relay: the one with the greater id begins, so that only one does."""
        return self._me < peer and self._sessions.dialled_through_relay(peer)

    async def _attempt(self, session: Session, relay: PeerId) -> None:
        mine = await self._observed.at(relay)
        told = await self._identified(session)
        if await self._reached(session, relay, told):
            return
        if not mine:
            raise TransportError("the relay does not say what this peer looks like from outside")
        async with self._only(session.peer, asked=False):
            theirs, half = await self._agreed(session, mine)
            ends, dialled = plausible(theirs, self._sessions.host_of(relay)), self._is_second(session)
            with self._meetings.expecting(session.peer, ends if dialled else ()):
                await anyio.sleep(half)
                await self._dial(session.peer, ends, dialled=dialled)

    async def _identified(self, session: Session) -> Told:
        stream = NativeStream(session.peer, session.open())
        try:
            with anyio.fail_after(self._timeout):
                return await ask(stream)
        finally:
            stream.reset()

    async def _reached(self, session: Session, relay: PeerId, told: Told) -> bool:
        """Whether the other side could be dialled at what it says are its addresses: no NAT is in its way."""
        self._dialler.learn(session.peer, self._worth_knowing(told.addresses, relay))
        ends = plausible(told.addresses, self._sessions.host_of(relay))
        return bool(ends) and await self._dialler.dial_directly(session.peer, ends, _REACHING)

    def _worth_knowing(self, addresses: Sequence[str], relay: PeerId) -> list[str]:
        """Those through a relay, for when the direct connection dies."""
        host = self._sessions.host_of(relay)
        return [one for one in addresses if (way := relay_of(one)) and plausible([way[1]], host)]

    async def _agreed(self, session: Session, mine: Sequence[str]) -> tuple[tuple[str, ...], float]:
        """The other side's addresses, and half the round trip; it dials as soon as it hears of it."""
        stream, done = NativeStream(session.peer, session.open()), False
        try:
            with anyio.fail_after(self._timeout):
                await propose(stream, DCUTR)
                began = anyio.current_time()
                await send(stream, PunchMessage.CONNECT, mine)
                theirs = await receive(stream, PunchMessage.CONNECT)
                half = (anyio.current_time() - began) / 2
                await send(stream, PunchMessage.SYNC)
                done = True
                await stream.aclose()
        finally:
            if not done:
                stream.reset()
        return theirs, half

    # ---- who dialled through the relay ----

    async def attend(self, stream: NativeStream, session: Session) -> None:
        """The other side wants to punch. PayloadError when it may not, TimeoutError when it says nothing."""
        relay, peer = self._sessions.relay_of(session), session.peer
        self._check(session, relay)
        assert relay is not None, "checked"
        mine, host = await self._observed.at(relay), self._sessions.host_of(relay)
        async with self._only(peer, asked=True):
            with anyio.fail_after(self._timeout):
                ends = plausible(await receive(stream, PunchMessage.CONNECT), host)
            dialled = not self._is_second(session)
            with self._meetings.expecting(peer, ends if dialled else ()):
                with anyio.fail_after(self._timeout):
                    await send(stream, PunchMessage.CONNECT, mine)
                    await receive(stream, PunchMessage.SYNC)
                await stream.aclose()
                await self._dial(peer, ends, dialled=dialled)

    def _check(self, session: Session, relay: PeerId | None) -> None:
        now, peer = anyio.current_time(), session.peer
        self._asked = {one: times for one, times in self._asked.items() if now - times[-1] < _ASKED_WITHIN}
        times = [time for time in self._asked.get(peer, []) if now - time < _ASKED_WITHIN]
        if relay is None or not session.dialled:
            raise PayloadError("dcutr: over a connection that was not dialled through a relay; drop the stream")
        if len(times) >= _MOST_ASKED or self.num_under_way >= _AT_ONCE:
            raise PayloadError(f"dcutr: asked {len(times)} times, {self.num_under_way} under way; drop the stream")
        self._asked[peer] = [*times, now]

    # ---- both ----

    def _is_second(self, session: Session) -> bool:
        """Count one more round; whether the roles are swapped in it. Both sides count alike."""
        self._rounds[session] = self._rounds.get(session, 0) + 1
        return self._rounds[session] % 2 == 0

    async def _dial(self, peer: PeerId, ends: Sequence[End], *, dialled: bool) -> None:
        """Dial all ends, until there is a direct connection, or no hope of one, or it takes too long."""
        failed: list[End] = []
        with anyio.move_on_after(_DIALLING):
            async with anyio.create_task_group() as group:
                for end in ends:
                    group.start_soon(self._knock, peer, end, dialled, failed)
                while not self._sessions.is_direct(peer) and len(failed) < len(ends):
                    await anyio.sleep(_GLANCE)
                group.cancel_scope.cancel()

    async def _knock(self, peer: PeerId, end: End, dialled: bool, failed: list[End]) -> None:
        while True:
            try:
                socket = await self._ports.leave(*end)
            except OSError as error:
                if error.errno in TAKEN:
                    return  # the other side was first, and is being let in
                await anyio.sleep(_AGAIN)
                continue
            if not await self._meetings.meet(socket, peer, dialled=dialled):
                failed.append(end)
            return

    @asynccontextmanager
    async def _only(self, peer: PeerId, *, asked: bool) -> AsyncIterator[None]:
        """One at a time with each peer. Who asks anew has given up its last attempt: so do we, who would dial on."""
        while earlier := self._under_way.get(peer):
            scope, was_asked = earlier
            if not (asked and was_asked):
                raise StreamClosed(f"{peer_name(peer)}: a hole is being punched already")
            scope.cancel()
            await anyio.lowlevel.checkpoint()  # a few turns of the loop: nothing holds up its end
        with anyio.CancelScope() as scope:
            self._under_way[peer] = (scope, asked)
            try:
                yield
            finally:
                del self._under_way[peer]

    async def _until_idle(self, session: Session) -> None:
        """Close the relayed connection once a direct one has stood for a while and no stream is left on it."""
        stands = 0.0
        while session.usable:
            await anyio.sleep(_LOOK)
            stands = stands + _LOOK if self._sessions.is_direct(session.peer) else 0.0
            if stands >= GRACE and session.idle:
                await session.finish(_PARTING)
