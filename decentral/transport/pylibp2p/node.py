"""One peer on py-libp2p, in its trio loop: sockets, swarm, host, and dialling, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio
import trio
from anyio.abc import SocketListener
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.host.ping import ID as PING
from libp2p.host.ping import handle_ping
from libp2p.identity.identify_push.identify_push import ID_PUSH
from multiaddr import Multiaddr

from decentral.errors import DecentralError
from decentral.flow.budget import Budget
from decentral.transport.base import Traffic, check_listen, dialable
from decentral.transport.holepunch import DCUTR, Puncher
from decentral.transport.multiaddr import to_bytes
from decentral.transport.native.dialling import Dialler, Opener
from decentral.transport.native.tcp import Ports, bound_addresses, check_tcp, listeners
from decentral.transport.native.transport import Negotiations
from decentral.transport.protocols.yamux import NativeStream, Session
from decentral.transport.pylibp2p.connection import Connection, MuxedLibp2pStream
from decentral.transport.pylibp2p.swarm import Doors, GuardedSwarm, Upgrader, guarded
from decentral.transport.relay.circuit import STOP, RelayedSocket, admit
from decentral.transport.relay.reservations import Places
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.transport")

_PARTING = 1.0  # s for what is queued to leave when the transport is left


@dataclass(frozen=True, slots=True, kw_only=True)
class PyLibp2pOptions:
    """How this peer takes part in the network."""

    announce: tuple[str, ...] = ()  # addresses to tell others instead of those found
    relays: tuple[str, ...] = ()  # through which this peer can be dialled; to dial through others' it needs none
    punch: bool = True  # leave from the port that is listened on, and exchange relayed connections for direct ones
    dial_timeout: float = 10.0  # s, for open, connect and every handshake


@dataclass(frozen=True, slots=True)
class Above:
    """What a node tells, or asks, who uses it; each is called in the node's thread."""

    protocols: Sequence[str]
    take: Callable[[str, NativeStream], bool]  # an inbound stream; whether it was taken over
    comes_first: Callable[[PeerId], bool]  # whether a peer is a member of the run
    traffic: Traffic


