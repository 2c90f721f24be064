"""py-libp2p's host: which protocol a stream is for, and its own identify and ping. No stream can end it.

As shipped an exception in any handler ends the host, and so may what a stranger says while a protocol is negotiated.
Here the negotiation is this package's, bounded, and every handler is guarded. Its identify-push is not served, which
would let anybody write into the store of peers, and it asks nobody to identify themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.ping import ID as PING
from libp2p.host.ping import handle_ping
from libp2p.identity.identify_push.identify_push import ID_PUSH
from multiaddr import Multiaddr

from decentral.errors import DecentralError
from decentral.flow.upload import Budget
from decentral.transport.multiaddr import to_bytes
from decentral.transport.native.stream import NativeStream
from decentral.transport.native.transport import Negotiations
from decentral.transport.protocols.yamux import Session
from decentral.transport.pylibp2p.connection import Connection, MuxedLibp2pStream
from decentral.transport.pylibp2p.swarm import GuardedSwarm
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.transport")

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
        """Where this peer can be dialled."""
        return [Multiaddr(to_bytes(address)) for address in self._addresses()]

    def serve(self, protocol: str, take: Take) -> None:
        """Have ``take`` get the streams of ``protocol``."""

        async def handed_on(stream: INetStream) -> None:
            ours = _ours(stream)
            ours.handed_on = take(_as_native(ours), _session(ours))

        self.multiselect.add_handler(TProtocol(protocol), handed_on)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        ours = _ours(net_stream)
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


def _ours(stream: INetStream) -> MuxedLibp2pStream:
    inner = getattr(stream, "muxed_stream", None)
    assert isinstance(inner, MuxedLibp2pStream), "made by our connection"
    return inner


def _session(stream: MuxedLibp2pStream) -> Session:
    assert isinstance(stream.muxed_conn, Connection), "made by it"
    return stream.muxed_conn.session


def _as_native(stream: MuxedLibp2pStream) -> NativeStream:
    return NativeStream(_session(stream).peer, stream.muxed)
