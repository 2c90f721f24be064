"""From a socket to streams, in py-libp2p's two steps: Noise and nothing else, then our yamux.

By default py-libp2p also takes SECIO and plaintext, and plaintext believes whatever peer id it is told.
"""

from __future__ import annotations

from collections.abc import Callable

from libp2p.abc import IMuxedConn, IRawConnection, ISecureConn
from libp2p.peer.id import ID
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure

from decentral.errors import DecentralError, PayloadError
from decentral.transport.native.sessions import OnRelayed, SessionEvents, Sessions
from decentral.transport.native.tcp import secure_inbound, secure_outbound
from decentral.transport.protocols.messages import answer, propose
from decentral.transport.protocols.yamux import PROTOCOL, MuxedStream, Session
from decentral.transport.pylibp2p.connection import Connection, RawConnection, SecureConnection
from decentral.transport.pylibp2p.keys import SignerKey, peer_of
from decentral.wire.keys import PeerId, Signer, peer_name


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
