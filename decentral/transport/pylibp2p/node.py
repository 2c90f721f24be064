"""A peer on py-libp2p, in its trio loop: sockets, swarm, host, and dialling, put together."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio
import trio
from libp2p.abc import IMuxedConn, INetConn, INetStream, IRawConnection, ISecureConn
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.ping import ID as PING
from libp2p.host.ping import handle_ping
from libp2p.identity.identify_push.identify_push import ID_PUSH
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
from decentral.flow.budget import Budget
from decentral.transport.base import Traffic
from decentral.transport.holepunch import DCUTR, Puncher
from decentral.transport.native.links import LinkOptions, Links
from decentral.transport.native.sessions import SessionEvents, Sessions, Upgrade
from decentral.transport.native.transport import Negotiations
from decentral.transport.protocols.circuit import STOP
from decentral.transport.protocols.messages import multiaddr_to_bytes
from decentral.transport.protocols.noise import Socket
from decentral.transport.protocols.yamux import MuxedStream, NativeStream, Session
from decentral.transport.pylibp2p.connection import (
    Connection,
    MuxedLibp2pStream,
    RawConnection,
    SecureConnection,
    SignerKey,
    key_pair,
    peer_id,
)
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.transport")


@dataclass(frozen=True, slots=True)
class Above:
    """The user of a node: what it is told, and asked; each is called in the node's thread."""

    protocols: Sequence[str]
    take: Callable[[str, NativeStream], bool]  # an inbound stream; whether it was taken over
    comes_first: Callable[[PeerId], bool]  # whether a peer is a member of the run
    traffic: Traffic


