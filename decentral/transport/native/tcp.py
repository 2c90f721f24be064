"""TCP sockets behind multiaddrs: those that listen, and those that leave from the same port."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
from anyio.abc import SocketAttribute, SocketListener, SocketStream

from decentral.errors import ListenError, UsageError
from decentral.transport.base import ABSENT
from decentral.transport.interfaces import cards

# ---- sockets that listen, and addresses ----

_LISTEN = re.compile(r"/(?:ip4|ip6)/([^/]+)/tcp/(\d+)")
_DIAL = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/p2p/[^/]+)?")
_BACKLOG = 128

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[str, int]  # host, port


def check_tcp(listen: Sequence[str]) -> None:
    """UsageError for an address of another protocol."""
    for address in listen:
        if "/udp/" in address:
            raise UsageError(f"listen address {address!r}: TCP only; give /ip4/HOST/tcp/PORT")


async def listeners(listen: Sequence[str]) -> list[SocketListener]:
    """A socket for each address, found well-formed and free before."""
    opened: list[SocketListener] = []
    try:
        for address in listen:
            opened += await _listener(address)
    except BaseException:
        with anyio.CancelScope(shield=True):
            for socket_ in opened:
                await socket_.aclose()
        raise
    if not opened:
        raise ListenError(f"cannot listen on any of {', '.join(listen)}; give another address")
    return opened


async def _listener(address: str) -> list[SocketListener]:
    match = _LISTEN.fullmatch(address)
    assert match is not None, "checked before"
    host = ipaddress.ip_address(match[1])
    # The resolver is not asked, which denies 127.0.0.1 where there is IPv6 only.
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6
    try:
        server = socket.create_server((str(host), int(match[2])), family=family, backlog=_BACKLOG)
    except OSError as error:
        if host.is_unspecified and error.errno in ABSENT:
            return []  # "all interfaces" of a family this machine does not have
        raise ListenError(f"cannot listen on {address}: {error}; give another address or port 0") from None
    return [await SocketListener.from_socket(server)]


def bound_addresses(sockets: Iterable[SocketListener]) -> tuple[str, ...]:
    """Where the sockets can be dialled; one on all interfaces has an address on each."""
    found = []
    for listener in sockets:
        host = str(listener.extra(SocketAttribute.local_address)[0])
        port = listener.extra(SocketAttribute.local_port)
        for address in _interfaces(ipaddress.ip_address(host)):
            found.append(f"/ip{address.version}/{address}/tcp/{port}")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SocketEnds:
    """Where a connection leads, and the port that it leaves from."""

    remote: str
    local_port: int = 0
    host: str | None = None  # at the other end; None: there is a relay in between, or it is gone already


def ends_of(socket: object) -> SocketEnds:
    """The ends of a TCP connection; what is none is a stream through a relay."""
    if not isinstance(socket, SocketStream):
        return SocketEnds("/p2p-circuit")
    try:
        host = str(socket.extra(SocketAttribute.remote_address)[0])
        port, local_port = socket.extra(SocketAttribute.remote_port), socket.extra(SocketAttribute.local_port)
    except (OSError, anyio.TypedAttributeLookupError):
        return SocketEnds("/p2p-circuit")
    address = ipaddress.ip_address(host.partition("%")[0])
    return SocketEnds(f"/ip{address.version}/{address}/tcp/{port}", local_port, str(address))


def far_end(socket: object) -> End:
    """Host and port at the other end of a TCP connection; nothing and 0 when there is none any more."""
    return endpoint(ends_of(socket).remote) or ("", 0)


def _interfaces(host: Address) -> list[Address]:
    if not host.is_unspecified:
        return [host]
    addresses = (ipaddress.ip_address(one) for hosts in cards().values() for one in hosts)
    return [address for address in addresses if address.version == host.version]


def endpoint(address: str) -> End | None:
    """Host and port of an address that TCP can dial, else None."""
    match = _DIAL.fullmatch(address)
    if match is None or not 0 < int(match[3]) < 65536:
        return None
    return match[2], int(match[3])


# ---- leaving from the port listened on ----
#
# A NAT that keeps one mapping for a port then shows others where this peer can be reached, and keeps that open. Where a
# port cannot be shared (Windows has no SO_REUSEPORT), or such a connection exists already, another port is taken.
#
# Source: Ford, Srisuresh, Kegel, "Peer-to-Peer Communication Across Network Address Translators", 2005, section 4.1.

_SHARED: int | None = getattr(socket, "SO_REUSEPORT", None)
# The connection exists already, or did until a minute ago (TIME_WAIT); or the port was not shared after all.
TAKEN = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EINVAL})


class Ports:
    """The ports that are listened on, to leave from."""

    def __init__(self) -> None:
        self._own: list[tuple[Address, int]] = []

    def share(self, listeners: Iterable[SocketListener]) -> None:
        """Leave from these from now on.

        The option is set when they listen: set before, another process of this user could listen there unnoticed.
        """
        if _SHARED is None:
            return
        for listener in listeners:
            listener.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, _SHARED, 1)
            host = str(listener.extra(SocketAttribute.local_address)[0]).partition("%")[0]
            self._own.append((ipaddress.ip_address(host), listener.extra(SocketAttribute.local_port)))

    def own_end(self, host: str) -> End | None:
        """The end that a connection to ``host`` would leave from; None for a name, or when there is none."""
        try:
            target = ipaddress.ip_address(host)
        except ValueError:
            return None
        for own, port in self._own:
            if own.version == target.version and (own.is_unspecified or own.is_loopback == target.is_loopback):
                return str(own), port
        return None

    async def dial(self, host: str, port: int) -> SocketStream:
        """Connect, from an own port where that is possible. OSError."""
        target = host if self._own == [] else await _numeric(host, port)
        if self.own_end(target) is not None:
            try:
                return await self.leave(target, port)
            except OSError as error:
                if target == host and error.errno not in TAKEN:
                    raise
        return await anyio.connect_tcp(host, port)

    async def leave(self, host: str, port: int) -> SocketStream:
        """Connect from an own port or not at all. OSError, with one of ``TAKEN`` when the connection exists already."""
        own = self.own_end(host)
        if own is None:
            raise OSError(errno.EADDRNOTAVAIL, f"no port to leave from to {host}")
        made = _bound(own)
        try:
            await _connect(made, (host, port))
            return await SocketStream.from_socket(made)
        except BaseException:
            made.close()
            raise


def _bound(own: End) -> socket.socket:
    assert _SHARED is not None, "no port was shared without it"
    family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, _SHARED, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(own)
    except BaseException:
        made.close()
        raise
    return made


async def _connect(made: socket.socket, end: End) -> None:
    code = made.connect_ex(end)
    if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
        await anyio.wait_writable(made)
        code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


async def _numeric(host: str, port: int) -> str:
    """The first address of a name, IPv4 before IPv6: that is where the NATs are. An address stays as it is."""
    try:
        ipaddress.ip_address(host)
        return host
    except ValueError:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
