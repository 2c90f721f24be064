"""py-libp2p's table of connections, without what strangers could turn against it, and the ways into it.

Left out are the limiter of inbound connections, whose places are held until shutdown, so that nobody gets in after 250;
the auto-dialler, the pruner and the tags, which dial on their own and keep a row for each peer ever met; and the
service manager, which ends the host when any task of it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import trio
from libp2p.abc import IMuxedConn, INetConn, IRawConnection, ISecureConn
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure
from multiaddr import Multiaddr

from decentral.errors import DecentralError, PayloadError, PeerUnreachable
from decentral.transport.multiaddr import to_bytes
from decentral.transport.native.sessions import Meetings, OnRelayed, SessionEvents, Sessions, Strangers, accept_for_ever
from decentral.transport.native.tcp import Socket, close_now, secure_inbound, secure_outbound
from decentral.transport.protocols.messages import answer, propose
from decentral.transport.protocols.yamux import PROTOCOL, MuxedStream, Session
from decentral.transport.pylibp2p.connection import (
    Connection,
    RawConnection,
    SecureConnection,
    SignerKey,
    key_pair,
    peer_id,
    peer_of,
)
from decentral.wire.keys import PeerId, Signer, peer_name

_NO_LIMIT = 1 << 30  # connections; how many there are is bounded by ``Sessions``

logger = logging.getLogger("decentral.transport")

# It logs to the root by ``logging.debug``, which gives the root a handler: every line of ours was on stderr twice.
swarm_connection.logging = logging.getLogger("libp2p.network.connection")  # type: ignore[assignment, attr-defined]


class GuardedSwarm(Swarm):
    """Connections that ``upgrader`` makes; their tasks run in ``nursery``."""

    def __init__(self, signer: Signer, upgrader: Upgrader, nursery: trio.Nursery, timeout: float) -> None:
        me, store = peer_id(signer.peer), PeerStore()
        store.add_key_pair(me, key_pair(signer))
        super().__init__(
            me,
            store,
            upgrader,  # type: ignore[arg-type]  # a Protocol would do; the class is asked for
            transports=[],
            retry_config=RetryConfig(max_retries=0),
            connection_config=_config(timeout),
        )
        self.background_nursery = nursery
        self.event_background_nursery_created.set()
        self._upgrader = upgrader

    def _init_connection_management(self) -> None:
        """None of it is wanted: the module's docstring says why."""

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        """Have the streams of a connection served."""
        assert isinstance(muxed_conn, Connection), "made by the upgrader"
        conn = SwarmConn(muxed_conn, self, direction)
        conn.set_transport_info(muxed_conn.get_transport_addresses(), muxed_conn.get_connection_type())
        self.connections.setdefault(muxed_conn.peer_id, []).append(conn)
        assert self.background_nursery is not None, "set at the start"
        self.background_nursery.start_soon(guarded, self._serve, conn)
        await conn.event_started.wait()
        await self.notify_connected(conn)
        return conn

    async def notify_disconnected(self, conn: INetConn) -> None:
        """Tell who wants to know, and nobody else."""
        await self._notify("disconnected", conn)

    async def _serve(self, conn: SwarmConn) -> None:
        assert isinstance(conn.muxed_conn, Connection), "made by the upgrader"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(conn.muxed_conn.start)
                await conn.start()
        finally:
            self._upgrader.forget(conn.muxed_conn)
            self.remove_conn(conn)


async def guarded(work: Callable[..., Awaitable[None]], *args: object) -> None:
    """Run it; a bug that a peer found, here or in py-libp2p, is said with its traceback and ends nothing else."""
    try:
        await work(*args)
    except Exception:
        logger.exception("%s failed", getattr(work, "__qualname__", work))


def _config(timeout: float) -> ConnectionConfig:
    return ConnectionConfig(
        max_connections=_NO_LIMIT,
        min_connections=0,
        low_watermark=0,
        high_watermark=_NO_LIMIT,
        max_connections_per_peer=_NO_LIMIT,
        dial_timeout=timeout,
        inbound_upgrade_timeout=timeout,
        outbound_upgrade_timeout=timeout,
    )


# ---- from a socket to streams ----
#
# In py-libp2p's two steps: Noise and nothing else, then our yamux. By default py-libp2p also takes SECIO and plaintext,
# and plaintext believes whatever peer id it is told.


class Upgrader:
    """In the place of py-libp2p's ``TransportUpgrader``. What comes out runs in ``sessions``, which bound it.

    ``stays`` says of a peer whether its connection stays, idle or not; ``on_relayed`` is told of those through a relay.
    """

    def __init__(self, signer: Signer, stays: Callable[[PeerId], bool], on_relayed: OnRelayed) -> None:
        self.sessions = Sessions(SessionEvents(self._on_stream, stays, on_relayed=on_relayed))
        self._signer, self._key = signer, SignerKey(signer)
        self._connections: dict[Session, Connection] = {}

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """Shake hands. SecurityUpgradeFailure."""
        assert isinstance(raw_conn, RawConnection), "no other transport was given to the swarm"
        try:
            if is_initiator:
                assert peer_id is not None, "who is dialled is known"
                secured = await secure_outbound(raw_conn.socket, self._signer, peer_of(peer_id))
            else:
                secured = await secure_inbound(raw_conn.socket, self._signer)
                if raw_conn.expected not in (None, secured.peer):
                    raise PayloadError(f"{peer_name(secured.peer)} came under another name; drop the connection")
        except DecentralError as error:
            raise SecurityUpgradeFailure(str(error)) from error
        return SecureConnection(raw_conn, secured, self._key)

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Run streams over it. MuxerUpgradeFailure."""
        assert isinstance(conn, SecureConnection), "made above"
        try:
            if conn.is_initiator:
                await propose(conn.secured, PROTOCOL)
            else:
                await answer(conn.secured, (PROTOCOL,))
            session = self.sessions.adopt(conn.secured, conn.raw.socket, dialled=conn.is_initiator)
        except DecentralError as error:
            raise MuxerUpgradeFailure(str(error)) from error
        made = self._connections[session] = Connection(session, conn.raw.ends)
        return made

    def forget(self, connection: Connection) -> None:
        """It is over."""
        self._connections.pop(connection.session, None)

    def _on_stream(self, session: Session, muxed: MuxedStream) -> None:
        connection = self._connections.get(session)
        if connection is None:
            muxed.reset()  # it is over already
        else:
            connection.arrived(muxed)


# ---- sockets on their way in ----


class Doors:
    """Sockets that are let in and sockets that were dialled, on their way through one swarm's upgrade.

    Strangers are few at a time, and each gives its place back, whatever came of it.
    """

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
