"""From a socket to a session: both ends prove who they are, whoever of them dialled.

A stranger costs a TCP connection and nothing else until it has proven who it is; when too many are at it, the one that
takes longest is dropped.
"""

from __future__ import annotations

import logging

import anyio
import anyio.abc

from decentral.errors import DecentralError, PayloadError
from decentral.transport.native.meeting import Meetings
from decentral.transport.native.secured import Socket, close_now, secure_inbound, secure_outbound
from decentral.transport.native.sessions import Sessions
from decentral.transport.native.strangers import Strangers, accept_for_ever
from decentral.transport.native.tcp import ends_of
from decentral.transport.protocols.multistream import answer, propose
from decentral.transport.protocols.yamux import PROTOCOL, Session
from decentral.transport.relay.limits import network_of
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.transport")


class Handshakes:
    """Those of one transport. What comes out of them is one of its ``sessions``."""

    def __init__(
        self, signer: Signer, timeout: float, sessions: Sessions, *, of_one_network: int | None = None
    ) -> None:
        self._signer, self._sessions = signer, sessions
        self._of_one_network = of_one_network
        self._strangers = Strangers(timeout)
        self.meetings = Meetings(self.greet, self._answered, timeout)

    @property
    def num_strangers(self) -> int:
        """Connections that came in and whose other end has not proven who it is."""
        return len(self._strangers)

    # ---- what comes in ----

    async def listen(self, listener: anyio.abc.SocketListener, group: anyio.abc.TaskGroup) -> None:
        """Accept for ever."""
        await accept_for_ever(listener, group, self.meetings.accept)

    def take_in(self, socket: Socket, peer: PeerId) -> None:
        """Shake hands, in the background, over a connection that a relay brought from ``peer``."""
        if self._sessions.group is not None:
            self._sessions.group.start_soon(self._answered, socket, peer)

    def dismiss(self) -> None:
        """Drop all strangers."""
        self._strangers.dismiss()

    # ---- with somebody ----

    async def greet(self, socket: Socket, peer: PeerId) -> Session:
        """Shake hands with ``peer``, who was dialled. The socket is closed when it does not come to a session."""
        session = None
        try:
            secured = await secure_outbound(socket, self._signer, peer)
            await propose(secured, PROTOCOL)
            session = self._sessions.adopt(secured, socket, dialled=True)
            return session
        finally:
            if session is None:
                await close_now(socket)

    async def _answered(self, socket: Socket, expected: PeerId | None) -> bool:
        """Shake hands with who dialled, the ``expected`` one where it is known; whether it came to a session."""
        session = None
        try:
            with self._strangers.one_more():
                secured = await secure_inbound(socket, self._signer)
                if expected not in (None, secured.peer):
                    raise PayloadError(f"{peer_name(secured.peer)} came under another name; drop the connection")
                await answer(secured, (PROTOCOL,))
                self._check_network(socket)
                session = self._sessions.adopt(secured, socket, dialled=False)
        except DecentralError as error:
            logger.debug("inbound connection: %s", error)
        finally:
            if session is None:
                await close_now(socket)
        return session is not None

    def _check_network(self, socket: Socket) -> None:
        """Refuse one of too many from one network, where there is such a bound: their names cost nothing to make."""
        host = ends_of(socket).host
        if self._of_one_network is None or host is None:
            return
        network = network_of(host)
        near = self._sessions.num_from(network)
        if near >= self._of_one_network:
            raise PayloadError(f"{near} connections came from {network}; the new one is refused")
