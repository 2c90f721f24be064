"""A network inside one event loop: the daemon transport's laws, with delay, rate, cuts and deaths at will.

Nothing crosses a wire. On anyio only, so it runs under trio's MockClock (virtual time) as well as asyncio.
The order of events depends on nothing but the calls made, and a seeded ``jitter`` keeps it so.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
import anyio.lowlevel

from decentral.errors import PeerUnreachable, TransportError
from decentral.flow.upload import Budget, Limits
from decentral.transport.base import Handler, Services, Traffic, Uncapped, attend
from decentral.transport.letters import Letters
from decentral.transport.memory.letters import MemoryLetter, MemoryLetters, refuse
from decentral.transport.memory.lines import MemoryLines
from decentral.transport.memory.pipe import AS_THEY_ARE, Link, Pipe, Weight
from decentral.transport.memory.stream import MemoryStream
from decentral.wire.keys import PeerId, Signer, peer_name


class MemoryNetwork:
    """Where memory transports meet.

    ``latency`` is one way in seconds, ``bandwidth`` each peer's uplink and ``downlink`` its downlink in bytes per
    second (None: no limit), ``jitter`` the largest extra delay of a piece in seconds, drawn from ``generator``.
    ``weights`` says how many bytes those of a protocol take the time of: small tensors that stand for large ones.
    With ``letters`` what fits into one piece goes without a stream, but for protocols whose answers are ``long``.
    """

    def __init__(
        self,
        *,
        latency: float = 0.0,
        bandwidth: float | None = None,
        downlink: float | None = None,
        jitter: float = 0.0,
        generator: random.Random | None = None,
        weights: Mapping[str, Weight] | None = None,
        letters: bool = False,
        long: Collection[str] = (),
    ) -> None:
        self.lines = MemoryLines(
            latency=latency,
            bandwidth=bandwidth,
            downlink=downlink,
            jitter=jitter,
            generator=generator or random.Random(0),
        )
        self.weights: Mapping[str, Weight] = weights or {}
        self.letters = letters
        self.long: Collection[str] = frozenset(long)
        self._posted: dict[frozenset[PeerId], dict[MemoryLetter, None]] = {}
        self._up: dict[PeerId, MemoryTransport] = {}
        self._cut: set[frozenset[PeerId]] = set()
        self._pipes: dict[frozenset[PeerId], list[Pipe]] = {}

    def transport(self, signer: Signer, *, limits: Limits | None = None) -> MemoryTransport:
        """A transport for the peer of ``signer``; enter it to be reachable. After ``kill``, make another."""
        return MemoryTransport(self, signer.peer, limits)

    def set_link(self, sender: PeerId, receiver: PeerId, *, latency: float, bandwidth: float | None = None) -> None:
        """Give one direction between two peers its own latency (s) and rate (bytes/s)."""
        self.lines.connect(sender, receiver, Link(latency=latency, bandwidth=bandwidth))

    def set_uplink(self, peer: PeerId, bandwidth: float | None) -> None:
        """Change what ``peer`` can send, in bytes per second over all its streams."""
        self.lines.uplink(peer).bandwidth = bandwidth

    def set_downlink(self, peer: PeerId, bandwidth: float | None) -> None:
        """Change what ``peer`` can receive, in bytes per second over all its streams, links of their own included."""
        self.lines.downlink(peer).bandwidth = bandwidth

    def kill(self, peer: PeerId) -> None:
        """End a peer as SIGKILL would: its handlers stop, its streams break, bytes in flight are lost.

        Other tasks of that peer are the caller's to cancel; whatever they try on the network fails.
        """
        transport = self._up.pop(peer, None)
        for pair in [pair for pair in (*self._pipes, *self._posted) if peer in pair]:
            self._break(pair)
        if transport is not None:
            transport.stop()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Break every stream between two peers and let no new one come about, until ``heal``."""
        self._cut.add(frozenset((a, b)))
        self._break(frozenset((a, b)))

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo ``cut``."""
        self._cut.discard(frozenset((a, b)))

    def attach(self, transport: MemoryTransport) -> None:
        """Make a transport reachable; TransportError when its identity is on the network already."""
        if transport.peer in self._up:
            name = peer_name(transport.peer)
            raise TransportError(f"{name}: this identity is running already; give every peer its own key")
        self._up[transport.peer] = transport

    def detach(self, transport: MemoryTransport) -> None:
        """Take a transport off the network in good order."""
        if self._up.get(transport.peer) is transport:
            self.kill(transport.peer)

    def reach(self, sender: PeerId, receiver: PeerId) -> MemoryTransport:
        """The receiver's transport, if there is a path to it now."""
        transport = self._up.get(receiver)
        if transport is None or sender not in self._up or sender == receiver:
            raise PeerUnreachable(f"{peer_name(receiver)}: no such peer is up; try again or ask another")
        if frozenset((sender, receiver)) in self._cut:
            raise PeerUnreachable(f"{peer_name(receiver)}: the link to it is cut; try again or ask another")
        return transport

    def pipes(self, a: PeerId, b: PeerId, weight: Weight = AS_THEY_ARE) -> tuple[Pipe, Pipe]:
        """A fresh pipe each way between two peers."""
        there, back = self.lines.pipe(a, b, weight), self.lines.pipe(b, a, weight)
        both = self._pipes.setdefault(frozenset((a, b)), [])
        both[:] = [pipe for pipe in both if not pipe.over]
        both += (there, back)
        return there, back

    def posted(self, letter: MemoryLetter) -> None:
        """It is on its way."""
        self._posted.setdefault(frozenset((letter.sender, letter.receiver)), {})[letter] = None

    def done(self, letter: MemoryLetter) -> None:
        """It is there, or lost."""
        pair = frozenset((letter.sender, letter.receiver))
        under_way = self._posted.get(pair, {})
        under_way.pop(letter, None)
        if not under_way:
            self._posted.pop(pair, None)

    def carries(self, letter: MemoryLetter) -> bool:
        """Whether the way of a letter was not broken since it was posted."""
        return letter in self._posted.get(frozenset((letter.sender, letter.receiver)), {})

    def received(self, letter: MemoryLetter, nbytes: int) -> None:
        """Book the answer to a letter, which came."""
        if letter.sender in self._up:
            self._up[letter.sender].traffic.add(letter.receiver, received=nbytes, kind=letter.protocol)

    def _break(self, pair: frozenset[PeerId]) -> None:
        for pipe in self._pipes.pop(pair, []):
            pipe.sever()
        for letter in self._posted.pop(pair, {}):
            letter.end()


