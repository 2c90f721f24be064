"""Connections as py-libp2p sees them at each of their stages: a socket, a proven peer, streams.

Below them are this package's own socket, Noise and yamux. py-libp2p's yamux gives a write up after 5 s without credit,
takes more bytes than its window, and leaves half a frame behind when a write is cancelled.
"""

from __future__ import annotations

from collections import deque

import anyio
import trio
from libp2p.abc import IMuxedConn, IMuxedStream, IRawConnection, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.crypto.keys import KeyPair, KeyType, PrivateKey, PublicKey
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset
from multiaddr import Multiaddr

from decentral.errors import PayloadError, StreamClosed
from decentral.flow.waiting import Changes
from decentral.transport.native.tcp import SocketEnds, ends_of
from decentral.transport.protocols.messages import multiaddr_to_bytes, peer_from_id, peer_to_id
from decentral.transport.protocols.noise import BROKEN, Secured, Socket, close_now
from decentral.transport.protocols.yamux import MuxedStream, Session
from decentral.wire.keys import PeerId, Signer

_PIECE = 1 << 18  # bytes handed out at a time
_MOST_AT_ONCE = 1 << 20  # bytes that who reads to the end of a stream can be made to hold


class RawConnection(IRawConnection):
    """A socket: TCP, or a stream through a relay. ``expected``: who has to be at the other end."""

    def __init__(self, socket: Socket, *, dialled: bool, expected: PeerId | None = None) -> None:
        self.socket, self.is_initiator, self.expected = socket, dialled, expected
        self.ends = ends_of(socket)

    async def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        try:
            await self.socket.send(data)
        except BROKEN as error:
            raise IOException(str(error)) from None

    async def read(self, n: int | None = None) -> bytes:
        """Return what came next, nothing at the end."""
        try:
            return await self.socket.receive(n or _PIECE)
        except anyio.EndOfStream:
            return b""
        except BROKEN as error:
            raise IOException(str(error)) from None

    async def close(self) -> None:
        """Close at once."""
        await close_now(self.socket)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return host and port; None through a relay."""
        return _host_and_port(self.ends)

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the other end."""
        return _address(self.ends)

    def get_connection_type(self) -> ConnectionType:
        """Tell whether there is a relay in between."""
        return _kind(self.ends)


class SecureConnection(ISecureConn):
    """A connection whose other end is proven: what py-libp2p asks of one between its handshake and its muxer."""

    def __init__(self, raw: RawConnection, secured: Secured, key: SignerKey) -> None:
        self.raw, self.secured = raw, secured
        self.is_initiator = raw.is_initiator
        self._key = key

    def get_local_peer(self) -> ID:
        """Return this peer."""
        return ID.from_pubkey(self._key.get_public_key())

    def get_local_private_key(self) -> PrivateKey:
        """Return this peer's key."""
        return self._key

    def get_remote_peer(self) -> ID:
        """Return the other side, authenticated."""
        return peer_id(self.secured.peer)

    def get_remote_public_key(self) -> PublicKey:
        """Return the other side's key."""
        return public_key(self.secured.peer)

    async def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        await self.secured.send(data)

    async def read(self, n: int | None = None) -> bytes:
        """Return what came next."""
        return await self.secured.receive()

    async def close(self) -> None:
        """Close at once."""
        await self.raw.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return host and port; None through a relay."""
        return self.raw.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the other end."""
        return self.raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Tell whether there is a relay in between."""
        return self.raw.get_connection_type()


class Connection(IMuxedConn):
    """The streams of one of our sessions, which runs already. Streams of the other side wait to be accepted."""

    def __init__(self, session: Session, ends: SocketEnds) -> None:
        self.session, self.ends = session, ends
        self.peer_id = peer_id(session.peer)
        self.event_started = trio.Event()
        self._came: deque[MuxedStream] = deque()  # at most as many as a session takes, 128
        self._changed = Changes()

    def queue(self, muxed: MuxedStream) -> None:
        """Queue a stream that the other side opened."""
        self._came.append(muxed)
        self._changed.tell()

    @property
    def is_initiator(self) -> bool:
        """Tell whether it was dialled from here."""
        return self.session.dialled

    async def start(self) -> None:
        """Wait until the session is over."""
        self.event_started.set()
        await self.session.until_over()
        self._changed.tell()

    async def close(self) -> None:
        """End it at once."""
        self.session.abort()

    @property
    def is_established(self) -> bool:
        """Tell whether streams can be opened."""
        return self.session.usable

    @property
    def is_closed(self) -> bool:
        """Tell whether it is over."""
        return self.session.ended

    async def open_stream(self) -> MuxedLibp2pStream:
        """Open a stream. MuxedConnUnavailable."""
        try:
            return MuxedLibp2pStream(self, self.session.open())
        except StreamClosed as error:
            raise MuxedConnUnavailable(str(error)) from None

    async def accept_stream(self) -> MuxedLibp2pStream:
        """Return the next stream of the other side. MuxedConnUnavailable at the end."""
        while not self._came:
            if self.session.ended:
                raise MuxedConnUnavailable("the connection ended")
            await self._changed.next()
        return MuxedLibp2pStream(self, self._came.popleft())

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the other end."""
        return _address(self.ends)

    def get_connection_type(self) -> ConnectionType:
        """Tell whether there is a relay in between."""
        return _kind(self.ends)


