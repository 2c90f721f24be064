"""The promise of every transport: streams to a peer id, with back-pressure and three errors. Beside it is what all
transports share: counts of bytes, streams that are kept, the protocols that are served, and addresses.

The laws, the same on every transport and tested on all of them:

- bytes arrive in order and whole, or ``receive_exactly`` raises StreamClosed;
- ``send`` returns once the bytes are on their way, and waits while the other side does not read;
- what was sent before ``aclose`` still arrives; what was in flight when a peer died may not;
- ``open`` and ``connect`` raise PeerUnreachable, never anything else, and never hang;
- ``Stream.peer`` is proven by the transport's handshake, not claimed by the other side;
- a stream a handler returns from is closed; a handler's error ends its stream and nothing else.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self

import anyio

from decentral.errors import ConfigError, DecentralError, ListenError, UsageError
from decentral.flow.budget import Budget, Limits
from decentral.flow.pacing import UplinkMeter
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.transport")


UNREAD = 40.0  # s that what was sent may take to be read: buffers on the way hold about 1 MiB, 32 s at the least rate

OnBytes = Callable[[int], None]  # told how many came


class Stream(Protocol):
    """Bytes both ways between this peer and one other, until either closes."""

    @property
    def peer(self) -> PeerId:
        """The other side, authenticated."""
        ...

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``. StreamClosed when the other side is gone."""
        ...

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``; the caller bounds them. StreamClosed when fewer come before the end.

        ``on_bytes`` is told how many came, whenever some do.
        """
        ...

    async def aclose(self) -> None:
        """Close; what was sent still arrives. Closing twice is no error."""
        ...


Handler = Callable[[Stream], Awaitable[None]]


class DhtHost(Protocol):
    """A process beside this one that hivemind's DHT can use, and that may die and be started again."""

    @property
    def is_private(self) -> bool:
        """Tell whether others cannot dial it, so that it should hold no keys for them."""
        ...

    @property
    def starts(self) -> int:
        """Processes started so far; grows when one died."""
        ...

    async def until_restarted(self, starts: int) -> None:
        """Wait until the process with number ``starts`` is no more and its successor answers."""
        ...

    def attach(self) -> AbstractAsyncContextManager[Any]:  # Any: hivemind.P2P, which has no types
        """hivemind's own client of the process that runs now."""
        ...


class Transport(Protocol):
    """This peer's way to the others; an asynchronous context manager that runs while it is entered."""

    @property
    def peer(self) -> PeerId:
        """This peer."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received so far."""
        ...

    @property
    def budget(self) -> Budget:
        """The share of this process that other peers hold."""
        ...

    @property
    def kept(self) -> KeptStreams:
        """The streams of this peer that are open between two bodies."""
        ...

    @property
    def meter(self) -> UplinkMeter:
        """The meter of this peer's uplink."""
        ...

    @property
    def dht_host(self) -> DhtHost | None:
        """The host for hivemind's DHT, which only one kind of transport has."""
        ...

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of ``protocol`` by ``handler``. Before entering; ConfigError afterwards or twice."""
        ...

    async def open(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream to ``peer``. PeerUnreachable when there is no path or nobody serves the protocol."""
        ...

    @property
    def letters(self) -> Letters | None:
        """The carrier of small bodies, whole, where there is one."""
        ...

    def pushing(self, protocol: str) -> AbstractAsyncContextManager[None]:
        """Hold a place among those who push at once: a cap of our own is not the path's fault, so its wait is not
        timed.
        """
        ...

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial ``peer`` at its addresses, so that ``open`` finds it. PeerUnreachable when none answers."""
        ...

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the other ends of the connections there are now; one through a relay has ``/p2p-circuit`` in it."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs, ending in ``/p2p/<name>``, that others may dial, best first."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Uncapped:
    """A transport without caps: all who push do so at once, and nobody but they themselves measures the uplink."""

    @cached_property
    def meter(self) -> UplinkMeter:
        """The meter of this peer's uplink."""
        return UplinkMeter()

    @property
    def dht_host(self) -> DhtHost | None:
        """The host for hivemind's DHT, where there is one."""
        return None

    @property
    def letters(self) -> Letters | None:
        """The carrier of small bodies, where there is one."""
        return None

    def pushing(self, protocol: str) -> AbstractAsyncContextManager[None]:
        """Hold a place among those who push at once."""
        return nullcontext()


