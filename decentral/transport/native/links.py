"""The connections of one peer on libp2p, put together: the same under the native transport and under py-libp2p.

Sockets become sessions by handshakes, dialled or accepted: ``sessions`` knows what stands, ``handshakes`` let strangers
become sessions, ``dialler`` goes out to peers, and all leave from the ``ports`` that are listened on. ``places`` are
kept at relays, and the ``puncher`` exchanges relayed connections for direct ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import anyio
import anyio.abc
from anyio.abc import SocketListener

from decentral.errors import PayloadError
from decentral.transport.base import Traffic, check_listen, dialable
from decentral.transport.holepunch import Puncher
from decentral.transport.native.dialling import Dialler, Opener, Places
from decentral.transport.native.sessions import Handshakes, SessionEvents, Sessions, Shake, Upgrade
from decentral.transport.native.tcp import Ports, bound_addresses, check_tcp, listeners
from decentral.transport.protocols.circuit import RelayedSocket, RelayLimits, admit
from decentral.transport.protocols.yamux import NativeStream, Session
from decentral.wire.keys import Signer, peer_name

_PARTING = 1.0  # s for what is queued to leave when the transport is left


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """A peer's part in the network."""

    announce: tuple[str, ...] = ()  # addresses to tell others instead of those found
    relays: tuple[str, ...] = ()  # through which this peer can be dialled; to dial through others' it needs none
    punch: bool = True  # leave from the port that is listened on, and exchange relayed connections for direct ones
    dial_timeout: float = 10.0  # s, for open, connect and every handshake


class Links:
    """The connections of one peer. ``listen``, then ``run``; both last until their stack is left.

    ``limits``: those of a relay, which has strangers for guests; None for a peer. ``shake`` makes a session of a
    socket where that is not done by ``Upgrade``.
    """

    def __init__(
        self,
        signer: Signer,
        options: LinkOptions,
        traffic: Traffic,
        events: SessionEvents,
        *,
        limits: RelayLimits | None = None,
        shake: Shake | None = None,
    ) -> None:
        me, timeout = signer.peer, options.dial_timeout
        self.peer, self.options = me, options
        self.bound: tuple[str, ...] = ()  # where its sockets listen, on each card, or what is announced instead
        self.background: anyio.abc.TaskGroup | None = None  # of what ends before the connections do
        self._listeners: list[SocketListener] = []
        self.ports = Ports()
        events = replace(events, on_relayed=self._on_relayed)
        if limits is None:
            self.sessions = Sessions(events)
        else:
            bounds = {"connections": limits.peers, "of_one_network": limits.peers_per_network, "stock": limits.windows}
            self.sessions = Sessions(events, **bounds)
        self.handshakes = Handshakes(shake or Upgrade(signer, self.sessions).shake, self.sessions, timeout)
        self.dialler = Dialler(me, timeout, self.ports, self.sessions, self.handshakes)
        self.opener = Opener(self.dialler, self.sessions, traffic, timeout)
        self.places = Places(self.sessions, self.dialler, options.relays, timeout)
        self._punches = options.punch and limits is None  # a relay is not reached through another one
        self.puncher: Puncher | None = None  # made when this listens: it belongs to one loop

    def addresses(self) -> tuple[str, ...]:
        """Return where this peer can be dialled, best first; from any thread."""
        return dialable((*self.bound, *self.places.addresses()), peer_name(self.peer))

    async def listen(self, where: Sequence[str], stack: AsyncExitStack) -> None:
        """Have sockets at these addresses. ListenError when one is taken, UsageError when one is malformed."""
        check_tcp(where)
        check_listen(where)
        self._listeners = await listeners(where)
        for listener in self._listeners:
            stack.push_async_callback(listener.aclose)
        self.bound = self.options.announce or bound_addresses(self._listeners)
        if self._punches:
            meetings, timeout = self.handshakes.meetings, self.options.dial_timeout
            self.puncher = Puncher(self.peer, self.sessions, self.dialler, meetings, timeout)

    async def run(self, stack: AsyncExitStack) -> None:
        """Accept, dial, keep places and punch holes, in the background."""
        group = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(group.cancel_scope.cancel)
        stack.push_async_callback(self._finish)
        self.background = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(self._leave, self.background)
        if self.puncher is not None:
            self.ports.share(self._listeners)
        self.sessions.group = group
        for listener in self._listeners:
            group.start_soon(self.handshakes.listen, listener, group)
        for relay in self.places.relays:
            self.background.start_soon(self.places.keep, relay)  # no new place while the connections are finished

    async def admit(self, stream: NativeStream) -> None:
        """Shake hands, in the background, over the connection that a relay brings on ``stream``.

        PayloadError when it is no relay of this peer's or brings none, TimeoutError when it says nothing: the stream is
        the caller's then.
        """
        if stream.peer not in self.places.relays:
            raise PayloadError("brings a connection and is no relay of ours; drop the stream")
        with anyio.fail_after(self.options.dial_timeout):
            peer = await admit(stream)
        self.handshakes.take_in(RelayedSocket(stream.muxed, stream.peer), peer)

    def _on_relayed(self, session: Session, dialled: bool) -> None:
        if self.puncher is not None and self.background is not None:
            self.background.start_soon(self.puncher.upgrade, session, dialled)

    def _leave(self, background: anyio.abc.TaskGroup) -> None:
        self.background = None
        background.cancel_scope.cancel()

    async def _finish(self) -> None:
        """Let what is queued leave, then end every session: within 1 s, or 2 s with relayed ones."""
        self.handshakes.strangers.dismiss()
        with anyio.CancelScope(shield=True):
            await self.sessions.finish(_PARTING)
