"""py-libp2p's table of connections, without what strangers could turn against it.

What is left out: the limiter of inbound connections, whose places are held until shutdown, so that nobody gets in
after 250; the auto-dialler, the pruner and the tags, which dial on their own and keep a row for each peer ever met; and
the service manager, which ends the host when any task of it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio
from libp2p.abc import IMuxedConn, INetConn
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.swarm import Swarm
from libp2p.peer.peerstore import PeerStore

from decentral.transport.pylibp2p.connection import Connection
from decentral.transport.pylibp2p.keys import key_pair, peer_id
from decentral.transport.pylibp2p.upgrader import Upgrader
from decentral.wire.keys import Signer

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
        """None of it: see the top of the file."""

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