class MemoryTransport(Uncapped):
    """One peer on a MemoryNetwork. See Transport."""

    def __init__(self, network: MemoryNetwork, peer: PeerId, limits: Limits | None = None) -> None:
        self.peer = peer
        self.traffic = Traffic()
        self.budget = Budget(limits)
        self.network = network
        self.services = Services()
        self._group: anyio.abc.TaskGroup | None = None
        self._scopes: dict[anyio.CancelScope, None] = {}  # in order of arrival: a set would not replay
        self._letters = MemoryLetters(self, network)

    def serve(self, protocol: str, handler: Handler) -> None:
        """See Transport."""
        self.services.add(protocol, handler)

    async def __aenter__(self) -> Self:
        self.network.attach(self)
        self.services.fixed = True
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None, "entered before it is left"
        self.network.detach(self)
        self.stop()
        await self._group.__aexit__(None, None, None)  # its handlers only: the body's error leaves as it is
        return None

    def stop(self) -> None:
        """End the handlers, and nothing else of whoever entered this transport."""
        for scope in tuple(self._scopes):
            scope.cancel()

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """See Transport; there are no connections here."""
        return {}

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        name = peer_name(self.peer)
        return (f"/memory/{name}/p2p/{name}",)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See Transport."""
        await anyio.lowlevel.checkpoint()
        name = peer_name(peer)
        if f"/memory/{name}/p2p/{name}" not in addresses:
            raise PeerUnreachable(f"{name}: none of its {len(addresses)} addresses is a /memory one; ask for others")
        self.network.reach(self.peer, peer)

    async def open(self, peer: PeerId, protocol: str) -> MemoryStream:
        """See Transport."""
        await anyio.sleep(2 * self.network.lines.link(self.peer, peer).latency)  # the other side confirms the protocol
        other = self.network.reach(self.peer, peer)
        weight = self.network.weights.get(protocol, AS_THEY_ARE)
        there, back = self.network.pipes(self.peer, peer, weight)
        kind = protocol if self.network.letters else None
        other.accept(MemoryStream(self.peer, back, there, other.traffic, weight, kind), protocol)
        return MemoryStream(peer, there, back, self.traffic, weight, kind)

    def accept(self, stream: MemoryStream, protocol: str) -> None:
        """Start the handler of an inbound stream; PeerUnreachable when there is none."""
        handler = self.services.handlers.get(protocol)
        if handler is None or self._group is None:
            raise PeerUnreachable(f"{peer_name(self.peer)}: it does not serve {protocol}; compare the versions")
        scope = anyio.CancelScope()  # made here: who is killed before the handler's first step must not start it
        self._scopes[scope] = None
        self._group.start_soon(self._attend, scope, stream, protocol, handler)

    @property
    def letters(self) -> Letters | None:
        """See Transport."""
        return self.own_letters

    @property
    def own_letters(self) -> MemoryLetters | None:
        """Those of this transport, where the network carries any."""
        return self._letters if self.network.letters else None

    def letters_of(self, protocol: str) -> MemoryLetters:
        """Where letters of a protocol come in; PeerUnreachable when it is not served."""
        if self._group is None or not self._letters.answers(protocol):
            raise refuse(self.peer, protocol)
        return self._letters

    def begin(self, deliver: Callable[..., Awaitable[None]], *args: object) -> None:
        """Do something that ends with the handlers."""
        assert self._group is not None, "it was reached"
        scope = anyio.CancelScope()
        self._scopes[scope] = None
        self._group.start_soon(self._within, scope, deliver, *args)

    async def _within(self, scope: anyio.CancelScope, deliver: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            with scope:
                await deliver(*args)
        finally:
            del self._scopes[scope]

    async def _attend(self, scope: anyio.CancelScope, stream: MemoryStream, protocol: str, handler: Handler) -> None:
        try:
            with scope, self.budget.inbound(stream.peer):
                await attend(stream, protocol, handler)
        except TransportError:
            await stream.aclose()  # over its budget: it sees StreamClosed
        finally:
            del self._scopes[scope]
