"""What ``decentral doctor`` says of a peer that can be reached in several ways: which network card is the fast one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio

from decentral.cli.doctor.network import source_of
from decentral.cli.findings import Finding
from decentral.errors import DecentralError
from decentral.transport.base import Cards, card_of, cards
from decentral.transport.native.tcp import endpoint
from decentral.transport.native.transport import NativeTransport
from decentral.transport.probes import Speed, measure_speed
from decentral.wire.keys import Signer, peer_from_name

MOST_WAYS = 4  # of one peer, which answers 64 such questions a day
_WORTH_SAYING = 1.5  # times as fast as the next: less may be chance
_DIAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Way:
    """From one of this machine's cards to one address of a peer."""

    card: str  # empty where the system does not tell
    address: str  # without /p2p/
    speed: Speed


async def speed_to(where: str) -> Speed:
    """Of the path to this one address. Raises DecentralError."""
    peer = peer_from_name(where.rpartition("/p2p/")[2])
    async with NativeTransport(Signer.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as transport:
        with anyio.move_on_after(_DIAL_SECONDS):
            await transport.connect(peer, (where,))
        return await measure_speed(transport, peer)


def ways_to(
    addresses: Sequence[str],
    measure: Callable[[str], Speed] = lambda where: anyio.run(speed_to, where),
    known: Cards | None = None,
) -> list[Way]:
    """One after the other to the addresses of the first peer among them, each over a connection of its own."""
    known = cards() if known is None else known
    direct = [where for where in addresses if endpoint(where.partition("/p2p/")[0]) is not None]
    first = [where for where in direct if where.rpartition("/p2p/")[2] == direct[0].rpartition("/p2p/")[2]]
    found = []
    for where in first[:MOST_WAYS]:
        with suppress(DecentralError):
            found.append(Way(_card_towards(where, known), where.partition("/p2p/")[0], measure(where)))
    return found


def told(ways: Sequence[Way]) -> Iterator[Finding]:
    """A line for each when there are several; the last says which card to use, if it makes a difference."""
    if len(ways) < 2:
        return
    ranked = sorted(ways, key=lambda way: -min(way.speed.up, way.speed.down))
    for way in ranked:
        rates = f"{way.speed.up / 1e6:.1f} Mbit/s up, {way.speed.down / 1e6:.1f} down"
        yield Finding("ok", "card", f"at least {rates}, from {way.card or 'this machine'} to {way.address}")
    best, next_ = ranked[0], ranked[1]
    if min(best.speed.up, best.speed.down) > _WORTH_SAYING * min(next_.speed.up, next_.speed.down):
        there = best.address.rpartition("/tcp/")[0]
        here = f"start this peer with --listen {best.card} and " if best.card else ""
        yield Finding("warn", "card", f"the first is the fastest: {here}the other with --listen {there}/tcp/0")


def _card_towards(where: str, known: Cards) -> str:
    end = endpoint(where.partition("/p2p/")[0])
    if end is None:
        return ""
    family = socket.AF_INET6 if ":" in end[0] else socket.AF_INET
    with suppress(OSError):
        return card_of(source_of(family, end[0]), known)
    return ""
