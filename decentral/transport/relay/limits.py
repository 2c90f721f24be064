"""What a relay gives at most: places, connections, bytes, seconds, and the memory behind all of it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from decentral.errors import ConfigError
from decentral.flow.upload import Limits

_MOST_TOLD = 1 << 64  # what the message that tells it holds
_LEAST_NBYTES = 1 << 24  # our own peers pass a relay over that grants less
_LEAST_SECONDS = 60
_PROCESS = (
    64 << 20
)  # bytes: Python and what it imports are 35 MiB; the rest is what streams hold before they are refused
_OF_A_PEER = 192 << 10  # bytes of a connection that sends half a message and reads nothing; an idle one takes 60 KiB
_OF_A_PAIR = 3 << 19  # bytes of a joined pair of which neither side reads; 1.15 MiB were measured with 20 of them


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Ceilings of one relay. ``None``: no ceiling of that kind."""

    places: int = 128
    places_per_network: int = 32  # an IPv4 address, a /64 of IPv6: one household, one laboratory
    place_seconds: int = 3600  # until a place must be renewed; peers do so at half time
    connections: int = 128  # pairs joined at a time
    connections_per_peer: int = 64  # of them with one peer at either end
    connections_per_pair: int = 4  # both may dial at once, and a path may die unnoticed
    nbytes: int | None = 1 << 32  # that one connection carries each way, as go-libp2p's daemons grant
    seconds: int | None = 1800  # that one connection lasts
    rate: float | None = None  # bytes/s passed on, all connections together
    peers: int = 256  # connections to peers, with a place and without
    peers_per_network: int = 128  # of them; whoever has one address must not keep all others out
    windows: int = 1 << 24  # bytes that windows of fast connections may grow by, all together

    @classmethod
    def within(cls, memory: int, *, places: int, rate: float | None = None) -> RelayLimits:
        """As many connections as fit into ``memory`` bytes of the process, should nobody read what comes."""
        peers, windows = 2 * places + 16, memory // 16
        connections = (memory - _PROCESS - windows - peers * _OF_A_PEER) // _OF_A_PAIR
        if connections < 1:
            needed = (_PROCESS + peers * _OF_A_PEER + _OF_A_PAIR) * 16 // 15 // 10**6 + 1
            raise ConfigError(f"a relay of {places} places needs {needed} MB; allow more memory or fewer peers")
        return cls(
            places=places,
            peers=peers,
            peers_per_network=peers // 2,
            connections=connections,
            windows=windows,
            rate=rate,
        )

    @property
    def streams(self) -> Limits:
        """Inbound streams that go with it: one of each connection, and some that ask."""
        return Limits(peer_streams=self.connections_per_peer + 16, total_streams=self.connections + 64)

    def __post_init__(self) -> None:
        for name in ("places", "places_per_network", "connections", "connections_per_peer", "connections_per_pair"):
            self._check(name, 1)
        self._check("peers_per_network", 1)
        self._check("place_seconds", _LEAST_SECONDS)
        self._check("peers", self.places + 1)
        if self.nbytes is not None:
            self._check("nbytes", _LEAST_NBYTES)
        if self.seconds is not None:
            self._check("seconds", _LEAST_SECONDS)
        if self.nbytes is not None and self.nbytes >= _MOST_TOLD:
            raise ConfigError(f"RelayLimits(nbytes={self.nbytes}): below {_MOST_TOLD}; None for no limit")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"RelayLimits(rate={self.rate}): more than 0 bytes/s; None for no limit")

    def _check(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ConfigError(f"RelayLimits({name}={getattr(self, name)}): at least {least}")


def network_of(host: str) -> str:
    """What counts as one network: an IPv4 address, or the 64 bits that an IPv6 customer gets at least."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a name that was dialled from here
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