class OwnTransport(Uncapped):
    """A transport that wraps no other one: its protocols, counts and budget, and what ends when it is left.

    Entering it fixes the ``services`` and fills ``stack``.
    """

    def __init__(self, peer: PeerId, limits: Limits | None) -> None:
        self.peer = peer
        self.traffic = Traffic()
        self.budget = Budget(limits)
        self.kept = KeptStreams(self.budget.comes_first)
        self.services = Services()
        self.stack: AsyncExitStack | None = None

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of ``protocol`` by ``handler``."""
        self.services.add(protocol, handler)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self.stack is not None, "entered before it is left"
        try:
            await self.kept.close()
        finally:  # who is cancelled takes down the rest all the same
            await self.stack.__aexit__(None, None, None)  # the body's error leaves as it is
        return None


# ---- bytes that crossed ----

_MAX_COUNTED_PEERS = 4096  # identities cost nothing to make, so the table of counts must end somewhere


@dataclass(slots=True)
class Count:
    """Bytes sent and received."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Traffic:
    """Payload bytes that crossed the transport, length prefixes included, encryption and TCP headers not."""

    total: Count = field(default_factory=Count)
    peers: dict[PeerId, Count] = field(default_factory=dict)  # the first 4,096 met; ``total`` has all
    kinds: dict[str, Count] = field(default_factory=dict)  # by protocol, of those that streams are opened for

    def add(self, peer: PeerId, *, sent: int = 0, received: int = 0, kind: str | None = None) -> None:
        """Book bytes exchanged with ``peer``, under a protocol where the transport tells them apart."""
        counts = [self.total, self._of(peer)]
        if kind is not None:
            if kind not in self.kinds:
                self.kinds[kind] = Count()
            counts.append(self.kinds[kind])
        for count in counts:
            count.sent += sent
            count.received += received

    def of(self, peer: PeerId) -> Count:
        """Return a copy of what was exchanged with ``peer``."""
        count = self.peers.get(peer, Count())
        return Count(count.sent, count.received)

    def _of(self, peer: PeerId) -> Count:
        if peer not in self.peers:
            if len(self.peers) >= _MAX_COUNTED_PEERS:
                return Count()
            self.peers[peer] = Count()
        return self.peers[peer]


# ---- streams that are kept ----
#
# They stay open from one body to the next one to the same peer, of the same protocol. Opening one costs both ends, with
# their daemons, two thirds of what a small body costs in all, and a round of small frames opens two to each peer.
# Kept for members of the run alone, few, and not for long: the other side holds as many.

KEPT = 128  # streams in all
KEPT_EACH = 2  # of one protocol to one peer: what is said while an answer is under way
KEPT_FOR = 20.0  # s; less than the other side waits for the next body, so that seldom one is lost in between


class KeptStreams:
    """The open streams of one transport on which nothing is under way. ``keeps``: to whom any are kept."""

    def __init__(self, keeps: Callable[[PeerId], bool]) -> None:
        self.keeps = keeps
        self._idle: dict[Stream, tuple[str, float]] = {}  # their protocols, and since when; longest idle first
        self._over = False

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, peer: PeerId, protocol: str) -> Stream | None:
        """Give out the stream of ``protocol`` to ``peer`` that was used last. It may have ended meanwhile."""
        for stream in reversed(self._idle):
            kind, since = self._idle[stream]
            if stream.peer == peer and kind == protocol and anyio.current_time() < since + KEPT_FOR:
                del self._idle[stream]
                return stream
        return None

    async def put(self, stream: Stream, protocol: str) -> None:
        """Keep a stream on which all was answered, or close it, and close those that were kept for long enough."""
        now = anyio.current_time()
        alike = [other for other, (kind, _) in self._idle.items() if other.peer == stream.peer and kind == protocol]
        surplus = alike[: len(alike) - KEPT_EACH + 1]
        surplus += [other for other, (_, since) in self._idle.items() if now >= since + KEPT_FOR]
        if self._over or not self.keeps(stream.peer):
            surplus.append(stream)
        else:
            self._idle[stream] = protocol, now
            surplus += list(self._idle)[: max(0, len(self._idle) - KEPT)]
        await self._close(surplus)

    async def close(self) -> None:
        """Close all, and keep none from now on."""
        self._over = True
        await self._close(list(self._idle))

    async def _close(self, streams: list[Stream]) -> None:
        async with AsyncExitStack() as every:  # each of them, also by who is cancelled meanwhile
            for stream in dict.fromkeys(streams):
                self._idle.pop(stream, None)
                every.push_async_callback(stream.aclose)