class Libp2pNode:
    """Runs while it is entered, in a trio loop."""

    def __init__(self, signer: Signer, listen: Sequence[str], options: PyLibp2pOptions, above: Above) -> None:
        self._signer, self._listen, self._options, self._above = signer, listen, options, above
        self._upgrader = Upgrader(signer, above.comes_first, self._on_relayed)
        self.sessions = self._upgrader.sessions
        self._found: tuple[str, ...] = ()
        self._punching: tuple[Puncher, anyio.abc.TaskGroup] | None = None  # and where it runs
        self._stack: AsyncExitStack | None = None

    async def __aenter__(self) -> Libp2pNode:
        check_tcp(self._listen)
        check_listen(self._listen)
        logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it says an error for each stranger; we have our own
        async with AsyncExitStack() as stack:
            sockets = await listeners(self._listen)
            for socket in sockets:
                stack.push_async_callback(socket.aclose)
            self._found = self._options.announce or bound_addresses(sockets)
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            group = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(group.cancel_scope.cancel)
            self._wire(nursery, group)
            stack.push_async_callback(self._finish)
            keepers = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(keepers.cancel_scope.cancel)
            if self._options.punch:
                self._punch_from(sockets, keepers)
            for socket in sockets:
                group.start_soon(self.doors.listen, socket)
            for relay in self._places.relays:
                keepers.start_soon(self._places.keep, relay)  # no new place while the connections are finished
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._stack is not None, "entered before it is left"
        self._punching = None
        await self._stack.__aexit__(None, None, None)

    # ---- for who uses it ----

    def addresses(self) -> tuple[str, ...]:
        """Where this peer can be dialled; from any thread."""
        return dialable((*self._found, *self._places.addresses()), peer_name(self._signer.peer))

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See Transport."""
        await self._dialler.connect(peer, addresses)

    async def open(self, peer: PeerId, protocol: str) -> NativeStream:
        """See Transport."""
        return await self._opener.open(peer, protocol)

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """See Transport."""
        return self.sessions.paths()

    # ---- put together ----

    def _wire(self, nursery: trio.Nursery, group: anyio.abc.TaskGroup) -> None:
        timeout, sessions = self._options.dial_timeout, self.sessions
        sessions.group = group
        swarm = GuardedSwarm(self._signer, self._upgrader, nursery, timeout)
        self.doors = Doors(swarm, group, timeout)
        self.ports = Ports()
        self._dialler = Dialler(self._signer.peer, timeout, self.ports, sessions, self.doors)
        self._opener = Opener(self._dialler, sessions, self._above.traffic, timeout)
        self._places = Places(sessions, self._dialler, self._options.relays, timeout)
        self.host = GuardedHost(swarm, self.addresses, self._above.comes_first, timeout)
        self.host.serve(STOP, self._brought)
        for protocol in self._above.protocols:
            self.host.serve(protocol, self._taker(protocol))
        self._group = group

    def _taker(self, protocol: str) -> Take:
        return lambda stream, _: self._above.take(protocol, stream)

    def _brought(self, stream: NativeStream, _: Session) -> bool:
        """A relay brings a connection; whether it is looked at."""
        if stream.peer not in self._places.relays:
            return False
        self._group.start_soon(guarded, self._admit, stream)
        return True

    async def _admit(self, stream: NativeStream) -> None:
        taken = False
        try:
            with anyio.fail_after(self._options.dial_timeout):
                peer = await admit(stream)
            taken = True
            self.doors.take_in(RelayedSocket(stream.muxed, stream.peer), peer)
        except (DecentralError, TimeoutError) as error:
            logger.debug("relay %s: %s", peer_name(stream.peer), error)
        finally:
            if not taken:
                stream.reset()

    def _punch_from(self, sockets: Sequence[SocketListener], group: anyio.abc.TaskGroup) -> None:
        """Exchange relayed connections for direct ones that leave from where these listen, while ``group`` lasts."""
        self.ports.share(sockets)
        me, timeout = self._signer.peer, self._options.dial_timeout
        puncher = Puncher(me, self.sessions, self._dialler, self.doors.meetings, timeout)
        self._punching = puncher, group

        def asked(stream: NativeStream, session: Session) -> bool:
            group.start_soon(guarded, _answer, puncher, stream, session)
            return True

        self.host.serve(DCUTR, asked)

    def _on_relayed(self, session: Session, dialled: bool) -> None:
        if self._punching is not None:
            puncher, group = self._punching
            group.start_soon(puncher.upgrade, session, dialled)

    async def _finish(self) -> None:
        self.doors.strangers.dismiss()
        await self.sessions.finish(_PARTING)


async def _answer(puncher: Puncher, stream: NativeStream, session: Session) -> None:
    """The other side wants to punch."""
    try:
        await puncher.attend(stream, session)
    except (DecentralError, TimeoutError) as error:
        logger.debug("no direct connection to %s: %s", peer_name(stream.peer), error)
    finally:
        with anyio.CancelScope(shield=True):
            await stream.aclose()


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
        """Where this peer can be dialled."""
        return [Multiaddr(to_bytes(address)) for address in self._addresses()]

    def serve(self, protocol: str, take: Take) -> None:
        """Have ``take`` get the streams of ``protocol``."""

        async def handed_on(stream: INetStream) -> None:
            ours = _muxed(stream)
            ours.handed_on = take(_as_native(ours), _session(ours))

        self.multiselect.add_handler(TProtocol(protocol), handed_on)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        ours = _muxed(net_stream)
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


def _muxed(stream: INetStream) -> MuxedLibp2pStream:
    inner = getattr(stream, "muxed_stream", None)
    assert isinstance(inner, MuxedLibp2pStream), "made by our connection"
    return inner


def _session(stream: MuxedLibp2pStream) -> Session:
    assert isinstance(stream.muxed_conn, Connection), "made by it"
    return stream.muxed_conn.session


def _as_native(stream: MuxedLibp2pStream) -> NativeStream:
    return NativeStream(_session(stream).peer, stream.muxed)