class MuxedLibp2pStream(IMuxedStream):
    """A stream of ours. ``handed_on``: somebody else closes it."""

    def __init__(self, connection: Connection, muxed: MuxedStream) -> None:
        self.muxed_conn, self.muxed = connection, muxed
        self.ends = connection.ends
        self.handed_on = False

    async def read(self, n: int | None = None) -> bytes:
        """Read up to ``n`` bytes; without ``n`` all to the end, which resets a stream that has too many.

        MuxedStreamEOF.
        """
        if n is None or n < 0:
            return await self._read_all()
        data = await self.muxed.receive(min(n, _PIECE)) if n else b""
        if n and not data:
            raise MuxedStreamEOF("the other side ended the stream")
        return data

    async def write(self, data: bytes) -> None:
        """Send all of ``data``, as the other side reads. MuxedStreamClosed."""
        try:
            await self.muxed.send(data)
        except StreamClosed as error:
            raise MuxedStreamClosed(str(error)) from None

    async def close(self) -> None:
        """Send nothing more."""
        self.muxed.end()

    async def reset(self) -> None:
        """End both directions at once."""
        self.muxed.reset()

    def set_deadline(self, ttl: int) -> None:
        """Do nothing: deadlines are cancel scopes here."""

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return host and port; None through a relay."""
        return _host_and_port(self.ends)

    async def __aenter__(self) -> MuxedLibp2pStream:
        return self

    async def _read_all(self) -> bytes:
        held = b""
        while piece := await self.muxed.receive(_PIECE):
            held += piece
            if len(held) > _MOST_AT_ONCE:
                self.muxed.reset()
                raise MuxedStreamReset(f"more than {_MOST_AT_ONCE} bytes")
        return held


def _host_and_port(ends: SocketEnds) -> tuple[str, int] | None:
    return None if ends.host is None else (ends.host, int(ends.remote.rpartition("/")[2]))


def _address(ends: SocketEnds) -> list[Multiaddr]:
    return [Multiaddr(multiaddr_to_bytes(ends.remote))]


def _kind(ends: SocketEnds) -> ConnectionType:
    return ConnectionType.RELAYED if ends.host is None else ConnectionType.DIRECT


# ---- peers and keys, in its words ----
#
# The secret stays in the signer.


class SignerKey(PrivateKey):
    """A key that signs through ``signer``."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def sign(self, data: bytes) -> bytes:
        """Return the signature of ``data``."""
        return self._signer.sign(data)

    def get_public_key(self) -> PublicKey:
        """Return the public key."""
        return public_key(self._signer.peer)

    def get_type(self) -> KeyType:
        """Return Ed25519."""
        return KeyType.Ed25519

    def to_bytes(self) -> bytes:
        """Refuse: nobody needs them."""
        raise PayloadError("the private key is not given out")


def key_pair(signer: Signer) -> KeyPair:
    """Return both halves of a key."""
    private = SignerKey(signer)
    return KeyPair(private, private.get_public_key())


def public_key(peer: PeerId) -> PublicKey:
    """Return the key that a peer id is."""
    return Ed25519PublicKey.from_bytes(peer)


def peer_id(peer: PeerId) -> ID:
    """Return a peer's libp2p id."""
    return ID(peer_to_id(peer))


def peer_of(found: ID) -> PeerId:
    """Return the peer behind a libp2p id. PayloadError for anything but an Ed25519 one."""
    return peer_from_id(found.to_bytes())
