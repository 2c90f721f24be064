"""Connections that leave from the port this peer listens on.

A NAT that keeps one mapping for a port then shows others where this peer can be reached, and keeps that open. Where a
port cannot be shared (Windows has no SO_REUSEPORT), or such a connection exists already, another port is taken.

Source: Ford, Srisuresh, Kegel, "Peer-to-Peer Communication Across Network Address Translators", 2005, section 4.1.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable

import anyio
from anyio.abc import SocketAttribute, SocketListener, SocketStream

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[str, int]  # host, port

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
