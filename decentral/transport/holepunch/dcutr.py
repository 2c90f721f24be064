"""What two peers say over a relayed connection before both dial at once. No sockets.

Crosses the wire: CONNECT each way with the addresses that each is seen at from outside, then SYNC; 70 bytes in all.
The time between the first two is the round trip; who sends SYNC dials after half of it, who hears it dials at once.

Source: libp2p/specs, relay/DCUtR.md.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum

from decentral.errors import PayloadError
from decentral.transport.multiaddr import to_bytes, to_text
from decentral.transport.native.ports import End
from decentral.transport.native.tcp import endpoint
from decentral.transport.protocols.multistream import Ends
from decentral.transport.protocols.protobuf import bytes_field, bytes_fields, number_field, number_fields
from decentral.transport.relay.circuit import read_message, write_message

DCUTR = "/libp2p/dcutr"
MOST_ADDRESSES = 4  # of one peer that are dialled; one of each family is what it takes
_READ = 16  # addresses of a message that are looked at


class PunchMessage(IntEnum):
    """What a message says."""

    CONNECT = 100
    SYNC = 300


def packed(kind: PunchMessage, addresses: Iterable[str] = ()) -> bytes:
    """One message."""
    return number_field(1, kind) + b"".join(bytes_field(2, to_bytes(address)) for address in addresses)


def read(message: bytes, due: PunchMessage) -> tuple[str, ...]:
    """The addresses in a message of the kind that is due; what is no address is passed over. PayloadError."""
    kind = number_fields(message).get(1)
    if kind != due:
        raise PayloadError(f"dcutr: a message of type {kind} where {due.name} ({due.value}) is due; drop the stream")
    found = []
    for value in bytes_fields(message).get(2, [])[:_READ]:
        with suppress(PayloadError):  # of a transport that is not spoken here
            found.append(to_text(value))
    return tuple(found)


async def send(ends: Ends, kind: PunchMessage, addresses: Iterable[str] = ()) -> None:
    """Send one message."""
    await write_message(ends, packed(kind, addresses))


async def receive(ends: Ends, due: PunchMessage) -> tuple[str, ...]:
    """The next message, of the kind that is due."""
    return read(await read_message(ends), due)


def plausible(addresses: Iterable[str], relay_host: str | None) -> list[End]:
    """The few of a stranger's addresses that may be dialled: TCP, numeric, and as public as the relay is.

    Otherwise a peer could have us knock inside the network that we are in. Over a relay in a private network or on
    this machine, which is how swarms of one laboratory and tests meet, addresses of the same kind are taken, too.
    """
    found = dict.fromkeys(end for end in map(endpoint, addresses) if end and _may_be_dialled(end[0], relay_host))
    return list(found)[:MOST_ADDRESSES]


def _may_be_dialled(host: str, relay_host: str | None) -> bool:
    reach = _reach(host)
    return reach == "public" or (reach is not None and relay_host is not None and reach == _reach(relay_host))


def _reach(host: str) -> str | None:
    """How far an address reaches; None for a name and for what nobody can be dialled at."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return None  # nobody announces one; what it means depends on the system
        if address.sixtofour is not None:
            return _reach(str(address.sixtofour))
    if address.is_loopback:
        return "loopback"
    if address.is_multicast or address.is_unspecified or address.is_link_local or address.is_reserved:
        return None
    return "public" if address.is_global else "private"
