"""Announcements on the local network, as libp2p nodes make them by multicast DNS: how they are written and read.

Crosses the wire: a TXT record of strings with a length byte each: ``run=`` and 32 hex digits, then at most 8 of
``dnsaddr=`` and a multiaddr that ends in ``/p2p/<name>``, about 100 bytes each. Bytes of strangers: they say where to
look, the transport's handshake says who is there. Only addresses of private networks are announced or believed, so that
nobody is made to knock at doors elsewhere; and only who knows the run can make the digits for its own id, so that no
stranger is told the run's digest, which is what opens it, by a peer that takes it for one of its own.

Source: libp2p/specs, discovery/mdns.md, and what @libp2p/mdns 12.0 makes of a record: it takes the strings that begin
with ``dnsaddr=`` and passes over all others, so ``run=`` confuses no other node. RFC 6763, 6.1: the strings.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from decentral.errors import PayloadError
from decentral.transport.native.tcp import endpoint
from decentral.wire.keys import Digest, PeerId, peer_from_name

SERVICE = "_p2p._udp.local."
LONGEST = 2048  # bytes of a record; ours have 900 at most
MOST_ADDRESSES = 8
_MOST_STRINGS = 32
_RUN, _ADDRESS = "run=", "dnsaddr="
# Not IPv6's link-local ones: without the name of an interface, for which a multiaddr has no place, none can be dialled.
_PRIVATE = [
    ipaddress.ip_network(net) for net in ("192.168.0.0/16", "10.0.0.0/8", "169.254.0.0/16", "fc00::/7", "172.16.0.0/12")
]  # 172.16/12 last: mostly the bridges of containers, the same on every machine


@dataclass(frozen=True, slots=True)
class Sighting:
    """Somebody said that ``peer`` is at these addresses."""

    peer: PeerId
    addresses: tuple[str, ...]  # at most 8, each of a private network, with a port


def run_tag(run: Digest, peer: PeerId) -> str:
    """Return a mark that only a peer that knows the run can make for itself; it tells nobody else which run that is."""
    return hashlib.blake2b(peer, key=run, digest_size=16, person=b"decentral lan").hexdigest()


def local_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that are dialled directly on a private network, at most 8, the likeliest first."""
    ranked = [(rank, n, address) for n, address in enumerate(addresses) if (rank := _rank(address)) is not None]
    return tuple(address for _, _, address in sorted(ranked))[:MOST_ADDRESSES]


def host_of(address: str) -> str:
    """The host of a local address."""
    return address.split("/")[2]


def write_announcement(run: Digest, peer: PeerId, addresses: Iterable[str]) -> bytes:
    """The record of ``peer`` at these addresses, which end in ``/p2p/<name>``; the local ones are named."""
    words = [_RUN + run_tag(run, peer), *(_ADDRESS + address for address in local_addresses(addresses))]
    return b"".join(bytes([len(word)]) + word.encode("ascii") for word in words)


def read_announcement(text: bytes, run: Digest) -> Sighting | None:
    """Return which peer of ``run`` it says is where; None for what is of another run or program.

    PayloadError for what is wrong.
    """
    if len(text) > LONGEST:
        raise _wrong(f"{len(text)} bytes, at most {LONGEST}")
    words = list(_strings(text))
    if not any(word.startswith(_RUN) for word in words):
        return None
    named = [word.removeprefix(_ADDRESS) for word in words if word.startswith(_ADDRESS)]
    peers = {peer_from_name(address.rpartition("/p2p/")[2]) for address in named}
    if len(peers) != 1:
        raise _wrong(f"{len(peers)} peers where one belongs")
    peer, addresses = peers.pop(), local_addresses(named)
    return Sighting(peer, addresses) if addresses and _RUN + run_tag(run, peer) in words else None


def _strings(text: bytes) -> Iterator[str]:
    at = 0
    for _ in range(_MOST_STRINGS):
        if at == len(text):
            return
        start, at = at + 1, at + 1 + text[at]
        if at > len(text):
            raise _wrong("a string is cut short")
        yield text[start:at].decode("latin-1")  # what is no visible ASCII is no address and no run
    raise _wrong(f"more than {_MOST_STRINGS} strings")


def _rank(address: str) -> int | None:
    """The number of its network; None for what is not of one, not dialled directly, or spelled in another way."""
    where, end = address.partition("/p2p/")[0], endpoint(address)
    try:
        host = ipaddress.ip_address(end[0] if end is not None else "")
    except ValueError:
        return None
    if end is None or "%" in where or where != f"/ip{host.version}/{host}/tcp/{end[1]}":
        return None
    return next((n for n, net in enumerate(_PRIVATE) if host in net), None)


def _wrong(what: str) -> PayloadError:
    return PayloadError(f"announcement on the local network: {what}; it is passed over")
