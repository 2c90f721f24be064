"""Sockets that are let in and sockets that were dialled, on their way through the swarm's upgrade."""

from __future__ import annotations

import logging

import anyio
import anyio.abc
from libp2p.network.exceptions import SwarmException
from multiaddr import Multiaddr

from decentral.errors import DecentralError, PayloadError, PeerUnreachable
from decentral.transport.multiaddr import to_bytes
from decentral.transport.native.sessions import Meetings, Strangers, accept_for_ever
from decentral.transport.native.tcp import Socket, close_now
from decentral.transport.protocols.yamux import Session
from decentral.transport.pylibp2p.connection import Connection, RawConnection
from decentral.transport.pylibp2p.keys import peer_id
from decentral.transport.pylibp2p.swarm import GuardedSwarm
from decentral.wire.keys import PeerId

logger = logging.getLogger("decentral.transport")


class Doors:
    """Those of one swarm. Strangers are few at a time, and each gives its place back, whatever came of it."""

    def __init__(self, swarm: GuardedSwarm, group: anyio.abc.TaskGroup, timeout: float) -> None:
        self.strangers = Strangers(timeout)
        self.meetings = Meetings(self.greet, self._let_in, timeout)
        self._swarm, self._group = swarm, group

    async def listen(self, listener: anyio.abc.SocketListener) -> None:
        """Accept for ever."""
        await accept_for_ever(listener, self._group, self.meetings.accept)

    def take_in(self, socket: Socket, peer: PeerId) -> None:
        """Shake hands, in the background, over a connection that a relay brought from ``peer``."""
        self._group.start_soon(self._let_in, socket, peer)

    async def greet(self, socket: Socket, peer: PeerId) -> Session:
        """Shake hands with ``peer``, who was dialled. The socket is closed when it does not come to a session."""
        raw, conn = RawConnection(socket, dialled=True), None
        try:
            conn = await self._swarm.upgrade_outbound_raw_conn(raw, peer_id(peer))
        except SwarmException as error:
            raise _ours(error) from None
        finally:
            if conn is None:
                await close_now(socket)
        assert isinstance(conn.muxed_conn, Connection), "made by the upgrader"
        return conn.muxed_conn.session

    async def _let_in(self, socket: Socket, expected: PeerId | None) -> bool:
        """Shake hands with who dialled, the ``expected`` one where it is known; whether it came to a session."""
        raw, conn = RawConnection(socket, dialled=False, expected=expected), None
        try:
            with self.strangers.one_more():
                conn = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr(to_bytes(raw.ends.remote)))
        except SwarmException as error:
            logger.debug("inbound connection: %s", _ours(error))
        except Exception:
            # A stranger may have found a bug, of ours or of py-libp2p: it costs the stranger its connection.
            logger.exception("an inbound connection failed")
        finally:
            if conn is None:
                await close_now(socket)
        return conn is not None


def _ours(error: SwarmException) -> DecentralError:
    """What went wrong, in our words where it was ours: below the swarm is our own handshake."""
    cause = error.__cause__.__cause__ if error.__cause__ is not None else None
    if isinstance(cause, PayloadError | PeerUnreachable | DecentralError):
        return cause
    return PeerUnreachable(f"{error}; try again")
