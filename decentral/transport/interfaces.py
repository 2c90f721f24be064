"""A machine's network cards: the addresses of one by its name, and the name by an address."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence

import psutil

from decentral.errors import UsageError

_VERSIONS = {socket.AF_INET: 4, socket.AF_INET6: 6}

Cards = Mapping[str, Sequence[str]]  # addresses by the card's name


def cards() -> Cards:
    """Return this machine's cards; of IPv6 no link-local addresses, as a multiaddr has no place for their scope."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        hosts = [entry.address for entry in entries if entry.family in _VERSIONS and "%" not in entry.address]
        found[name] = [host for host in hosts if not ipaddress.ip_address(host).is_link_local]
    return found


def listen_addresses(given: str, known: Cards) -> tuple[str, ...]:
    """Return the addresses that ``eth1`` or ``eth1:4001`` means; a multiaddr means itself. Raises UsageError."""
    if given.startswith("/"):
        return (given,)
    name, colon, port = given.partition(":") if given not in known else (given, "", "")
    if colon and not (port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"--listen {given!r}: {port!r} is no port; write {name}:4001, or /ip4/HOST/tcp/PORT")
    if not known.get(name):
        there = ", ".join(card for card, hosts in known.items() if hosts)
        raise UsageError(f"--listen {given!r}: no network card with an address has that name; there are {there}")
    versions = ((ipaddress.ip_address(host).version, host) for host in known[name])
    return tuple(f"/ip{version}/{host}/tcp/{port or 0}" for version, host in versions)


def card_of(host: str, known: Cards) -> str:
    """Return the name of the card that has this address; empty for none."""
    return next((name for name, hosts in known.items() if host in hosts), "")