class Libp2pNode:
    """The host of one peer on its own ``links``. Runs while it is entered, in a trio loop."""

    def __init__(self, signer: Signer, listen: Sequence[str], options: LinkOptions, above: Above) -> None:
        self._signer, self._listen, self._above = signer, listen, above
        events = SessionEvents(self._on_stream, above.comes_first)
        self.links = Links(signer, options, above.traffic, events, shake=self._shake)
        self._upgrader = Upgrader(signer, self.links.sessions)
        self._stack: AsyncExitStack | None = None

    async def __aenter__(self) -> Libp2pNode:
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it says an error for each stranger; we have our own
        async with AsyncExitStack() as stack:
            await self.links.listen(self._listen, stack)
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            self._make_host(nursery)
            await self.links.run(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._stack is not None, "entered before it is left"
        await self._stack.__aexit__(None, None, None)

    def _make_host(self, nursery: trio.Nursery) -> None:
        timeout = self.links.options.dial_timeout
        self._swarm = GuardedSwarm(self._signer, self._upgrader, nursery, timeout)
        self.host = GuardedHost(self._swarm, self.links.addresses, self._above.comes_first, timeout)
        self.host.serve(STOP, self._brought)
        if self.links.puncher is not None:
            self.host.serve(DCUTR, self._begin_punch)
        for protocol in self._above.protocols:
            self.host.serve(protocol, self._taker(protocol))

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the other ends of the connections there are."""
        return self.links.sessions.paths()

    # ---- connections ----

    async def _shake(self, socket: Socket, peer: PeerId | None, dialled: bool) -> Session:
        """Make a session by py-libp2p's upgrade, so that its swarm knows the connection. DecentralError."""
        raw = RawConnection(socket, dialled=dialled, expected=peer)
        try:
            if dialled:
                assert peer is not None, "who is dialled is known"
                muxed = (await self._swarm.upgrade_outbound_raw_conn(raw, peer_id(peer))).muxed_conn
            else:
                where = Multiaddr(multiaddr_to_bytes(raw.ends.remote))
                muxed = await self._swarm.upgrade_inbound_raw_conn(raw, where)
        except SwarmException as error:
            raise _ours(error) from None
        assert isinstance(muxed, Connection), "made by the upgrader"
        return muxed.session

    def _on_stream(self, session: Session, muxed: MuxedStream) -> None:
        self._upgrader.hand_on(session, muxed)

    # ---- streams of others ----

    def _taker(self, protocol: str) -> Take:
        return lambda stream, _: self._above.take(protocol, stream)

    def _brought(self, stream: NativeStream, _: Session) -> bool:
        """Have a connection that a relay brings looked at; tell whether it is."""
        if stream.peer not in self.links.places.relays:
            return False
        return self._begin(self._admit, stream)

    async def _admit(self, stream: NativeStream) -> None:
        taken = False
        try:
            await self.links.admit(stream)
            taken = True
        except (DecentralError, TimeoutError) as error:
            logger.debug("relay %s: %s", peer_name(stream.peer), error)
        finally:
            if not taken:
                stream.reset()

    def _begin_punch(self, stream: NativeStream, session: Session) -> bool:
        """Exchange a relayed connection for a direct one, as the other side asks; tell whether that is tried."""
        assert self.links.puncher is not None, "served only then"
        return self._begin(_answer, self.links.puncher, stream, session)

    def _begin(self, work: Callable[..., Awaitable[None]], *args: object) -> bool:
        """Run it in the background; tell whether there is one still."""
        background = self.links.background
        if background is not None:
            background.start_soon(run_guarded, work, *args)
        return background is not None


async def _answer(puncher: Puncher, stream: NativeStream, session: Session) -> None:
    """The other side wants to punch."""
    try:
        await puncher.attend(stream, session)
    except (DecentralError, TimeoutError) as error:
        logger.debug("no direct connection to %s: %s", peer_name(stream.peer), error)
    finally:
        with anyio.CancelScope(shield=True):
            await stream.aclose()


# ---- the table of connections ----
#
# py-libp2p's, without what strangers could turn against it.
#
# Left out are the limiter of inbound connections, whose places are held until shutdown, so that nobody gets in after
# 250; the auto-dialler, the pruner and the tags, which dial on their own and keep a row for each peer ever met; and
# the service manager, which ends the host when any task of it fails.

_NO_LIMIT = 1 << 30  # connections; how many there are is bounded by ``Sessions``

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
        self.background_nursery.start_soon(run_guarded, self._serve, conn)
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


async def run_guarded(work: Callable[..., Awaitable[None]], *args: object) -> None:
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
    """In the place of py-libp2p's ``TransportUpgrader``. What comes out runs in ``sessions``, which bound it."""

    def __init__(self, signer: Signer, sessions: Sessions) -> None:
        self._steps, self._key = Upgrade(signer, sessions), SignerKey(signer)
        self._connections: dict[Session, Connection] = {}

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """Shake hands. SecurityUpgradeFailure."""
        assert isinstance(raw_conn, RawConnection), "no other transport was given to the swarm"
        try:
            secured = await self._steps.secure(raw_conn.socket, raw_conn.expected, is_initiator)
        except DecentralError as error:
            raise SecurityUpgradeFailure(str(error)) from error
        return SecureConnection(raw_conn, secured, self._key)

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Run streams over it. MuxerUpgradeFailure."""
        assert isinstance(conn, SecureConnection), "made above"
        try:
            session = await self._steps.multiplex(conn.secured, conn.raw.socket, conn.is_initiator)
        except DecentralError as error:
            raise MuxerUpgradeFailure(str(error)) from error
        made = self._connections[session] = Connection(session, conn.raw.ends)
        return made

    def forget(self, connection: Connection) -> None:
        """Forget a connection that is over."""
        self._connections.pop(connection.session, None)

    def hand_on(self, session: Session, muxed: MuxedStream) -> None:
        """Have the connection of a session serve a stream of the other side."""
        connection = self._connections.get(session)
        if connection is None:
            muxed.reset()  # it is over already
        else:
            connection.queue(muxed)


def _ours(error: SwarmException) -> DecentralError:
    """Return what went wrong, in our words where it was ours: below the swarm is our own handshake."""
    cause = error.__cause__.__cause__ if error.__cause__ is not None else None
    if isinstance(cause, PayloadError | PeerUnreachable | DecentralError):
        return cause
    return PeerUnreachable(f"{error}; try again")


# ---- the host ----
#
# It finds out which protocol a stream is for, and has its own identify and ping. No stream can end it: as shipped an
# exception in any handler ends the host, and so may what a stranger says while a protocol is negotiated. Here the
# negotiation is this package's, bounded, and every handler is guarded. Its identify-push is not served, which would let
# anybody write into the store of peers, and it asks nobody to identify themselves.

Take = Callable[[NativeStream, Session], bool]  # takes over a stream of a connection, and says whether it did


class GuardedHost(BasicHost):
    """A host on ``swarm``. ``addresses``: where it can be dialled; ``comes_first``: whether a peer is a member."""

    def __init__(
        self,
        swarm: GuardedSwarm,
        addresses: Callable[[], tuple[str, ...]],
        comes_first: Callable[[PeerId], bool],
        timeout: float,
    ) -> None:
        self._addresses, self._timeout = addresses, timeout
        super().__init__(swarm, disable_identify_address_discovery=True)
        swarm.notifees.clear()  # the one that has it ask everybody who they are
        self.multiselect.remove_handler(ID_PUSH)
        self.multiselect.add_handler(PING, handle_ping)  # in place of the one that keeps a row for each peer
        self._negotiations = Negotiations(comes_first, timeout)
        self._budget = Budget()  # of what the host itself answers

    @property
    def num_negotiating(self) -> int:
        """Inbound streams whose protocol is not known yet."""
        return len(self._negotiations)

    def get_addrs(self) -> list[Multiaddr]:
        """Return where this peer can be dialled."""
        return [Multiaddr(multiaddr_to_bytes(address)) for address in self._addresses()]

    def serve(self, protocol: str, take: Take) -> None:
        """Have ``take`` get the streams of ``protocol``."""

        async def hand_over(stream: INetStream) -> None:
            ours = _muxed_stream(stream)
            ours.handed_on = take(_as_native(ours), _session(ours))

        self.multiselect.add_handler(TProtocol(protocol), hand_over)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        ours = _muxed_stream(net_stream)
        try:
            await self._attend(net_stream, _as_native(ours))
        except (DecentralError, TimeoutError, trio.TooSlowError) as error:
            logger.debug("inbound stream of %s refused: %s", peer_name(_session(ours).peer), error)
        except Exception:
            logger.exception("a handler of py-libp2p failed on a stream of %s", peer_name(_session(ours).peer))
        finally:
            if not ours.handed_on:
                ours.muxed.close()

    async def _attend(self, net_stream: INetStream, native: NativeStream) -> None:
        if not self._negotiations.begin(native.peer):
            native.reset()
            return
        known = {str(name) for name in self.multiselect.get_protocols()}
        protocol = TProtocol(await self._negotiations.protocol_of(native, native.peer, known))
        handler = self.multiselect.handlers[protocol]
        assert handler is not None, "each protocol is registered with one"
        net_stream.set_protocol(protocol)
        with self._budget.inbound(native.peer):
            await handler(net_stream)


def _muxed_stream(stream: INetStream) -> MuxedLibp2pStream:
    inner = getattr(stream, "muxed_stream", None)
    assert isinstance(inner, MuxedLibp2pStream), "made by our connection"
    return inner


def _session(stream: MuxedLibp2pStream) -> Session:
    assert isinstance(stream.muxed_conn, Connection), "made by it"
    return stream.muxed_conn.session


def _as_native(stream: MuxedLibp2pStream) -> NativeStream:
    return NativeStream(_session(stream).peer, stream.muxed)
