"""Addresses: what to listen on, whether it is free, and which of a daemon's addresses others may dial."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

from decentral.errors import ListenError, UsageError

MAX_ADDRESSES = 16  # per peer, as in a lease
_LISTEN = re.compile(r"/(ip4|ip6)/([0-9a-fA-F:.]+)/tcp/(\d{1,5})")
ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def everywhere(port: int = 0) -> tuple[str, ...]:
    """All interfaces, TCP over IPv4 and IPv6; port 0 lets the system choose."""
    return (f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}")


def check_listen(addresses: Sequence[str]) -> None:
    """UsageError for what is no listen address, ListenError for one that is taken or not this machine's.

    The daemon itself is silent when one of several addresses is taken, and shares a port with another daemon of
    the same user (SO_REUSEPORT); half of the dials would then go to the other one.
    """
    if not addresses:
        raise UsageError("listen=(): name at least one address, such as /ip4/0.0.0.0/tcp/0")
    for address in addresses:
        _check_free(address, *_parse(address))


def pinned(listen: Sequence[str], bound: Iterable[str]) -> tuple[str, ...]:
    """``listen`` with each port 0 replaced by the one the daemon got, so that a restart is found again."""
    got = list(bound)
    return tuple(_pin(address, got) for address in listen)


def dialable(addresses: Iterable[str], name: str) -> tuple[str, ...]:
    """Those that others may dial, with ``/p2p/name``: public first, relayed last, loopback if nothing else."""
    ranked = sorted((_rank(address), n, address) for n, address in enumerate(addresses))
    useful = [(rank, address) for rank, _, address in ranked if rank < _USELESS]
    beyond = [address for rank, address in useful if rank != _LOOPBACK]
    chosen = dict.fromkeys(beyond or (address for _, address in useful))
    return tuple(f"{address}/p2p/{name}" for address in list(chosen)[:MAX_ADDRESSES])


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


def _parse(address: str) -> tuple[str, int]:
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
        raise ListenError(
            f"cannot listen on {address}: {error.strerror}; end what holds it, or give another address or port 0"
        ) from None


def _pin(address: str, bound: list[str]) -> str:
    host, port = _parse(address)
    if port != 0:
        return address
    family = "ip6" if ":" in host else "ip4"
    anywhere = ipaddress.ip_address(host).is_unspecified
    pattern = re.compile(rf"/{family}/{'[^/]+' if anywhere else re.escape(host)}/tcp/(\d+)")
    ports = {match[1] for match in map(pattern.fullmatch, bound) if match}
    return address.replace("/tcp/0", f"/tcp/{ports.pop()}", 1) if len(ports) == 1 else address