# ---- protocols that are served ----


async def attend(stream: Stream, protocol: str, handler: Handler) -> None:
    """Run a handler on an inbound stream and close it; breaking a rule costs the peer this stream only."""
    try:
        await handler(stream)
    except DecentralError as error:
        logger.debug("%s from %s: %s", protocol, peer_name(stream.peer), error)
    except Exception:
        # A peer may have found a bug of ours. Say so with the traceback; the other peers' streams go on.
        logger.exception("handler of %s failed on a stream from %s", protocol, peer_name(stream.peer))
    finally:
        await stream.aclose()


class Services:
    """The protocols a transport answers, fixed once it has started."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.fixed = False

    def add(self, protocol: str, handler: Handler) -> None:
        """Answer ``protocol`` by ``handler``; ConfigError when it is taken or the transport has started."""
        if self.fixed or protocol in self.handlers:
            rule = "its transport has started" if self.fixed else "it is served already"
            raise ConfigError(f"serve({protocol!r}): {rule}; serve each protocol once, before entering")
        self.handlers[protocol] = handler


# ---- letters, where no stream is needed ----
#
# One body out and at most one back, carried whole: a transport may offer them where no bytes have to be moved. Requests
# are made of streams everywhere else (`decentral.transport.requests`). A network in memory has hundreds of peers that
# say small things to all others; it puts each on the line, and gives it to the handler when it would be there, without
# a stream.

Respond = Callable[[PeerId, bytes], Awaitable[bytes]]
Watch = Callable[[PeerId], AbstractContextManager[OnBytes]]


class Letter(Protocol):
    """A body that was sent."""

    async def answer(self, limit: int) -> bytes:
        """Return what comes back. StreamClosed when nothing will, PayloadError when it is longer than ``limit``."""
        ...

    async def close(self) -> None:
        """Wait for no answer any more."""
        ...


class Letters(Protocol):
    """The letters of one peer."""

    def carry(self, protocol: str, nbytes: int) -> bool:
        """Tell whether a body of ``nbytes`` of that protocol goes as one, rather than on a stream."""
        ...

    def serve(self, protocol: str, respond: Respond, limit: int, watch: Watch | None) -> None:
        """Answer each body of at most ``limit`` bytes with what ``respond`` returns, as ``serve_requests`` does."""
        ...

    async def post(self, peer: PeerId, protocol: str, body: bytes) -> Letter:
        """Send a body. PeerUnreachable when there is no path or nobody serves the protocol."""
        ...


# ---- addresses of other peers ----
#
# Kept as they or others said them, for when a connection to them is gone. Whoever is dialled gets in, so the number of
# peers is bounded; who was dialled longest ago is forgotten first.

_REMEMBERED = 1024  # peers


class AddressBook:
    """The addresses of the peers that were remembered last."""

    def __init__(self) -> None:
        self._known: dict[PeerId, tuple[str, ...]] = {}

    def remember(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Note that ``peer`` is there now, whatever was known before."""
        self._known.pop(peer, None)
        if len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[peer] = tuple(addresses)

    def find(self, peer: PeerId) -> tuple[str, ...] | None:
        """Return where ``peer`` was last; None when it is not known, and empty when that was nowhere."""
        return self._known.get(peer)

    def entries(self) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Return everybody who is known, as of now."""
        return list(self._known.items())


# ---- addresses of this peer ----
#
# On which to listen on, whether it is free, and at which addresses others may dial it.

MAX_ADDRESSES = 16  # per peer, as in a lease
_LISTEN = re.compile(r"/(ip4|ip6)/([0-9a-fA-F:.]+)/tcp/(\d{1,5})")
ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def everywhere(port: int = 0) -> tuple[str, ...]:
    """Return the addresses of all interfaces, TCP over IPv4 and IPv6; port 0 lets the system choose."""
    return (f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}")


def check_listen(addresses: Sequence[str]) -> None:
    """Raise UsageError for what is no listen address, ListenError for one that is taken or not this machine's.

    The daemon itself is silent when one of several addresses is taken, and shares a port with another daemon of
    the same user (SO_REUSEPORT); half of the dials would then go to the other one.
    """
    if not addresses:
        raise UsageError("listen=(): name at least one address, such as /ip4/0.0.0.0/tcp/0")
    for address in addresses:
        _check_free(address, *_host_and_port(address))


def pin_ports(listen: Sequence[str], bound: Iterable[str]) -> tuple[str, ...]:
    """Return ``listen`` with each port 0 replaced by the one the daemon got, so that a restart is found again."""
    got = list(bound)
    return tuple(_pin(address, got) for address in listen)


def dialable(addresses: Iterable[str], name: str) -> tuple[str, ...]:
    """Return the addresses that others may dial, with ``/p2p/name``: public first, relayed last, loopback if nothing
    else.
    """
    ranked = sorted((_rank(address), n, address) for n, address in enumerate(addresses))
    useful = [(rank, address) for rank, _, address in ranked if rank < _USELESS]
    beyond = [address for rank, address in useful if rank != _LOOPBACK]
    chosen = dict.fromkeys(beyond or (address for _, address in useful))
    return tuple(f"{address}/p2p/{name}" for address in list(chosen)[:MAX_ADDRESSES])


def is_public(address: str) -> bool:
    """Tell whether anybody can dial an address that names a host: a name was announced on purpose."""
    return _rank(address) == _PUBLIC


_PUBLIC, _PRIVATE, _RELAYED, _LOOPBACK, _USELESS = range(5)


def _rank(address: str) -> int:
    if "/p2p-circuit" in address:
        return _RELAYED
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return _PUBLIC  # a name: somebody announced it on purpose
    host = ipaddress.ip_address(parts[2])
    if host.is_unspecified or host.is_link_local or host.is_multicast:
        return _USELESS
    if host.is_loopback:
        return _LOOPBACK
    return _PUBLIC if host.is_global else _PRIVATE


def _host_and_port(address: str) -> tuple[str, int]:
    if address.endswith("/quic-v1"):
        raise UsageError(
            f"listen address {address!r}: TCP only; the daemon loses the ends of streams over QUIC and stands still "
            "after some 400 of them (docs/transports.md): give /ip4/HOST/tcp/PORT"
        )
    match = _LISTEN.fullmatch(address)
    try:
        if match is None:
            raise ValueError(address)
        host = ipaddress.ip_address(match[2])
        port = int(match[3])
        if host.version != int(match[1][2]) or port > 65535:
            raise ValueError(address)
    except ValueError:
        raise UsageError(f"listen address {address!r}: want /ip4/HOST/tcp/PORT or /ip6/HOST/tcp/PORT") from None
    return match[2], port


def _check_free(address: str, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections are no obstacle
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        if ipaddress.ip_address(host).is_unspecified and error.errno in ABSENT:
            return  # "all interfaces" of a family this machine does not have
        is_elsewhere = error.errno in ABSENT
        busy = "end what holds it, or give another address or port 0"
        way_out = "give an address that this machine has" if is_elsewhere else busy
        raise ListenError(f"cannot listen on {address}: {error.strerror}; {way_out}") from None


def _pin(address: str, bound: list[str]) -> str:
    host, port = _host_and_port(address)
    if port != 0:
        return address
    family = "ip6" if ":" in host else "ip4"
    anywhere = ipaddress.ip_address(host).is_unspecified
    pattern = re.compile(rf"/{family}/{'[^/]+' if anywhere else re.escape(host)}/tcp/(\d+)")
    ports = {match[1] for match in map(pattern.fullmatch, bound) if match}
    return address.replace("/tcp/0", f"/tcp/{ports.pop()}", 1) if len(ports) == 1 else address
