"""TCP sockets behind multiaddrs: what is listened on, where that can be dialled, and the first address that answers."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
import psutil
from anyio.abc import SocketAttribute, SocketListener, SocketStream

from decentral.errors import ListenError, UsageError
from decentral.transport.listen import ABSENT

_LISTEN = re.compile(r"/(?:ip4|ip6)/([^/]+)/tcp/(\d+)")
_DIAL = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})(?:/p2p/[^/]+)?")
_BACKLOG = 128


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


def far_end(socket: object) -> tuple[str, int]:
    """Host and port at the other end of a TCP connection; nothing and 0 when there is none any more."""
    return endpoint(ends_of(socket).remote) or ("", 0)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _interfaces(host: Address) -> list[Address]:
    if not host.is_unspecified:
        return [host]
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == family]
    return [ipaddress.ip_address(entry.address.partition("%")[0]) for entry in entries]


def endpoint(address: str) -> tuple[str, int] | None:
    """Host and port of an address that TCP can dial, else None."""
    match = _DIAL.fullmatch(address)
    if match is None or not 0 < int(match[3]) < 65536:
        return None
    return match[2], int(match[3])
